"""Recurrent layers: state-space models, RWKV, gated linear attention, gated delta net, hyper-connections;
f32.

Results hold the outputs first and the new states behind them, flat. Upstream: ggml.c, ggml_ssm_conv ...
ggml_dsv4_hc_post.
"""

from __future__ import annotations

from pyggmlkv._ggml import lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.ops.checks import (
    divides,
    enter,
    enter2,
    shape_error,
    want_contiguous,
    want_dims,
    want_f32,
    want_i32,
    want_ne,
    want_positive,
    want_rows,
)
from pyggmlkv.binding.tensor import Tensor


def ssm_conv(ctx: TensorArena, sx: Tensor, c: Tensor) -> Tensor:
    """Causal depthwise convolution: sx [d_conv - 1 + n_t, d_inner, n_seqs], c [d_conv, d_inner] -> [d_inner,
    n_t, n_seqs].
    """
    enter2(ctx, sx, c)
    want_f32("ssm_conv", sx=sx, c=c)
    want_dims("ssm_conv", "sx", sx, 3)
    want_dims("ssm_conv", "c", c, 2)
    if sx.ne[1] != c.ne[1] or sx.ne[0] < c.ne[0] - 1:
        raise shape_error(
            "ssm_conv", "expected sx [d_conv - 1 + n_t, d_inner, n_seqs], c [d_conv, d_inner]", sx=sx, c=c
        )
    want_rows("ssm_conv", "c", c)
    if sx.nb[0] != 4 or sx.nb[1] != sx.ne[0] * 4:
        raise shape_error("ssm_conv", "the rows of sx must follow each other, apply cont() first", sx=sx)
    return ctx._made(lib.ggml_ssm_conv(ctx._p, sx._p, c._p))


def ssm_scan(
    ctx: TensorArena,
    s: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    ids: Tensor,
    K: int = 1,
) -> Tensor:
    """Selective scan -> outputs like `x`, then the last `K` states of each sequence, flat.

    s [d_state, head_dim, n_head, n], x [head_dim, n_head, n_t, n_seqs], dt [n_head, n_t, n_seqs],
    A [d_state or 1, n_head], B and C [d_state, n_group, n_t, n_seqs], ids [n_seqs] i32 (which state of `s`).
    """
    name = "ssm_scan"
    enter(ctx, 1, s, x, dt, A, B, C, ids)
    want_f32(name, s=s, x=x, dt=dt, A=A, B=B, C=C)
    want_i32(name, "ids", ids)
    want_positive(name, K=K)
    want_contiguous(name, s=s, dt=dt, A=A)
    for label, t in (("x", x), ("B", B), ("C", C)):
        if t.nb[0] != 4 or t.nb[1] != t.ne[0] * 4:
            raise shape_error(name, f"the rows of {label} must follow each other", **{label: t})
    head_dim, n_head, n_t, n_seqs = x.ne
    want_ne(name, "dt", dt, n_head, n_t, n_seqs, 1)
    want_ne(name, "s", s, None, head_dim, n_head)
    want_ne(name, "B", B, s.ne[0], None, n_t, n_seqs)
    want_ne(name, "C", C, *B.ne)
    want_ne(name, "ids", ids, n_seqs, 1, 1, 1)
    want_ne(name, "A", A, None, n_head, 1, 1)
    if A.ne[0] not in (1, s.ne[0]) or (A.ne[0] != 1 and K != 1):
        raise shape_error(
            name, f"A must be [1, n_head], or [d_state, n_head] with K = 1 (K is {K})", s=s, A=A
        )
    if not B.ne[1] or n_head % B.ne[1]:
        raise shape_error(name, "the number of heads must be a multiple of the number of groups", x=x, B=B)
    operands = (s._p, x._p, dt._p, A._p, B._p, C._p, ids._p)
    return ctx._made(lib.ggml_ssm_scan(ctx._p, *operands, K))


