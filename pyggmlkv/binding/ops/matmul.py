"""Matrix products. `a` is the side whose rows are weights: [n, m] times b [n, k] gives [m, k] f32.

Upstream: ggml.c, ggml_mul_mat, ggml_mul_mat_id, ggml_out_prod, ggml_solve_tri.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pyggmlkv._ggml import lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.dtypes import BF16, DTYPES, F16, F32, QUANTIZED
from pyggmlkv.binding.ops.checks import (
    ACTIVATION_ONLY,
    PRECISIONS,
    READABLE,
    SIZE,
    choice,
    divides,
    dtype_error,
    enter,
    enter2,
    shape_error,
    show,
    want_contiguous,
    want_dims,
    want_f32,
    want_i32,
    want_rows,
)
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import BindingError, DTypeError

_Q8_0 = DTYPES["q8_0"].number
_SAME_TYPE = frozenset(
    {F16, BF16, _Q8_0}
)  # types that the CPU multiplies with their own kind as well as with f32
_HINTS: Mapping[str, int] = MappingProxyType(
    {"none": lib.GGML_HINT_NONE, "src0_is_hadamard": lib.GGML_HINT_SRC0_IS_HADAMARD}
)


def _check_types(name: str, a: Tensor, b: Tensor) -> None:
    if a._type not in READABLE:
        raise dtype_error(name, "a", a, READABLE)
    if b._type != F32 and not (b._type == a._type and a._type in _SAME_TYPE):
        other = f" or {a.dtype}" if a._type in _SAME_TYPE else ""
        raise DTypeError(
            f"{name}: a is {show(a)}, b is {show(b)}: expected b in f32{other}", a=a.dtype, b=b.dtype
        )


def _refuse_transposed(name: str, a: Tensor) -> None:
    """Upstream: ggml_is_transposed, which is also true for rows without elements or on top of each other."""
    if a.nb[0] != SIZE[a._type] or a.nb[1] < a.nb[0]:
        raise shape_error(name, "a is transposed or its rows overlap, apply cont() first", a=a)


def mul_mat(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """a [n, m, x, y] by b [n, k, x*r, y*s] -> [m, k, x*r, y*s] f32; a may be quantised, its rows side by
    side.
    """
    enter2(ctx, a, b)
    ane, bne = a.ne, b.ne
    if ane[0] != bne[0]:
        raise shape_error("mul_mat", "the first dimensions differ", a=a, b=b)
    if (ane[2:] != bne[2:] or 0 in ane) and not (divides(ane[2], bne[2]) and divides(ane[3], bne[3])):
        raise shape_error("mul_mat", "dimensions 2 and 3 of b must be multiples of those of a", a=a, b=b)
    if a._type not in READABLE or b._type != F32:
        _check_types("mul_mat", a, b)
    strides = a._p.nb
    if strides[0] != SIZE[a._type] or strides[1] < strides[0]:
        _refuse_transposed("mul_mat", a)
    if b._p.nb[0] != SIZE[b._type]:
        want_rows("mul_mat", "b", b)
    return ctx._made(lib.ggml_mul_mat(ctx._p, a._p, b._p))


def mul_mat_set_prec(a: Tensor, prec: str) -> None:
    """Accumulate the product `a` in `f32`, or as the backend likes (`default`)."""
    number = choice("mul_mat_set_prec", "prec", prec, PRECISIONS)
    if a._pointer.op != lib.GGML_OP_MUL_MAT:
        raise BindingError(f"mul_mat_set_prec: {a!r} is not the result of mul_mat")
    lib.ggml_mul_mat_set_prec(a._p, number)


def mul_mat_set_hint(a: Tensor, hint: str) -> None:
    """Tell the backend something of the product `a`: `src0_is_hadamard` lets it use a fast Hadamard
    transform.
    """
    number = choice("mul_mat_set_hint", "hint", hint, _HINTS)
    if a._pointer.op != lib.GGML_OP_MUL_MAT:
        raise BindingError(f"mul_mat_set_hint: {a!r} is not the result of mul_mat")
    if hint == "src0_is_hadamard":
        n = a._p.src[0].ne[0]
        if n & (n - 1) or a._p.src[1].type != F32:
            raise BindingError(
                f"mul_mat_set_hint: a Hadamard product needs f32 and a power of two, got {n}", n=n
            )
    lib.ggml_mul_mat_set_hint(a._p, number)


def mul_mat_id(ctx: TensorArena, as_: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """For each token, the products with the experts that `ids` names.

    as_ [n, m, n_expert], b [n, n_used or 1, n_tokens] f32, ids [n_used, n_tokens] i32 -> [m, n_used,
    n_tokens] f32.
    """
    enter(ctx, 1, as_, b, ids)
    want_i32("mul_mat_id", "ids", ids)
    _check_types("mul_mat_id", as_, b)
    want_dims("mul_mat_id", "as_", as_, 3)
    want_dims("mul_mat_id", "b", b, 3)
    want_dims("mul_mat_id", "ids", ids, 2)
    if as_.ne[0] != b.ne[0]:
        raise shape_error("mul_mat_id", "the first dimensions of as_ and b differ", as_=as_, b=b, ids=ids)
    if ids.ne[1] != b.ne[2]:
        raise shape_error("mul_mat_id", "ids must have a row for each token of b", as_=as_, b=b, ids=ids)
    if not divides(b.ne[1], ids.ne[0]):
        raise shape_error(
            "mul_mat_id", "b must have one row a token, or one for each id", as_=as_, b=b, ids=ids
        )
    _refuse_transposed("mul_mat_id", as_)
    want_rows("mul_mat_id", "b", b)
    return ctx._made(lib.ggml_mul_mat_id(ctx._p, as_._p, b._p, ids._p))


def out_prod(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """a [m, n] by b [k, n] f32 -> [m, k] f32: the sum of the outer products of their rows."""
    enter2(ctx, a, b)
    want_f32("out_prod", b=b)
    if a._type not in frozenset({F32, F16}) | (QUANTIZED - ACTIVATION_ONLY):
        raise dtype_error("out_prod", "a", a, frozenset({F32, F16}) | (QUANTIZED - ACTIVATION_ONLY))
    if a.ne[1] != b.ne[1]:
        raise shape_error("out_prod", "the second dimensions differ", a=a, b=b)
    if a._type == F32:
        if not (divides(a.ne[2], b.ne[2]) and divides(a.ne[3], b.ne[3])):
            raise shape_error("out_prod", "dimensions 2 and 3 of b must be multiples of those of a", a=a, b=b)
    elif a.ne[2:] != b.ne[2:]:
        raise shape_error("out_prod", "dimensions 2 and 3 must be equal unless a is f32", a=a, b=b)
    _refuse_transposed("out_prod", a)
    return ctx._made(lib.ggml_out_prod(ctx._p, a._p, b._p))


def solve_tri(ctx: TensorArena, a: Tensor, b: Tensor, left: bool, lower: bool, uni: bool) -> Tensor:
    """x in a x = b for lower triangular a [n, n], b [m, n] f32. Upstream has left, lower, not unitriangular
    only.
    """
    enter2(ctx, a, b)
    want_f32("solve_tri", a=a, b=b)
    if not (left and lower and not uni):
        raise BindingError("solve_tri: only left=True, lower=True, uni=False is implemented upstream")
    if a.ne[0] != a.ne[1] or a.ne[1:] != b.ne[1:]:
        raise shape_error(
            "solve_tri", "a must be square, and b have as many rows and matrices as a", a=a, b=b
        )
    want_contiguous("solve_tri", a=a, b=b)
    return ctx._made(lib.ggml_solve_tri(ctx._p, a._p, b._p, left, lower, uni))
