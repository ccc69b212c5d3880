"""Attention: inputs of each memory kind, the cache write, the cached read, the product.

Sees memory by its protocol only; node order and names are libllama's.
Upstream: llm_graph_context::build_attn, build_attn_mha, build_attn_inp_*.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np

from pyggmlkv.binding import Tensor, dtypes, ops
from pyggmlkv.graph.blocks import QKV, Linear, linear
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.encoder_inputs import CrossInput, NoCacheInput
from pyggmlkv.graph.inputs import KVInput, SlidingInput
from pyggmlkv.memory.protocol import AttentionStep, SlidingStep


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """What one layer's attention adds to Q, K and V.

    `kq_b` bias [n_kv, n_tokens, n_head]; `sinks` [n_head]; `v_mla` [kv_lora_rank, head_dim_v, n_head].
    """

    kq_scale: float
    kq_b: Tensor | None = None
    sinks: Tensor | None = None
    v_mla: Tensor | None = None
    wo_prec_f32: bool = False


def rsqrt(n: int) -> float:
    """1 / sqrt(n), rounded as C's `1.0f/sqrtf(n)` rounds it."""
    return float(np.float32(1.0) / np.sqrt(np.float32(n)))


def _inverse(x: float) -> float:
    return float(np.float32(1.0) / np.float32(x))


def inp_kv(g: GraphBuilder, *, has_v: bool = True) -> KVInput:
    """Inputs of an attention memory; `has_v` False for a latent (MLA) cache.  Upstream: build_attn_inp_kv / _k."""
    inp = kv_input(g, cast(AttentionStep, g.step), has_v=has_v)
    g.add_input(inp)
    return inp


def inp_kv_iswa(g: GraphBuilder) -> SlidingInput:
    """Inputs of both halves of a sliding-window memory.  Upstream: build_attn_inp_kv_iswa."""
    inp = sliding_input(g, cast(SlidingStep, g.step))
    g.add_input(inp)
    return inp


def kv_input(g: GraphBuilder, step: AttentionStep, *, has_v: bool = True) -> KVInput:
    """The inputs of `step`, which may be a part of the graph's own; the caller adds them to the graph."""
    return KVInput(g.ctx, step, g.cparams.flash_attn, g.cparams.causal_attn, has_v)


def sliding_input(g: GraphBuilder, step: SlidingStep) -> SlidingInput:
    """As `kv_input`, for both halves of a sliding-window memory."""
    return SlidingInput(kv_input(g, step.base), kv_input(g, step.swa))


def hadamard(g: GraphBuilder, cur: Tensor, rot: Tensor) -> Tensor:
    """Turn every `n` elements of `cur` by `rot` [n, n]; its own inverse.  Upstream: llama_mul_mat_hadamard."""
    n = rot.ne[0]
    rows = cur.n_elements // n
    flat = ops.reshape_2d(g.ctx, cur, n, rows) if cur.is_contiguous() else ops.cont_2d(g.ctx, cur, n, rows)
    turned = ops.mul_mat(g.ctx, rot, flat)
    ops.mul_mat_set_hint(turned, "src0_is_hadamard")
    return ops.reshape_4d(g.ctx, turned, *cur.ne)


def attn(g: GraphBuilder, inp: KVInput, wo: Linear | None, heads: QKV, how: Attention, il: int) -> Tensor:
    """Write K and V, attend to the cache, project: [n_embd, n_tokens].  Upstream: build_attn (llm_graph_input_attn_kv).

    K is expanded last so that a backend can fuse its RoPE with the cache write.
    """
    heads = _rotated(g, inp, heads)
    for t in (heads.q, heads.v, heads.k):
        g.expand(t)
    return _attend(g, inp, wo, heads, how, il)


def attn_iswa(
    g: GraphBuilder, inp: SlidingInput, wo: Linear | None, heads: QKV, how: Attention, il: int
) -> Tensor:
    """As `attn`, on the half that layer `il` belongs to.  Upstream: build_attn (llm_graph_input_attn_kv_iswa)."""
    half = inp.swa if g.hparams.is_swa(il) else inp.base
    heads = _rotated(g, half, heads)
    for t in heads:
        g.expand(t)
    return _attend(g, half, wo, heads, how, il)


