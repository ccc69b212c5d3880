"""Whole rows by index, and tensors put together: rows taken and written, concatenated, repeated, diagonal.

Indices are data: an index out of range is not seen here, only while computing (ggml aborts). Check what you
put in. Upstream: ggml.c, ggml_get_rows, ggml_set_rows, ggml_concat, ggml_repeat, ggml_diag.
"""

from __future__ import annotations

from pyggmlkv._ggml import lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.dtypes import DTYPES, I16, I32, I64
from pyggmlkv.binding.ops.checks import (
    ACTIVATION_ONLY,
    BLOCK,
    F32_F16,
    FLOAT,
    READABLE,
    SIZE,
    WRITABLE,
    can_repeat,
    divides,
    dtype_error,
    enter,
    enter1,
    enter2,
    shape_error,
    show,
    want_blocks,
    want_contiguous,
    want_dims,
    want_dtype,
    want_f32,
    want_i32,
    want_rows,
)
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import DTypeError, ShapeError

_INDEX = frozenset({I32, I64})
_REPEATABLE = FLOAT | {I32, I16}
_NOT_JOINED = (
    frozenset({DTYPES["f64"].number, I64}) | ACTIVATION_ONLY
)  # joined byte by byte, never tried upstream


def get_rows(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """Rows `b` of `a`: a [n, rows, x, y], b [k, x, y] i32 -> [n, k, x, y] f32 (i32 of i32)."""
    enter2(ctx, a, b)
    ane, bne = a.ne, b.ne
    if b._type != I32:
        want_i32("get_rows", "b", b)
    if not ane[1]:
        raise shape_error("get_rows", "a has no rows", a=a, b=b)
    if ane[2] != bne[1] or ane[3] != bne[2] or bne[3] != 1:
        raise shape_error("get_rows", "b must be [k, ne2, ne3] with ne2, ne3 of a", a=a, b=b)
    if a._type not in READABLE and a._type != I32:
        raise dtype_error("get_rows", "a", a, READABLE | {I32})
    if a._p.nb[0] != SIZE[a._type]:
        want_rows("get_rows", "a", a)
    return ctx._made(lib.ggml_get_rows(ctx._p, a._p, b._p))


def get_rows_back(ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Gradient of `get_rows`: a [n, k] of the result, b [k] i32, c [n, rows] gives the shape -> [n, rows]
    f32.
    """
    enter(ctx, 1, a, b, c)
    want_dtype("get_rows_back", "a", a, F32_F16)
    want_i32("get_rows_back", "b", b)
    want_dims("get_rows_back", "a", a, 2)
    want_dims("get_rows_back", "b", b, 1)
    want_dims("get_rows_back", "c", c, 2)
    if a.ne[0] != c.ne[0] or b.ne[0] != a.ne[1]:
        raise shape_error("get_rows_back", "expected a [n, k], b [k], c [n, rows]", a=a, b=b, c=c)
    want_rows("get_rows_back", "a", a)
    return ctx._made(lib.ggml_get_rows_back(ctx._p, a._p, b._p, c._p))


def set_rows(ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Write rows `b` over the rows of `a` that `c` names, converting; the result is a view of `a`.

    a [n, rows, x, y], b [n, k, x, y] f32 or f16, c [k, x', y'] i64 or i32, x and y multiples of x' and y'.
    """
    enter(ctx, 1, a, b, c)
    ane, bne, cne = a.ne, b.ne, c.ne
    if c._type not in _INDEX:
        raise dtype_error("set_rows", "c", c, _INDEX)
    if b._type not in F32_F16:
        raise dtype_error("set_rows", "b", b, F32_F16)
    if a._type not in WRITABLE:
        raise dtype_error("set_rows", "a", a, WRITABLE)
    if ane[0] != bne[0] or ane[2] != bne[2] or ane[3] != bne[3]:
        raise shape_error("set_rows", "a and b must be equal but for the number of rows", a=a, b=b, c=c)
    if not ane[1]:
        raise shape_error("set_rows", "a has no rows", a=a, b=b, c=c)
    if bne[1] != cne[0] or cne[3] != 1 or not divides(cne[1], bne[2]) or not divides(cne[2], bne[3]):
        raise shape_error("set_rows", "c must have an index for each row of b", a=a, b=b, c=c)
    if a._p.nb[0] != SIZE[a._type]:
        want_rows("set_rows", "a", a)
    if b._p.nb[0] != SIZE[b._type]:
        want_rows("set_rows", "b", b)
    return ctx._made(lib.ggml_set_rows(ctx._p, a._p, b._p, c._p))


def concat(ctx: TensorArena, a: Tensor, b: Tensor, dim: int) -> Tensor:
    """`a` and `b`, of one type, one after the other along dimension `dim` (ggml's)."""
    enter2(ctx, a, b)
    if not 0 <= dim < 4:
        raise ShapeError(f"concat: dim must be 0 to 3, got {dim}", dim=dim)
    if a._type != b._type:
        raise DTypeError(f"concat: a is {show(a)}, b is {show(b)}: the types differ", a=a.dtype, b=b.dtype)
    if a._type in _NOT_JOINED:
        raise DTypeError(f"concat: a is {show(a)}, a type that the CPU does not join", a=a.dtype)
    for i in range(4):
        if i != dim and a.ne[i] != b.ne[i]:
            raise shape_error("concat", f"all dimensions but {dim} must be equal", a=a, b=b)
    if BLOCK[a._type] > 1:
        want_blocks("concat", "a", a)
        want_blocks("concat", "b", b)
    return ctx._made(lib.ggml_concat(ctx._p, a._p, b._p, dim))


def repeat(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """`a` repeated to the shape of `b`."""
    enter2(ctx, a, b)
    if not can_repeat(a.ne, b.ne):
        raise shape_error("repeat", "a cannot be repeated to the shape of b", a=a, b=b)
    want_dtype("repeat", "a", a, _REPEATABLE)
    want_rows("repeat", "a", a)
    return ctx._made(lib.ggml_repeat(ctx._p, a._p, b._p))


def repeat_4d(ctx: TensorArena, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
    """`a` repeated to [ne0, ne1, ne2, ne3]."""
    enter1(ctx, a)
    if min(ne0, ne1, ne2, ne3) < 0 or not can_repeat(a.ne, (ne0, ne1, ne2, ne3)):
        raise shape_error("repeat_4d", f"cannot be repeated to {[ne0, ne1, ne2, ne3]}", a=a)
    want_dtype("repeat_4d", "a", a, _REPEATABLE)
    want_rows("repeat_4d", "a", a)
    return ctx._made(lib.ggml_repeat_4d(ctx._p, a._p, ne0, ne1, ne2, ne3))


def repeat_back(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """The repetitions in `a` summed up into the shape of `b`; f32."""
    enter2(ctx, a, b)
    want_f32("repeat_back", a=a)
    if not can_repeat(b.ne, a.ne):
        raise shape_error("repeat_back", "b cannot be repeated to the shape of a", a=a, b=b)
    want_rows("repeat_back", "a", a)
    return ctx._made(lib.ggml_repeat_back(ctx._p, a._p, b._p))


def diag(ctx: TensorArena, a: Tensor) -> Tensor:
    """[n, 1, x, y] f32 -> [n, n, x, y] with `a` on the diagonal."""
    enter1(ctx, a)
    want_f32("diag", a=a)
    if a.ne[1] != 1:
        raise shape_error("diag", "expected [n, 1, x, y]", a=a)
    want_rows("diag", "a", a)
    return ctx._made(lib.ggml_diag(ctx._p, a._p))


def _mask(name: str, ctx: TensorArena, a: Tensor, n_past: int) -> None:
    enter1(ctx, a)
    want_f32(name, a=a)
    want_contiguous(name, a=a)
    if not 0 <= n_past < 2**31:
        raise ShapeError(f"{name}: n_past must not be negative, got {n_past}", n_past=n_past)


def diag_mask_inf(ctx: TensorArena, a: Tensor, n_past: int) -> Tensor:
    """-inf where column > n_past + row."""
    _mask("diag_mask_inf", ctx, a, n_past)
    return ctx._made(lib.ggml_diag_mask_inf(ctx._p, a._p, n_past))


def diag_mask_inf_inplace(ctx: TensorArena, a: Tensor, n_past: int) -> Tensor:
    """As `diag_mask_inf`, written into a."""
    _mask("diag_mask_inf_inplace", ctx, a, n_past)
    return ctx._made(lib.ggml_diag_mask_inf_inplace(ctx._p, a._p, n_past))


def diag_mask_zero(ctx: TensorArena, a: Tensor, n_past: int) -> Tensor:
    """0 where column > n_past + row."""
    _mask("diag_mask_zero", ctx, a, n_past)
    return ctx._made(lib.ggml_diag_mask_zero(ctx._p, a._p, n_past))


def diag_mask_zero_inplace(ctx: TensorArena, a: Tensor, n_past: int) -> Tensor:
    """As `diag_mask_zero`, written into a."""
    _mask("diag_mask_zero_inplace", ctx, a, n_past)
    return ctx._made(lib.ggml_diag_mask_zero_inplace(ctx._p, a._p, n_past))
