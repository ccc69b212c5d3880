"""lfm2: short convolutions with two gates, and normed attention in some layers.  Upstream: models/lfm2.cpp."""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import Attention, attn_any, rsqrt
from pyggmlkv.graph.blocks import FFN, QKV, Linear, Norm, QKVWeights, ffn, linear, norm, qkv
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.inputs import HybridInput, RecurrentInput
from pyggmlkv.graph.recurrent import inp_hybrid
from pyggmlkv.graph.rope import turned_qk
from pyggmlkv.graph.ssm import read_window, write_windows
from pyggmlkv.models.loading import WeightLoader, check_heads

MEMORY = "hybrid"
HF = "model.layers.{}."
"""Nodes keep the names of the original implementation, as libllama has them."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionWeights:
    qkv: QKVWeights
    q_norm: Norm
    k_norm: Norm
    wo: Linear


@dataclasses.dataclass(frozen=True, slots=True)
class ShortConv:
    """`conv` [l_cache, n_embd], `in_proj` [n_embd, 3 * n_embd], `out_proj` [n_embd, n_embd]."""

    conv: Tensor
    in_proj: Linear
    out_proj: Linear


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Norm
    mixer: ShortConv | AttentionWeights
    ffn_norm: Norm
    ffn: FFN


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    tok_embd: Tensor
    output_norm: Norm
    output: Linear
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    check_heads(kv, hp)
    l_cache = kv.u32(keys.SHORTCONV_L_CACHE)
    if l_cache < 2:
        kv.refuse(keys.SHORTCONV_L_CACHE, "a convolution over 2 tokens or more", str(l_cache))
    if not hp.causal_attn and l_cache % 2 == 0:
        kv.refuse(keys.SHORTCONV_L_CACHE, "an odd window, as attention is not causal", str(l_cache))
    is_recr = tuple(n == 0 for n in hp.n_head_kv_arr)
    n_swa = kv.u32(keys.ATTENTION_SLIDING_WINDOW, 0)
    return dataclasses.replace(
        hp,
        rope_type="neox",
        n_shortconv_l_cache=l_cache,
        f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS),
        is_recr_impl=is_recr,
        n_swa=n_swa,
        swa_type="standard" if n_swa else "none",
        is_swa_impl=tuple(n_swa > 0 and not recr for recr in is_recr),
    )


def load_mixer(t: WeightLoader, hp: HParams, il: int) -> ShortConv | AttentionWeights:
    b, n_embd = f"blk.{il}", hp.n_embd
    if hp.is_recr(il):
        return ShortConv(
            conv=t.tensor(f"{b}.shortconv.conv.weight", hp.n_shortconv_l_cache, n_embd),
            in_proj=t.linear(f"{b}.shortconv.in_proj", n_embd, 3 * n_embd, bias="no"),
            out_proj=t.linear(f"{b}.shortconv.out_proj", n_embd, n_embd, bias="no"),
        )
    return AttentionWeights(
        q_norm=t.norm(f"{b}.attn_q_norm", hp.n_embd_head_k(il)),
        k_norm=t.norm(f"{b}.attn_k_norm", hp.n_embd_head_k(il)),
        qkv=t.qkv(il),
        wo=t.attn_output(il, bias="no"),
    )


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    return Layer(
        ffn_norm=t.norm(f"blk.{il}.ffn_norm"),
        ffn=t.ffn(il, bias="no"),
        attn_norm=t.norm(f"blk.{il}.attn_norm"),
        mixer=load_mixer(t, hp, il),
    )


def load_weights(t: WeightLoader, hp: HParams) -> Weights:
    return Weights(
        tok_embd=t.tok_embd(),
        output_norm=t.output_norm_lfm2(),
        output=t.output(),
        layers=tuple(load_layer(t, hp, il) for il in range(hp.n_layer)),
    )


def attention(
    g: GraphBuilder, inp: HybridInput, w: AttentionWeights, cur: Tensor, pos: Tensor, il: int
) -> Tensor:
    head_dim = g.hparams.n_embd_head_v()
    q, k, v = qkv(g, w.qkv, cur, head_dim, il)
    q = g.name(norm(g, q, w.q_norm, il), HF + "self_attn.q_layernorm", il)
    k = g.name(norm(g, k, w.k_norm, il), HF + "self_attn.k_layernorm", il)
    heads = turned_qk(g, QKV(q, k, v), pos, il)
    cur = attn_any(g, inp.attn, w.wo, heads, Attention(kq_scale=rsqrt(head_dim)), il)
    return g.name(cur, HF + "self_attn.out_proj", il)


def shortconv(g: GraphBuilder, inp: RecurrentInput, w: ShortConv, cur: Tensor, il: int) -> Tensor:
    """`cur` [n_embd, n_tokens] gated, convolved over the last tokens, gated again; same shape back."""
    ctx, hp = g.ctx, g.hparams
    n_embd, n_t, n_seqs = hp.n_embd, g.ubatch.n_seq_tokens, g.ubatch.n_seqs
    d_conv = hp.n_shortconv_l_cache - 1
    cur = ops.reshape_3d(ctx, cur, n_embd, n_t, n_seqs)
    bcx = g.name(linear(g, w.in_proj, cur), HF + "conv.in_proj", il)
    b, c, x = (
        ops.view_3d(ctx, bcx, n_embd, n_t, n_seqs, *bcx.nb[1:3], i * n_embd * bcx.nb[0]) for i in range(3)
    )
    columns = ops.transpose(ctx, ops.mul(ctx, b, x))
    window = read_window(g, inp, il, d_conv)
    if hp.causal_attn:
        columns = ops.concat(ctx, window, columns, 0)
    else:
        pad = d_conv // 2
        first = (d_conv - pad) * window.nb[0]
        left = ops.cont(ctx, ops.view_3d(ctx, window, pad, n_embd, n_seqs, *window.nb[1:3], first))
        columns = ops.pad_ext(ctx, ops.concat(ctx, left, columns, 0), 0, pad, 0, 0, 0, 0, 0, 0)
    write_windows(g, inp, il, columns, d_conv)
    conv_out = g.name(ops.ssm_conv(ctx, columns, w.conv), HF + "conv.conv", il)
    y = g.name(linear(g, w.out_proj, ops.mul(ctx, c, conv_out)), HF + "conv.out_proj", il)
    return ops.reshape_2d(ctx, y, n_embd, n_t * n_seqs)


def build(g: GraphBuilder, w: Weights) -> None:
    hp = g.hparams
    cur = g.name(g.inp_embd(w.tok_embd), "model.embed_tokens")
    inp = inp_hybrid(g)
    pos = g.inp_pos()
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), HF + "operator_norm", il)
        if isinstance(layer.mixer, ShortConv):
            cur = shortconv(g, inp.recr, layer.mixer, cur, il)
        else:
            cur = attention(g, inp, layer.mixer, cur, pos, il)
        if il == hp.n_layer - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        cur = ops.add(g.ctx, residual, cur)
        normed = g.name(norm(g, cur, layer.ffn_norm, il), HF + "ffn_norm", il)
        out = ffn(g, normed, layer.ffn, "silu", il)
        g.name(normed, HF + "ffn_out", il)
        cur = g.name(ops.add(g.ctx, cur, out), "l_out", il)
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    if g.cparams.embeddings:
        g.expand(g.embd)
    else:
        g.logits = g.expand(g.name(linear(g, w.output, g.embd), "result_output"))
