"""Multi-head latent attention: keys and values compressed to one latent row a token, a rotary slice behind it.

With `k_b` the queries move into the latent space, and the cache holds one key head of rank + n_rot elements that is
read as V too; without it (`kv_b`) plain heads are decompressed before the cache.
Upstream: models/deepseek2.cpp, graph.
"""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.graph.blocks import QKV, Linear, Norm, norm
from pyggmlkv.graph.builder import GraphBuilder


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """To all heads' queries: one projection `q_b`, or two with a norm between them; `q_a` [n_embd, q_lora_rank]."""

    q_b: Linear
    q_a: Linear | None = None
    q_a_norm: Norm | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MLA:
    """Weights; `nope` is what of a head is not rotated.

    `kv_a_mqa` [n_embd, rank + n_rot], `k_b` [nope, rank, n_head] and `v_b` [rank, head_dim_v, n_head], or
    `kv_b` [rank, n_head * (nope + head_dim_v)].
    """

    q: Query
    kv_a_norm: Norm
    kv_a_mqa: Linear
    k_b: Tensor | None = None
    v_b: Tensor | None = None
    kv_b: Linear | None = None


def mla_heads(g: GraphBuilder, w: MLA, cur: Tensor, pos: Tensor, il: int) -> QKV:
    """Queries, keys and values of `cur` [n_embd, n_tokens]: latent ones, V the first part of K, or plain heads."""
    hp, ctx = g.hparams, g.ctx
    n_head, n, rot, rank = hp.n_head(il), g.n_tokens, hp.n_rot(), hp.n_lora_kv
    head_k = hp.n_embd_head_k_mla()
    nope = head_k - rot
    q = _query(g, w.q, cur, il)
    row, e = head_k * q.nb[0], q.nb[0]
    q_nope = g.name(ops.view_3d(ctx, q, nope, n_head, n, row, row * n_head, 0), "q_nope", il)
    q_pe = g.name(ops.view_3d(ctx, q, rot, n_head, n, row, row * n_head, nope * e), "q_pe", il)
    cmpr_pe = g.name(ops.mul_mat(ctx, w.kv_a_mqa.weight, cur), "kv_cmpr_pe", il)
    row = (rank + rot) * cmpr_pe.nb[0]
    cmpr = g.name(ops.view_2d(ctx, cmpr_pe, rank, n, row, 0), "kv_cmpr", il)
    k_pe = g.name(ops.view_3d(ctx, cmpr_pe, rot, 1, n, row, row, rank * e), "k_pe", il)
    params = g.rope_params(il)
    q_pe = g.name(ops.rope_ext(ctx, q_pe, pos, None, params), "q_pe", il)
    k_pe = g.name(ops.rope_ext(ctx, k_pe, pos, None, params), "k_pe", il)
    cmpr = g.name(norm(g, cmpr, w.kv_a_norm, il), "kv_cmpr", il)
    if w.k_b is not None:
        return _latent_heads(g, w.k_b, (q_nope, q_pe), (cmpr, k_pe), il)
    assert w.kv_b is not None
    return _plain_heads(g, w.kv_b, (q_nope, q_pe), (cmpr, k_pe), il)


def _query(g: GraphBuilder, w: Query, cur: Tensor, il: int) -> Tensor:
    """All heads' queries [n_head * head_k, n_tokens]."""
    if w.q_a is not None and w.q_a_norm is not None:
        cur = g.name(ops.mul_mat(g.ctx, w.q_a.weight, cur), "q", il)
        cur = g.name(norm(g, cur, w.q_a_norm, il), "q", il)
    return g.name(ops.mul_mat(g.ctx, w.q_b.weight, cur), "q", il)


def _latent_heads(
    g: GraphBuilder, k_b: Tensor, q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], il: int
) -> QKV:
    ctx, (q_nope, q_pe), (cmpr, k_pe) = g.ctx, q, kv
    q_nope = g.name(ops.permute(ctx, q_nope, 0, 2, 1, 3), "q_nope_perm", il)
    absorbed = g.name(ops.mul_mat(ctx, k_b, q_nope), "q_nope_absorbed", il)
    absorbed = g.name(ops.permute(ctx, absorbed, 0, 2, 1, 3), "q_nope_absorbed_perm", il)
    q_cur = g.name(ops.concat(ctx, absorbed, q_pe, 0), "Qcur", il)
    cmpr = g.name(ops.reshape_3d(ctx, cmpr, cmpr.ne[0], 1, g.n_tokens), "kv_cmpr_reshape", il)
    k_cur = g.name(ops.concat(ctx, cmpr, k_pe, 0), "Kcur", il)
    return QKV(q_cur, k_cur, g.name(cmpr, "Vcur", il))


def _plain_heads(
    g: GraphBuilder, kv_b: Linear, q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], il: int
) -> QKV:
    ctx, (q_nope, q_pe), (cmpr, k_pe) = g.ctx, q, kv
    nope, n_head, n = q_nope.ne[:3]
    v = g.hparams.n_embd_head_v_mla()
    both = g.name(ops.mul_mat(ctx, kv_b.weight, cmpr), "kv", il)
    row, e = (nope + v) * both.nb[0], both.nb[0]
    k_nope = g.name(ops.view_3d(ctx, both, nope, n_head, n, row, row * n_head, 0), "k_nope_view", il)
    v_cur = g.name(ops.view_3d(ctx, both, v, n_head, n, row, row * n_head, nope * e), "Vcur_view", il)
    v_cur = g.name(ops.cont(ctx, v_cur), "Vcur_cont", il)
    q_cur = g.name(ops.concat(ctx, q_nope, q_pe, 0), "Qcur", il)
    k_cur = g.name(ops.concat(ctx, k_nope, ops.repeat(ctx, k_pe, q_pe), 0), "Kcur", il)
    return QKV(q_cur, k_cur, v_cur)