def _rotated(g: GraphBuilder, inp: KVInput, heads: QKV) -> QKV:
    """Heads as a cache with attention rotation stores and reads them."""
    q, k, v = heads
    if inp.k_rot is not None:
        q, k = hadamard(g, q, inp.k_rot.tensor), hadamard(g, k, inp.k_rot.tensor)
    if inp.v_rot is not None:
        v = hadamard(g, v, inp.v_rot.tensor)
    return QKV(q, k, v)


def _attend(g: GraphBuilder, inp: KVInput, wo: Linear | None, heads: QKV, how: Attention, il: int) -> Tensor:
    step, (q, k_cur, v_cur) = inp.step, heads
    g.expand(step.cpy_k(g.ctx, k_cur, inp.k_idxs.tensor, il))
    if inp.v_idxs is not None:
        g.expand(step.cpy_v(g.ctx, v_cur, inp.v_idxs.tensor, il))
        k, v = step.get_k(g.ctx, il), step.get_v(g.ctx, il)
    else:
        k = step.get_k(g.ctx, il)
        v = ops.view_4d(g.ctx, k, v_cur.ne[0], *k.ne[1:], *k.nb[1:], 0)
    cur = g.name(mha(g, QKV(q, k, v), inp.mask.tensor, how, il), "kqv_out", il)
    if inp.v_rot is not None:
        cur = hadamard(g, cur, inp.v_rot.tensor)
    return project(g, wo, cur, how)


def inp_any(g: GraphBuilder) -> KVInput | SlidingInput:
    """Inputs of whichever attention memory the model was given: architectures with and without sliding layers."""
    return inp_kv_iswa(g) if g.hparams.swa_type != "none" else inp_kv(g)


def attn_any(
    g: GraphBuilder, inp: KVInput | SlidingInput, wo: Linear | None, heads: QKV, how: Attention, il: int
) -> Tensor:
    """`attn` or `attn_iswa`, as `inp` was made."""
    if isinstance(inp, SlidingInput):
        return attn_iswa(g, inp, wo, heads, how, il)
    return attn(g, inp, wo, heads, how, il)


def inp_no_cache(g: GraphBuilder) -> NoCacheInput:
    """Masks for attention among the ubatch's own tokens.  Upstream: build_attn_inp_no_cache."""
    cp = g.cparams
    inp = NoCacheInput(g.ctx, g.n_tokens, g.hparams, flash_attn=cp.flash_attn, causal=cp.causal_attn)
    g.add_input(inp)
    return inp


def attn_no_cache(
    g: GraphBuilder, inp: NoCacheInput, wo: Linear | None, heads: QKV, how: Attention, il: int
) -> Tensor:
    """Attention among the ubatch's own tokens.  Upstream: build_attn (llm_graph_input_attn_no_cache)."""
    for t in heads:
        g.expand(t)
    cur = g.name(mha(g, heads, inp.mask(g.hparams.is_swa(il)), how, il), "kqv_out", il)
    return project(g, wo, cur, how)


def inp_cross(g: GraphBuilder) -> CrossInput:
    """Encoder rows and their mask.  Upstream: build_inp_cross_embd, build_attn_inp_cross."""
    assert g.params.cross is not None
    inp = CrossInput(g.ctx, g.n_tokens, g.params.cross, flash_attn=g.cparams.flash_attn)
    g.add_input(inp)
    return inp


def attn_cross(
    g: GraphBuilder, inp: CrossInput, wo: Linear | None, heads: QKV, how: Attention, il: int
) -> Tensor:
    """Attention of decoder tokens to encoder rows.  Upstream: build_attn (llm_graph_input_attn_cross)."""
    for t in heads:
        g.expand(t)
    return project(g, wo, g.name(mha(g, heads, inp.mask, how, il), "kqv_out", il), how)


def project(g: GraphBuilder, wo: Linear | None, cur: Tensor, how: Attention) -> Tensor:
    """The output projection and its bias."""
    if wo is None:
        return cur
    if how.wo_prec_f32:
        cur = ops.mul_mat(g.ctx, wo.weight, cur)
        ops.mul_mat_set_prec(cur, "f32")
        cur = cur if wo.scale is None else ops.mul(g.ctx, cur, wo.scale)
    else:
        cur = linear(g, wo, cur)
    return cur if wo.bias is None else ops.add(g.ctx, cur, wo.bias)


