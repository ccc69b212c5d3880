"""gemma3: sliding and full layers, norms on both sides of attention and network.  Upstream: models/gemma3.cpp."""

from __future__ import annotations

import dataclasses
import math

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import Attention, attn_any, inp_any, rsqrt
from pyggmlkv.graph.blocks import (
    FFN,
    QKV,
    Linear,
    Norm,
    QKVWeights,
    ffn,
    linear,
    norm,
    normed_qk,
    qkv,
    softcap,
)
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.rope import rope_qk
from pyggmlkv.models.loading import WeightLoader, check_heads

MEMORY = "attention"
N_LAYER_27B = 62


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Norm
    qkv: QKVWeights
    q_norm: Norm
    k_norm: Norm
    wo: Linear
    attn_post_norm: Norm
    ffn_norm: Norm
    ffn: FFN
    ffn_post_norm: Norm


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    tok_embd: Tensor
    output_norm: Norm
    output: Linear
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    check_heads(kv, hp)
    n_swa = kv.u32(keys.ATTENTION_SLIDING_WINDOW, 0)
    is_27b = hp.n_layer == N_LAYER_27B
    hp = dataclasses.replace(
        hp,
        rope_type="neox",
        n_swa=n_swa,
        swa_type="standard" if n_swa else "none",
        f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS),
        f_final_logit_softcapping=kv.f32(keys.FINAL_LOGIT_SOFTCAPPING, 0.0),
        f_attention_scale=rsqrt(hp.n_embd // hp.n_head() if is_27b else hp.n_embd_head_k()),
    )
    if not n_swa:
        return hp
    hp = dataclasses.replace(
        hp, rope_freq_base_train_swa=kv.f32(keys.ROPE_FREQ_BASE_SWA, hp.rope_freq_base_train_swa)
    )
    return hp.with_swa_pattern(kv.u32_if_scalar(keys.ATTENTION_SLIDING_WINDOW_PATTERN, 6))


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    return Layer(
        attn_norm=t.norm(f"blk.{il}.attn_norm"),
        qkv=t.qkv(il),
        wo=t.attn_output(il, bias="no"),
        attn_post_norm=t.norm(f"blk.{il}.post_attention_norm"),
        k_norm=t.norm(f"blk.{il}.attn_k_norm", hp.n_embd_head_k(il)),
        q_norm=t.norm(f"blk.{il}.attn_q_norm", hp.n_embd_head_k(il)),
        ffn_norm=t.norm(f"blk.{il}.ffn_norm"),
        ffn=t.ffn(il, bias="no"),
        ffn_post_norm=t.norm(f"blk.{il}.post_ffw_norm"),
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
    head_dim = hp.n_embd_head_k()
    how = Attention(kq_scale=1.0)
    scale = math.sqrt(hp.n_embd) if g.ubatch.token is not None else 1.0
    cur = g.name(ops.scale(g.ctx, g.inp_embd(w.tok_embd), scale), "inp_scaled")
    pos = g.inp_pos()
    inp = inp_any(g)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        heads = normed_qk(g, qkv(g, layer.qkv, cur, head_dim, il), layer.q_norm, layer.k_norm, il)
        q, k, v = rope_qk(g, heads, pos, il)
        cur = attn_any(g, inp, layer.wo, QKV(ops.scale(g.ctx, q, hp.f_attention_scale), k, v), how, il)
        if il == hp.n_layer - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        cur = g.name(norm(g, cur, layer.attn_post_norm, il), "attn_post_norm", il)
        sa_out = g.name(ops.add(g.ctx, cur, residual), "sa_out", il)
        cur = g.name(norm(g, sa_out, layer.ffn_norm, il), "ffn_norm", il)
        cur = g.name(ffn(g, cur, layer.ffn, "gelu", il), "ffn_out", il)
        cur = g.name(norm(g, cur, layer.ffn_post_norm, -1), "ffn_post_norm", il)
        cur = g.name(ops.add(g.ctx, cur, sa_out), "l_out", il)
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    cur = softcap(g, linear(g, w.output, g.embd), hp.f_final_logit_softcapping)
    g.logits = g.expand(g.name(cur, "result_output"))
