"""Sums, means, sorting, and tensors made of numbers alone. Upstream: ggml.c, ggml_sum ... ggml_argsort,
ggml_arange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from pyggmlkv._ggml import lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.ops.checks import (
    F32_F16,
    FLOAT,
    choice,
    enter,
    enter1,
    enter2,
    shape_error,
    want_contiguous,
    want_contiguous_1,
    want_dims,
    want_dtype,
    want_f32,
    want_i32,
    want_positive,
    want_rows,
    want_same_shape,
)
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import ShapeError

_ORDERS: Mapping[str, int] = MappingProxyType(
    {"asc": lib.GGML_SORT_ORDER_ASC, "desc": lib.GGML_SORT_ORDER_DESC}
)
_TRIANGLES: Mapping[str, int] = MappingProxyType(
    {
        "upper_diag": lib.GGML_TRI_TYPE_UPPER_DIAG,
        "upper": lib.GGML_TRI_TYPE_UPPER,
        "lower_diag": lib.GGML_TRI_TYPE_LOWER_DIAG,
        "lower": lib.GGML_TRI_TYPE_LOWER,
    }
)


def sum(ctx: TensorArena, a: Tensor) -> Tensor:
    """The sum of all elements, [1] of the type of `a`."""
    enter1(ctx, a)
    want_dtype("sum", "a", a, FLOAT)
    want_rows("sum", "a", a)
    return ctx._made(lib.ggml_sum(ctx._p, a._p))


def _rows_of_f32(name: str, ctx: TensorArena, a: Tensor) -> None:
    enter1(ctx, a)
    want_f32(name, a=a)
    want_rows(name, "a", a)


def sum_rows(ctx: TensorArena, a: Tensor) -> Tensor:
    """The sum of each row: [n, ...] f32 -> [1, ...]."""
    _rows_of_f32("sum_rows", ctx, a)
    return ctx._made(lib.ggml_sum_rows(ctx._p, a._p))


def cumsum(ctx: TensorArena, a: Tensor) -> Tensor:
    """Running sums of each row; f32."""
    _rows_of_f32("cumsum", ctx, a)
    return ctx._made(lib.ggml_cumsum(ctx._p, a._p))


def mean(ctx: TensorArena, a: Tensor) -> Tensor:
    """The mean of each row: [n, ...] f32 -> [1, ...]."""
    _rows_of_f32("mean", ctx, a)
    return ctx._made(lib.ggml_mean(ctx._p, a._p))


def argmax(ctx: TensorArena, a: Tensor) -> Tensor:
    """The index of the largest element of each row: [n, rows] f32 -> [rows] i32."""
    _rows_of_f32("argmax", ctx, a)
    want_dims("argmax", "a", a, 2)
    _want_int_rows("argmax", a)
    return ctx._made(lib.ggml_argmax(ctx._p, a._p))


def _want_int_rows(name: str, a: Tensor) -> None:
    if a.ne[0] >= 2**31:
        raise shape_error(name, "rows must have fewer than 2**31 elements", a=a)


def count_equal(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """How many elements are equal: i32 of one shape -> [1] i64."""
    enter2(ctx, a, b)
    want_i32("count_equal", "a", a)
    want_i32("count_equal", "b", b)
    want_same_shape("count_equal", a, b)
    return ctx._made(lib.ggml_count_equal(ctx._p, a._p, b._p))


def argsort(ctx: TensorArena, a: Tensor, order: str) -> Tensor:
    """Indices that sort each row, `asc` or `desc`: f32 -> i32."""
    number = choice("argsort", "order", order, _ORDERS)
    _rows_of_f32("argsort", ctx, a)
    want_contiguous_1("argsort", a)
    _want_int_rows("argsort", a)
    return ctx._made(lib.ggml_argsort(ctx._p, a._p, number))


def _want_k(name: str, a: Tensor, k: int) -> None:
    if not 0 < k <= a.ne[0]:
        raise shape_error(name, f"k must be 1 to the {a.ne[0]} elements of a row, got {k}", a=a)


def argsort_top_k(ctx: TensorArena, a: Tensor, k: int) -> Tensor:
    """Indices of the `k` largest elements of each row, largest first: [n, ...] f32 -> view [k, ...] i32."""
    enter(ctx, 2, a)
    _rows_of_f32("argsort_top_k", ctx, a)
    want_contiguous_1("argsort_top_k", a)
    _want_int_rows("argsort_top_k", a)
    _want_k("argsort_top_k", a, k)
    return ctx._made_many(lib.ggml_argsort_top_k(ctx._p, a._p, k), 2)


def top_k(ctx: TensorArena, a: Tensor, k: int) -> Tensor:
    """As `argsort_top_k`, in no particular order and without the sort: [n, ...] f32 -> [k, ...] i32."""
    _rows_of_f32("top_k", ctx, a)
    want_contiguous_1("top_k", a)
    _want_k("top_k", a, k)
    return ctx._made(lib.ggml_top_k(ctx._p, a._p, k))


def arange(ctx: TensorArena, start: float, stop: float, step: float) -> Tensor:
    """start, start + step, ... below stop; f32."""
    enter(ctx, 1)
    if not (stop > start and step > 0) or not math.isfinite(stop - start):
        raise ShapeError(f"arange: expected start < stop and step > 0, got {start}, {stop}, {step}")
    return ctx._made(lib.ggml_arange(ctx._p, start, stop, step))


def _check_fill(name: str, ctx: TensorArena, a: Tensor) -> None:
    enter1(ctx, a)
    want_dtype(name, "a", a, F32_F16)
    want_contiguous(name, a=a)


def fill(ctx: TensorArena, a: Tensor, c: float) -> Tensor:
    """`c` everywhere, in the shape and type of `a` (f32, f16)."""
    _check_fill("fill", ctx, a)
    return ctx._made(lib.ggml_fill(ctx._p, a._p, c))


def fill_inplace(ctx: TensorArena, a: Tensor, c: float) -> Tensor:
    """As `fill`, written into a."""
    _check_fill("fill_inplace", ctx, a)
    return ctx._made(lib.ggml_fill_inplace(ctx._p, a._p, c))


def tri(ctx: TensorArena, a: Tensor, type: str) -> Tensor:
    """0 outside of a triangle of square matrices: `upper_diag`, `upper`, `lower_diag`, `lower`; contiguous
    f32.
    """
    number = choice("tri", "type", type, _TRIANGLES)
    enter1(ctx, a)
    want_f32("tri", a=a)
    want_contiguous("tri", a=a)
    if a.ne[0] != a.ne[1]:
        raise shape_error("tri", "the matrices must be square", a=a)
    return ctx._made(lib.ggml_tri(ctx._p, a._p, number))


def timestep_embedding(ctx: TensorArena, timesteps: Tensor, dim: int, max_period: int) -> Tensor:
    """Cosines and sines of time steps: [n] f32 -> [dim, n] f32."""
    enter1(ctx, timesteps)
    want_f32("timestep_embedding", timesteps=timesteps)
    want_rows("timestep_embedding", "timesteps", timesteps)
    want_positive("timestep_embedding", dim=dim, max_period=max_period)
    return ctx._made(lib.ggml_timestep_embedding(ctx._p, timesteps._p, dim, max_period))
