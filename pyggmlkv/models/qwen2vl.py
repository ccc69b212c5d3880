"""qwen2vl: qwen2 with M-RoPE: a token's position is time, row and column.  Upstream: models/qwen2vl.cpp."""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import Attention, attn, inp_kv, rsqrt
from pyggmlkv.graph.blocks import FFN, Linear, Norm, QKVWeights, ffn, linear, norm, qkv
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.rope import rope_qk
from pyggmlkv.models.loading import WeightLoader, check_heads

MEMORY = "attention"
NO_EPSILON = 0.0
"""Upstream reads no epsilon of the norms for this architecture, so its graphs have none."""


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
    output_norm: Norm
    output: Linear
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    check_heads(kv, hp, rotated_whole=True)
    a, b, c, d = kv.u32_per_layer(keys.ROPE_DIMENSION_SECTIONS, 4)
    return dataclasses.replace(hp, rope_type="mrope", rope_sections=(a, b, c, d), f_norm_rms_eps=NO_EPSILON)


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    return Layer(
        attn_norm=t.norm(f"blk.{il}.attn_norm"),
        qkv=t.qkv(il),
        wo=t.attn_output(il, bias="no"),
        ffn_norm=t.norm(f"blk.{il}.ffn_norm"),
        ffn=t.ffn(il, bias="no"),
    )


def load_weights(t: WeightLoader, hp: HParams) -> Weights:
    return Weights(
        tok_embd=t.tok_embd(),
        output_norm=t.norm("output_norm"),
        output=t.output(bias="optional"),
        layers=tuple(load_layer(t, hp, il) for il in range(hp.n_layer)),
    )


def build(g: GraphBuilder, w: Weights) -> None:
    hp = g.hparams
    head_dim = hp.n_embd_head_v()
    how = Attention(kq_scale=rsqrt(head_dim))
    cur = g.inp_embd(w.tok_embd)
    pos = g.inp_pos()
    inp = inp_kv(g)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        heads = rope_qk(g, qkv(g, layer.qkv, cur, head_dim, il), pos, il)
        cur = attn(g, inp, layer.wo, heads, how, il)
        if il == hp.n_layer - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        ffn_inp = g.name(ops.add(g.ctx, cur, residual), "ffn_inp", il)
        cur = g.name(norm(g, ffn_inp, layer.ffn_norm, il), "ffn_norm", il)
        cur = g.name(ffn(g, cur, layer.ffn, "silu", il), "ffn_out", il)
        cur = g.name(ops.add(g.ctx, cur, ffn_inp), "l_out", il)
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    g.logits = g.expand(g.name(linear(g, w.output, g.embd), "result_output"))
