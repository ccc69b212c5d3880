"""bloom: no RoPE but ALiBi, layer norms with biases, plain GELU networks.  Upstream: models/bloom.cpp."""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import Attention, attn, inp_kv, rsqrt
from pyggmlkv.graph.blocks import FFN, Linear, Norm, QKVWeights, ffn, linear, norm, qkv
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.models.loading import WeightLoader, check_heads

MEMORY = "attention"


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Norm
    qkv: QKVWeights
    wo: Linear
    ffn_norm: Norm
    ffn: FFN


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    tok_embd: Tensor
    tok_norm: Norm
    output_norm: Norm
    output: Linear
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    check_heads(kv, hp)
    return dataclasses.replace(
        hp, f_norm_eps=kv.f32(keys.ATTENTION_LAYERNORM_EPS), use_alibi=True, f_max_alibi_bias=8.0
    )


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    b, n_ff = f"blk.{il}", hp.n_ff(il)
    return Layer(
        attn_norm=t.norm(f"{b}.attn_norm", bias="required"),
        qkv=t.fused_qkv(il, bias="required"),
        wo=t.attn_output(il, bias="required"),
        ffn_norm=t.norm(f"{b}.ffn_norm", bias="required"),
        ffn=FFN(
            down=t.linear(f"{b}.ffn_down", n_ff, hp.n_embd, bias="required"),
            up=t.linear(f"{b}.ffn_up", hp.n_embd, n_ff, bias="required"),
        ),
    )


def load_weights(t: WeightLoader, hp: HParams) -> Weights:
    return Weights(
        tok_embd=t.tok_embd(),
        tok_norm=t.norm("token_embd_norm", bias="required"),
        output_norm=t.norm("output_norm", bias="required"),
        output=t.output(),
        layers=tuple(load_layer(t, hp, il) for il in range(hp.n_layer)),
    )


def build(g: GraphBuilder, w: Weights) -> None:
    hp = g.hparams
    head_dim = hp.n_embd_head_v()
    how = Attention(kq_scale=rsqrt(head_dim))
    cur = g.inp_embd(w.tok_embd)
    inp = inp_kv(g)
    cur = g.name(norm(g, cur, w.tok_norm, 0, "layer"), "inp_norm", 0)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il, "layer"), "attn_norm", il)
        cur = attn(g, inp, layer.wo, qkv(g, layer.qkv, cur, head_dim, il), how, il)
        if il == hp.n_layer - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        ffn_inp = g.name(ops.add(g.ctx, cur, residual), "ffn_inp", il)
        cur = g.name(norm(g, ffn_inp, layer.ffn_norm, il, "layer"), "ffn_norm", il)
        cur = g.name(ffn(g, cur, layer.ffn, "gelu", il), "ffn_out", il)
        cur = g.name(ops.add(g.ctx, cur, ffn_inp), "l_out", il)
    g.embd = g.name(norm(g, cur, w.output_norm, -1, "layer"), "result_norm")
    g.logits = g.expand(g.name(linear(g, w.output, g.embd), "result_output"))
