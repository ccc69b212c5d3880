"""Attention: masked soft-max, flash attention, and the sparse indexer.

Upstream: ggml.c, ggml_soft_max_ext, ggml_flash_attn_ext, ggml_lightning_indexer.
"""

from __future__ import annotations

from typing import Any

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.dtypes import F16, F32
from pyggmlkv.binding.ops.checks import (
    F32_F16,
    PRECISIONS,
    READABLE,
    SIZE,
    choice,
    divides,
    dtype_error,
    enter,
    enter2,
    shape_error,
    want_contiguous,
    want_f32,
    want_ne,
    want_rows,
    want_same_shape,
)
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import BindingError, DTypeError


def _check_soft_max(name: str, ctx: TensorArena, a: Tensor, mask: Tensor | None, max_bias: float) -> None:
    enter(ctx, 1, a, mask)
    if a._type != F32:
        want_f32(name, a=a)
    want_contiguous(name, a=a)
    if mask is None:
        if max_bias > 0.0:
            raise BindingError(f"{name}: ALiBi (max_bias {max_bias}) needs a mask", max_bias=max_bias)
        return
    if mask._type not in F32_F16:
        raise dtype_error(name, "mask", mask, F32_F16)
    ane, mne = a.ne, mask.ne
    if mne[0] != ane[0] or mne[1] < ane[1] or not divides(mne[2], ane[2]) or not divides(mne[3], ane[3]):
        raise shape_error(
            name,
            "mask must be [ne0, at least ne1, ...] of a, further dimensions dividing those of a",
            a=a,
            mask=mask,
        )
    want_contiguous(name, mask=mask)


def _soft_max(
    name: str,
    function: Any,
    ctx: TensorArena,
    operands: tuple[Tensor, Tensor | None],
    factors: tuple[float, float],
) -> Tensor:
    a, mask = operands
    _check_soft_max(name, ctx, a, mask, factors[1])
    return ctx._made(function(ctx._p, a._p, ffi.NULL if mask is None else mask._p, *factors))


def soft_max(ctx: TensorArena, a: Tensor) -> Tensor:
    """Soft-max of each row; contiguous f32."""
    return _soft_max("soft_max", lib.ggml_soft_max_ext, ctx, (a, None), (1.0, 0.0))


def soft_max_inplace(ctx: TensorArena, a: Tensor) -> Tensor:
    """As `soft_max`, written into a."""
    return _soft_max("soft_max_inplace", lib.ggml_soft_max_ext_inplace, ctx, (a, None), (1.0, 0.0))


def soft_max_ext(ctx: TensorArena, a: Tensor, mask: Tensor | None, scale: float, max_bias: float) -> Tensor:
    """soft_max(a * scale + mask * ALiBi slope): a [n_kv, n_tokens, n_head, ...] f32, mask
    [n_kv, >= n_tokens, ...].
    """
    return _soft_max("soft_max_ext", lib.ggml_soft_max_ext, ctx, (a, mask), (scale, max_bias))


def soft_max_ext_inplace(
    ctx: TensorArena, a: Tensor, mask: Tensor | None, scale: float, max_bias: float
) -> Tensor:
    """As `soft_max_ext`, written into a."""
    return _soft_max("soft_max_ext_inplace", lib.ggml_soft_max_ext_inplace, ctx, (a, mask), (scale, max_bias))


def _add_sinks(name: str, a: Tensor, sinks: Tensor | None, op: int, slot: int) -> bool:
    """True if there is something to add."""
    pointer = a._pointer
    if pointer.op != op:
        raise BindingError(f"{name}: {a!r} is not the result of that op")
    if sinks is None:
        return True
    a.arena._adopt(sinks)
    want_f32(name, sinks=sinks)
    want_ne(name, "sinks", sinks, pointer.src[0].ne[2])
    if pointer.src[slot] != ffi.NULL:
        raise BindingError(f"{name}: {a!r} has sinks already")
    return True


def soft_max_add_sinks(a: Tensor, sinks: Tensor | None) -> None:
    """Let each head attend to a sink: sinks [n_head] f32; None takes them away."""
    _add_sinks("soft_max_add_sinks", a, sinks, lib.GGML_OP_SOFT_MAX, 2)
    lib.ggml_soft_max_add_sinks(a._p, ffi.NULL if sinks is None else sinks._p)


def _soft_max_back(
    name: str, function: Any, ctx: TensorArena, operands: tuple[Tensor, Tensor], factors: tuple[float, float]
) -> Tensor:
    a, b = operands
    enter2(ctx, a, b)
    want_f32(name, a=a, b=b)
    want_same_shape(name, a, b)
    want_contiguous(name, a=a, b=b)
    if factors[1] != 0.0:
        raise BindingError(
            f"{name}: ALiBi (max_bias {factors[1]}) has no gradient on the CPU", max_bias=factors[1]
        )
    return ctx._made(function(ctx._p, a._p, b._p, *factors))


def soft_max_ext_back(ctx: TensorArena, a: Tensor, b: Tensor, scale: float, max_bias: float) -> Tensor:
    """Gradient of soft_max_ext: a is that of the result, b the result."""
    return _soft_max_back("soft_max_ext_back", lib.ggml_soft_max_ext_back, ctx, (a, b), (scale, max_bias))


def soft_max_ext_back_inplace(
    ctx: TensorArena, a: Tensor, b: Tensor, scale: float, max_bias: float
) -> Tensor:
    """As `soft_max_ext_back`, written into a."""
    function = lib.ggml_soft_max_ext_back_inplace
    return _soft_max_back("soft_max_ext_back_inplace", function, ctx, (a, b), (scale, max_bias))


