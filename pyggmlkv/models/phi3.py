"""phi3: fused projections, RoPE factors by the context's size, scaled queries.  Upstream: models/phi3.cpp."""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import Attention, attn, inp_kv, rsqrt
from pyggmlkv.graph.blocks import FFN, QKV, Linear, Norm, QKVWeights, ffn, linear, norm, qkv
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.rope import RopeFactors, rope_qk
from pyggmlkv.logs import logger
from pyggmlkv.models.loading import WeightLoader, check_heads

MEMORY = "attention"


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Norm
    qkv: QKVWeights
    wo: Linear
    rope: RopeFactors
    ffn_norm: Norm
    ffn: FFN


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    tok_embd: Tensor
    output_norm: Norm
    output: Linear
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    """A window that the file asks for is ignored, as in libllama: converted files have it wrong."""
    if n_swa := kv.u32(keys.ATTENTION_SLIDING_WINDOW, 0):
        logger.warning("phi3: the sliding window of %d positions is ignored, all layers are full", n_swa)
    check_heads(kv, hp)
    return dataclasses.replace(hp, rope_type="neox", f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS))


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    b, n_ff = f"blk.{il}", hp.n_ff(il)
    return Layer(
        attn_norm=t.norm(f"{b}.attn_norm"),
        qkv=t.qkv(il),
        wo=t.attn_output(il, bias="no"),
        ffn_norm=t.norm(f"{b}.ffn_norm"),
        ffn=FFN(
            down=t.linear(f"{b}.ffn_down", n_ff, hp.n_embd, bias="no"),
            up=t.linear(f"{b}.ffn_up", hp.n_embd, 2 * n_ff, bias="no"),
        ),
        rope=t.rope_long_short(il),
    )


def load_weights(t: WeightLoader, hp: HParams) -> Weights:
    return Weights(
        tok_embd=t.tok_embd(),
        output_norm=t.norm("output_norm"),
        output=t.output(),
        layers=tuple(load_layer(t, hp, il) for il in range(hp.n_layer)),
    )


def build(g: GraphBuilder, w: Weights) -> None:
    hp = g.hparams
    head_dim = hp.n_embd_head_v()
    how = Attention(kq_scale=1.0)
    cur = g.inp_embd(w.tok_embd)
    pos = g.inp_pos()
    inp = inp_kv(g)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        q, k, v = rope_qk(g, qkv(g, layer.qkv, cur, head_dim, il), pos, il, layer.rope)
        q = g.name(ops.scale(g.ctx, q, rsqrt(head_dim)), "Qcur", il)
        cur = attn(g, inp, layer.wo, QKV(q, k, v), how, il)
        if il == hp.n_layer - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        ffn_inp = ops.add(g.ctx, cur, residual)
        cur = g.name(norm(g, ffn_inp, layer.ffn_norm, il), "ffn_norm", il)
        cur = g.name(ffn(g, cur, layer.ffn, "swiglu", il), "ffn_out", il)
        cur = g.name(ops.add(g.ctx, ffn_inp, cur), "l_out", il)
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    g.logits = g.expand(g.name(linear(g, w.output, g.embd), "result_output"))
