"""llama: RMS norm, RoPE, grouped-query attention, SwiGLU or a mixture of experts.  Upstream: models/llama.cpp."""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import Attention, attn, inp_kv, rsqrt
from pyggmlkv.graph.blocks import FFN, Linear, Norm, QKVWeights, ffn, linear, norm, qkv
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.moe import MoE, Routing, moe_ffn
from pyggmlkv.graph.rope import RopeFactors, rope_qk
from pyggmlkv.models.loading import WeightLoader, check_heads

MEMORY = "attention"


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Norm
    qkv: QKVWeights
    wo: Linear
    rope: RopeFactors
    ffn_norm: Norm
    ffn: FFN | MoE


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    tok_embd: Tensor
    output_norm: Norm
    output: Linear
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    check_heads(kv, hp, rotated_whole=True)
    return dataclasses.replace(
        hp, rope_type="normal", f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS)
    )


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    return Layer(
        attn_norm=t.norm(f"blk.{il}.attn_norm"),
        qkv=t.qkv(il),
        wo=t.attn_output(il),
        ffn_norm=t.norm(f"blk.{il}.ffn_norm"),
        rope=t.rope_factors(il),
        ffn=t.moe(il) if hp.n_expert else t.ffn(il),
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
    how = Attention(kq_scale=hp.f_attention_scale or rsqrt(head_dim))
    cur = g.inp_embd(w.tok_embd)
    pos = g.inp_pos()
    inp = inp_kv(g)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        heads = rope_qk(g, qkv(g, layer.qkv, cur, head_dim, il), pos, il, layer.rope)
        cur = g.name(attn(g, inp, layer.wo, heads, how, il), "attn_out", il)
        if il == hp.n_layer - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        ffn_inp = g.name(ops.add(g.ctx, cur, residual), "ffn_inp", il)
        cur = g.name(norm(g, ffn_inp, layer.ffn_norm, il), "ffn_norm", il)
        if isinstance(layer.ffn, MoE):
            cur = moe_ffn(g, cur, layer.ffn, Routing(norm_w=True, w_scale=hp.expert_weights_scale), il)
        else:
            cur = g.name(ffn(g, cur, layer.ffn, "silu", il), "ffn_out", il)
        cur = g.name(ops.add(g.ctx, cur, ffn_inp), "l_out", il)
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    g.logits = g.expand(g.name(linear(g, w.output, g.embd), "result_output"))