def _check_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    name = "flash_attn_ext"
    want_f32(name, q=q)
    for label, t in (("k", k), ("v", v)):
        if t._type not in READABLE:
            raise dtype_error(name, label, t, READABLE)
        if t._p.nb[0] != SIZE[t._type]:
            want_rows(name, label, t)
    want_rows(name, "q", q)
    qne, kne, vne = q.ne, k.ne, v.ne
    if kne[0] != qne[0] or kne[3] != qne[3] or vne[3] != qne[3] or kne[1] != vne[1]:
        raise shape_error(
            name, "expected q [d, n_tokens, n_head, s], k [d, n_kv, ...], v [d_v, n_kv, ...]", q=q, k=k, v=v
        )
    if not kne[1]:
        raise shape_error(name, "there are no keys", q=q, k=k, v=v)
    if not divides(kne[2], qne[2]) or not divides(vne[2], qne[2]):
        raise shape_error(name, "the heads of q must be a multiple of those of k and v", q=q, k=k, v=v)
    if mask is None:
        return
    if mask._type != F16:
        raise DTypeError(f"{name}: mask is {mask.dtype}, expected f16", given=mask.dtype)
    mne = mask.ne
    if mne[0] != kne[1] or mne[1] < qne[1] or not divides(mne[2], qne[2]) or not divides(mne[3], qne[3]):
        raise shape_error(name, "mask must be [n_kv, at least n_tokens, ...]", q=q, k=k, mask=mask)
    want_contiguous(name, mask=mask)


def flash_attn_ext(
    ctx: TensorArena,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    max_bias: float,
    logit_softcap: float,
) -> Tensor:
    """Attention in one op -> [d_v, n_head, n_tokens, s] f32.

    q [d, n_tokens, n_head, s] f32, k [d, n_kv, n_head_kv, s], v [d_v, n_kv, n_head_kv, s] (not transposed) of
    any readable type, mask [n_kv, >= n_tokens, ...] f16 contiguous.
    """
    enter(ctx, 1, q, k, v, mask)
    _check_flash(q, k, v, mask)
    if mask is None and max_bias > 0.0:
        raise BindingError(f"flash_attn_ext: ALiBi (max_bias {max_bias}) needs a mask", max_bias=max_bias)
    bias = ffi.NULL if mask is None else mask._p
    return ctx._made(lib.ggml_flash_attn_ext(ctx._p, q._p, k._p, v._p, bias, scale, max_bias, logit_softcap))


def flash_attn_ext_set_prec(a: Tensor, prec: str) -> None:
    """Accumulate in `f32`, or as the backend likes (`default`)."""
    number = choice("flash_attn_ext_set_prec", "prec", prec, PRECISIONS)
    _want_flash("flash_attn_ext_set_prec", a)
    lib.ggml_flash_attn_ext_set_prec(a._p, number)


def flash_attn_ext_get_prec(a: Tensor) -> str:
    """`f32` or `default`."""
    _want_flash("flash_attn_ext_get_prec", a)
    number = lib.ggml_flash_attn_ext_get_prec(a._p)
    return next(name for name, value in PRECISIONS.items() if value == number)


def _want_flash(name: str, a: Tensor) -> None:
    if a._pointer.op != lib.GGML_OP_FLASH_ATTN_EXT:
        raise BindingError(f"{name}: {a!r} is not the result of flash_attn_ext")


def flash_attn_ext_add_sinks(a: Tensor, sinks: Tensor | None) -> None:
    """Let each head attend to a sink: sinks [n_head] f32; None takes them away."""
    _add_sinks("flash_attn_ext_add_sinks", a, sinks, lib.GGML_OP_FLASH_ATTN_EXT, 4)
    lib.ggml_flash_attn_ext_add_sinks(a._p, ffi.NULL if sinks is None else sinks._p)


def flash_attn_back(ctx: TensorArena, q: Tensor, k: Tensor, v: Tensor, d: Tensor, masked: bool) -> Tensor:
    """Gradient of flash attention. Raises: BindingError always: upstream's function only aborts at this
    version.
    """
    enter(ctx, 1, q, k, v, d)
    raise BindingError("flash_attn_back is not implemented upstream (it aborts)", masked=masked)


def lightning_indexer(ctx: TensorArena, q: Tensor, k: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Scores of a sparse-attention indexer -> [n_kv, n_tokens, 1, s] f32.

    q [d, n_head, n_tokens, s] f32, k [d, 1, n_kv, s], weights [n_head, n_tokens, 1, s] f32, mask
    [n_kv, n_tokens] f16.
    """
    name = "lightning_indexer"
    enter(ctx, 1, q, k, weights, mask)
    want_f32(name, q=q, weights=weights)
    if mask._type != F16:
        raise DTypeError(f"{name}: mask is {mask.dtype}, expected f16", given=mask.dtype)
    if k._type not in READABLE:
        raise dtype_error(name, "k", k, READABLE)
    want_ne(name, "k", k, q.ne[0], 1, None, q.ne[3])
    want_ne(name, "weights", weights, q.ne[1], q.ne[2], 1, k.ne[3])
    want_ne(name, "mask", mask, k.ne[2], q.ne[2], 1)
    if not divides(mask.ne[3], weights.ne[3]):
        raise shape_error(
            name, "the last dimension of mask must divide that of weights", weights=weights, mask=mask
        )
    for label, t in (("q", q), ("k", k), ("weights", weights), ("mask", mask)):
        want_rows(name, label, t)
    return ctx._made(lib.ggml_lightning_indexer(ctx._p, q._p, k._p, weights._p, mask._p))