def _same_heads(name: str, k: Tensor, state: Tensor, others: dict[str, Tensor]) -> None:
    """Everything f32 and contiguous, like k [S, H, n_tokens]; state of S * S * H elements for each
    sequence.
    """
    want_f32(name, k=k, state=state, **others)
    want_contiguous(name, k=k, state=state, **others)
    for label, t in others.items():
        want_ne(name, label, t, *k.ne[:3])
    n_seqs = state.ne[1]
    if state.n_elements != k.ne[0] * k.ne[0] * k.ne[1] * n_seqs:
        raise shape_error(
            name,
            "state must have S * S * H elements for each sequence, [S * S * H, n_seqs]",
            k=k,
            state=state,
        )
    if n_seqs and k.ne[2] % n_seqs:
        raise shape_error(name, f"{k.ne[2]} tokens cannot be shared by {n_seqs} sequences", k=k, state=state)


def rwkv_wkv6(
    ctx: TensorArena, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor
) -> Tensor:
    """RWKV 6: k, v, r, td [S, H, n_tokens], tf [S, H], state [S * S * H, n_seqs] -> [S * H, n_tokens + S *
    n_seqs].
    """
    enter(ctx, 1, k, v, r, tf, td, state)
    _same_heads("rwkv_wkv6", k, state, {"v": v, "r": r, "td": td})
    want_f32("rwkv_wkv6", tf=tf)
    want_contiguous("rwkv_wkv6", tf=tf)
    if tf.n_elements != k.ne[0] * k.ne[1]:
        raise shape_error("rwkv_wkv6", "tf must have S * H elements", k=k, tf=tf)
    return ctx._made(lib.ggml_rwkv_wkv6(ctx._p, k._p, v._p, r._p, tf._p, td._p, state._p))


def gated_linear_attn(
    ctx: TensorArena, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float
) -> Tensor:
    """Gated linear attention: k, v, q, g [S, H, n_tokens], state [S * S * H, n_seqs] -> [S * H, n_tokens + S
    * n_seqs].
    """
    enter(ctx, 1, k, v, q, g, state)
    _same_heads("gated_linear_attn", k, state, {"v": v, "q": q, "g": g})
    return ctx._made(lib.ggml_gated_linear_attn(ctx._p, k._p, v._p, q._p, g._p, state._p, scale))