def mha(g: GraphBuilder, qkv: QKV, mask: Tensor | None, how: Attention, il: int) -> Tensor:
    """softmax(Q K^T) V for all heads and streams: [head_dim_v * n_head, n_tokens].  Upstream: build_attn_mha."""
    q, k, v = qkv
    v_trans = v.nb[1] > v.nb[2]
    ns = k.ne[3]
    q = ops.view_4d(g.ctx, q, q.ne[0], q.ne[1], q.ne[2] // ns, ns, q.nb[1], q.nb[2], q.nb[3] // ns, 0)
    q, k, v = (ops.permute(g.ctx, t, 0, 2, 1, 3) for t in (q, k, v))
    if g.cparams.flash_attn and how.kq_b is None:
        cur = _flash(g, QKV(q, k, ops.transpose(g.ctx, v) if v_trans else v), mask, how, il)
    else:
        cur = _softmax(g, QKV(q, k, v), v_trans, mask, how, il)
        if not g.cparams.offload_kqv and g.params.place_on_cpu is not None:
            g.params.place_on_cpu(cur)
    return g.expand(cur)


def _flash(g: GraphBuilder, qkv: QKV, mask: Tensor | None, how: Attention, il: int) -> Tensor:
    hp = g.hparams
    q, k, v = qkv
    k = ops.cast(g.ctx, k, "f16") if k.dtype == "f32" else k
    v = ops.cast(g.ctx, v, "f16") if v.dtype == "f32" else v
    cap = hp.f_attn_logit_softcapping if hp.attn_soft_cap else 0.0
    cur = ops.flash_attn_ext(g.ctx, q, k, v, mask, how.kq_scale, hp.f_max_alibi_bias, cap)
    g.fused.append(("flash_attn", cur, il))
    ops.flash_attn_ext_add_sinks(cur, how.sinks)
    ops.flash_attn_ext_set_prec(cur, "f32")
    if how.v_mla is not None:
        cur = ops.permute(g.ctx, cur, 0, 2, 1, 3)
        cur = g.name(ops.mul_mat(g.ctx, how.v_mla, cur), "fattn_mla", il)
        cur = ops.cont(g.ctx, ops.permute(g.ctx, cur, 0, 2, 1, 3))
    return ops.reshape_2d(g.ctx, cur, cur.ne[0] * cur.ne[1], cur.ne[2] * cur.ne[3])


def _softmax(
    g: GraphBuilder, qkv: QKV, v_trans: bool, mask: Tensor | None, how: Attention, il: int
) -> Tensor:
    """Differs: a quantised V is read as f32 before it is transposed, where upstream moves its blocks as elements."""
    hp = g.hparams
    q, k, v = qkv
    kq = g.name(ops.mul_mat(g.ctx, k, q), "kq", il)
    ops.mul_mat_set_prec(kq, "f32")
    if hp.attn_soft_cap:
        kq = g.name(ops.scale(g.ctx, kq, _inverse(hp.f_attn_logit_softcapping)), "kq_scaled_1", il)
        kq = g.name(ops.tanh(g.ctx, kq), "kq_tanh", il)
        kq = g.name(ops.scale(g.ctx, kq, hp.f_attn_logit_softcapping), "kq_scaled_2", il)
    if how.kq_b is not None:
        kq = g.name(ops.add(g.ctx, kq, how.kq_b), "kq_plus_kq_b", il)
    kq = ops.soft_max_ext(g.ctx, kq, mask, how.kq_scale, hp.f_max_alibi_bias)
    ops.soft_max_add_sinks(kq, how.sinks)
    g.name(kq, "kq_soft_max", il)
    if not v_trans:
        v = ops.cast(g.ctx, v, "f32") if dtypes.dtype_info(v.dtype).is_quantized else v
        v = g.name(ops.cont(g.ctx, ops.transpose(g.ctx, v)), "v_cont", il)
    kqv = g.name(ops.mul_mat(g.ctx, v, kq), "kqv", il)
    if how.v_mla is not None:
        kqv = g.name(ops.mul_mat(g.ctx, how.v_mla, kqv), "kqv_mla", il)
    cur = ops.permute(g.ctx, kqv, 0, 2, 1, 3)
    return ops.cont_2d(g.ctx, cur, cur.ne[0] * cur.ne[1], cur.ne[2] * cur.ne[3])