def rwkv_wkv7(
    ctx: TensorArena, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> Tensor:
    """RWKV 7: all [S, H, n_tokens], state [S * S * H, n_seqs] -> [S * H, n_tokens + S * n_seqs].

    Raises: ShapeError unless S is a multiple of 64: the CPU's vector loop reads and writes in steps of up to
    64.
    """
    enter(ctx, 1, r, w, k, v, a, b, state)
    if k.ne[0] % 64:
        raise shape_error("rwkv_wkv7", "the head size must be a multiple of 64 (the CPU's vector step)", k=k)
    _same_heads("rwkv_wkv7", k, state, {"r": r, "w": w, "v": v, "a": a, "b": b})
    return ctx._made(lib.ggml_rwkv_wkv7(ctx._p, r._p, w._p, k._p, v._p, a._p, b._p, state._p))


def gated_delta_net(
    ctx: TensorArena, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, K: int = 1
) -> Tensor:
    """Gated delta rule -> [S * H, n_tokens * n_seqs + K * S * n_seqs]: outputs, then the last `K` states,
    newest first.

    q, k [S, H_k, n_tokens, n_seqs], v [S, H, n_tokens, n_seqs], g [1 or S, H, n_tokens, n_seqs],
    beta [1, H, n_tokens, n_seqs], state [S, S, H, n_seqs]; H a multiple of H_k.
    """
    name = "gated_delta_net"
    enter(ctx, 1, q, k, v, g, beta, state)
    want_f32(name, q=q, k=k, v=v, g=g, beta=beta, state=state)
    for label, t in (("q", q), ("k", k), ("v", v)):
        want_rows(name, label, t)
    want_contiguous(name, g=g, beta=beta, state=state)
    want_positive(name, K=K)
    size, n_head, n_tokens, n_seqs = v.ne
    want_ne(name, "q", q, size, None, n_tokens, None)
    want_ne(name, "k", k, *q.ne)
    if not divides(q.ne[1], n_head) or not divides(q.ne[3], n_seqs):
        raise shape_error(name, "heads and sequences of v must be multiples of those of q and k", q=q, v=v)
    want_ne(name, "g", g, None, n_head, n_tokens, n_seqs)
    if g.ne[0] not in (1, size):
        raise shape_error(name, f"g must have 1 or {size} gates a head", v=v, g=g)
    want_ne(name, "beta", beta, 1, n_head, n_tokens, n_seqs)
    want_ne(name, "state", state, size, size, n_head, n_seqs)
    return ctx._made(lib.ggml_gated_delta_net(ctx._p, q._p, k._p, v._p, g._p, beta._p, state._p, K))


def dsv4_hc_comb(
    ctx: TensorArena, mixes: Tensor, scale: Tensor, base: Tensor, eps: float, n_iter: int
) -> Tensor:
    """Combination weights of 4 streams: mixes [24, n_tokens], scale [3], base [24] -> [4, 4, n_tokens]."""
    name = "dsv4_hc_comb"
    enter(ctx, 1, mixes, scale, base)
    want_f32(name, mixes=mixes, scale=scale, base=base)
    want_positive(name, n_iter=n_iter)
    want_ne(name, "mixes", mixes, 24, None, 1, 1)
    want_ne(name, "scale", scale, None, 1, 1, 1)
    if scale.ne[0] < 3:
        raise shape_error(name, "scale must have at least 3 elements", scale=scale)
    want_ne(name, "base", base, 24, 1, 1, 1)
    for label, t in (("mixes", mixes), ("scale", scale), ("base", base)):
        want_rows(name, label, t)
    return ctx._made(lib.ggml_dsv4_hc_comb(ctx._p, mixes._p, scale._p, base._p, eps, n_iter))


def dsv4_hc_pre(ctx: TensorArena, x: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of streams: x [n_embd, hc, n_tokens], weights [hc, n_tokens] -> [n_embd, n_tokens]."""
    name = "dsv4_hc_pre"
    enter2(ctx, x, weights)
    want_f32(name, x=x, weights=weights)
    want_dims(name, "x", x, 3)
    if not x.ne[1]:
        raise shape_error(name, "x has no streams", x=x)
    want_ne(name, "weights", weights, x.ne[1], x.ne[2], 1, 1)
    want_rows(name, "x", x)
    want_rows(name, "weights", weights)
    return ctx._made(lib.ggml_dsv4_hc_pre(ctx._p, x._p, weights._p))


def dsv4_hc_post(ctx: TensorArena, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams after a layer: x [n_embd, n_tokens], residual [n_embd, hc, n_tokens], post [hc, n_tokens],
    comb [hc, hc, n_tokens] -> [n_embd, hc, n_tokens]."""
    name = "dsv4_hc_post"
    enter(ctx, 1, x, residual, post, comb)
    want_f32(name, x=x, residual=residual, post=post, comb=comb)
    want_dims(name, "x", x, 2)
    hc = residual.ne[1]
    if not hc:
        raise shape_error(name, "residual has no streams", residual=residual)
    want_ne(name, "residual", residual, x.ne[0], None, x.ne[1], 1)
    want_ne(name, "post", post, hc, x.ne[1], 1, 1)
    want_ne(name, "comb", comb, hc, hc, x.ne[1], 1)
    for label, t in (("x", x), ("residual", residual), ("post", post), ("comb", comb)):
        want_rows(name, label, t)
    return ctx._made(lib.ggml_dsv4_hc_post(ctx._p, x._p, residual._p, post._p, comb._p))
