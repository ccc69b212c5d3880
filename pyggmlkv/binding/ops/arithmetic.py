"""Element by element: sums, products, scaling, and writing one tensor into a part of another.

`b` is repeated to the shape of `a`; the result has the shape and type of `a`. An `_inplace` op writes into
the memory of `a`. Upstream: ggml.c, ggml_add ... ggml_set_2d, ggml_clamp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyggmlkv._ggml import lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.dtypes import BF16, F16, F32, I32, QUANTIZED, dtype_info
from pyggmlkv.binding.ops.checks import (
    ACTIVATION_ONLY,
    F32_F16,
    SIZE,
    WRITABLE,
    can_repeat,
    enter,
    enter1,
    enter2,
    shape_error,
    show,
    want_blocks,
    want_contiguous,
    want_contiguous_1,
    want_dtype,
    want_f32,
    want_ne,
    want_rows,
)
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import DTypeError, ShapeError

BinaryOp = Callable[[TensorArena, Tensor, Tensor], Tensor]

# (type of a, type of b) that the CPU adds, multiplies, ...
_PAIRS = frozenset({(F32, F32), (F16, F16), (BF16, BF16), (BF16, F32), (F16, F32)})


def _refuse_pair(name: str, a: Tensor, b: Tensor) -> None:
    if name.startswith("add") and a._type in QUANTIZED - ACTIVATION_ONLY and b._type == F32:
        if a.ne != b.ne:
            raise shape_error(name, "a quantised tensor takes only b of its own shape", a=a, b=b)
        want_rows(name, "b", b)
        want_blocks(name, "a", a)
        if not a.nb[0] <= a.nb[1] <= a.nb[2] <= a.nb[3]:
            raise shape_error(name, "a quantised tensor must not be permuted", a=a)
        want_dtype(name, "a", a, WRITABLE)
        return
    raise DTypeError(
        f"{name}: a is {show(a)}, b is {show(b)}: expected f32, f16 or bf16, and b of the same type or f32",
        a=a.dtype,
        b=b.dtype,
    )


def _binary(name: str, function: Any, what: str) -> BinaryOp:
    def op(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
        enter2(ctx, a, b)
        if a.ne != b.ne and not can_repeat(b.ne, a.ne):
            raise shape_error(name, "b cannot be repeated to the shape of a", a=a, b=b)
        if (a._type, b._type) not in _PAIRS:
            _refuse_pair(name, a, b)
        if a._p.nb[0] != SIZE[a._type]:
            want_rows(name, "a", a)
        return ctx._made(function(ctx._p, a._p, b._p))

    op.__name__ = op.__qualname__ = name
    op.__doc__ = what
    return op


add = _binary("add", lib.ggml_add, "a + b. `a` may be quantised if `b` is f32 of the same shape.")
add_inplace = _binary("add_inplace", lib.ggml_add_inplace, "a + b, written into a.")
sub = _binary("sub", lib.ggml_sub, "a - b.")
sub_inplace = _binary("sub_inplace", lib.ggml_sub_inplace, "a - b, written into a.")
mul = _binary("mul", lib.ggml_mul, "a * b, element by element.")
mul_inplace = _binary("mul_inplace", lib.ggml_mul_inplace, "a * b, written into a.")
div = _binary("div", lib.ggml_div, "a / b, element by element.")
div_inplace = _binary("div_inplace", lib.ggml_div_inplace, "a / b, written into a.")


def add_cast(ctx: TensorArena, a: Tensor, b: Tensor, dtype: str) -> Tensor:
    """a + b in type `dtype`: `a` f16, bf16 or quantised, `b` f32 with rows as long as those of `a`."""
    enter2(ctx, a, b)
    info = dtype_info(dtype)
    if a.ne[0] != b.ne[0] or not can_repeat(b.ne, a.ne):
        raise shape_error(
            "add_cast", "the rows of b must be as long as those of a, and repeat to its shape", a=a, b=b
        )
    want_dtype("add_cast", "a", a, frozenset({F16, BF16}) | (QUANTIZED - ACTIVATION_ONLY))
    want_f32("add_cast", b=b)
    if a._type in QUANTIZED:
        if info.number not in WRITABLE or a.ne != b.ne:
            raise shape_error("add_cast", f"cannot give {info.name} of these", a=a, b=b)
    elif info.number not in (a._type, F32):
        raise DTypeError(f"add_cast: {show(a)} gives {a.dtype} or f32, not {info.name}", dtype=info.name)
    want_rows("add_cast", "a", a)
    want_rows("add_cast", "b", b)
    return ctx._made(lib.ggml_add_cast(ctx._p, a._p, b._p, info.number))


def add_id(ctx: TensorArena, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """a[:, i, t] + b[:, ids[i, t]]: a [n, n_used, n_tokens] f32, b [n, n_expert] f32, ids [n_used, n_tokens]
    i32.
    """
    enter(ctx, 1, a, b, ids)
    want_f32("add_id", a=a, b=b)
    want_dtype("add_id", "ids", ids, frozenset({I32}))
    want_ne("add_id", "b", b, a.ne[0])
    want_ne("add_id", "ids", ids, a.ne[1], a.ne[2])
    want_rows("add_id", "a", a)
    want_rows("add_id", "b", b)
    return ctx._made(lib.ggml_add_id(ctx._p, a._p, b._p, ids._p))


def _want_padded_1d(name: str, a: Tensor) -> None:
    """Upstream: ggml_is_padded_1d."""
    nb, ne = a.nb, a.ne
    if nb[0] != SIZE[a._type] or nb[2] != nb[1] * ne[1] or nb[3] != nb[2] * ne[2]:
        raise shape_error(name, "a is not contiguous, apply cont() first", a=a)


def _add1(name: str, function: Any, ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    enter2(ctx, a, b)
    if b.n_elements != 1:
        raise shape_error(name, "b must be one element", a=a, b=b)
    if a._type in QUANTIZED - ACTIVATION_ONLY:
        want_dtype(name, "a", a, WRITABLE)
        want_blocks(name, "a", a)
        want_f32(name, b=b)
    elif (a._type, b._type) not in _PAIRS:
        _refuse_pair(name, a, b)
    _want_padded_1d(name, a)
    return ctx._made(function(ctx._p, a._p, b._p))


def add1(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """a + b where `b` is one element. Upstream prefers `add`."""
    return _add1("add1", lib.ggml_add1, ctx, a, b)


def add1_inplace(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """As `add1`, written into a."""
    return _add1("add1_inplace", lib.ggml_add1_inplace, ctx, a, b)


def _scale(name: str, ctx: TensorArena, a: Tensor) -> None:
    enter1(ctx, a)
    if a._type != F32:
        want_f32(name, a=a)
    _want_padded_1d(name, a)
    want_contiguous(name, a=a)


def scale(ctx: TensorArena, a: Tensor, s: float) -> Tensor:
    """s * a, for contiguous f32."""
    _scale("scale", ctx, a)
    return ctx._made(lib.ggml_scale(ctx._p, a._p, s))


def scale_inplace(ctx: TensorArena, a: Tensor, s: float) -> Tensor:
    """s * a, written into a."""
    _scale("scale_inplace", ctx, a)
    return ctx._made(lib.ggml_scale_inplace(ctx._p, a._p, s))


def scale_bias(ctx: TensorArena, a: Tensor, s: float, b: float) -> Tensor:
    """s * a + b, for contiguous f32."""
    _scale("scale_bias", ctx, a)
    return ctx._made(lib.ggml_scale_bias(ctx._p, a._p, s, b))


def scale_bias_inplace(ctx: TensorArena, a: Tensor, s: float, b: float) -> Tensor:
    """s * a + b, written into a."""
    _scale("scale_bias_inplace", ctx, a)
    return ctx._made(lib.ggml_scale_bias_inplace(ctx._p, a._p, s, b))


def clamp(ctx: TensorArena, a: Tensor, lowest: float, highest: float) -> Tensor:
    """`a` limited to [lowest, highest], f32 or f16. Written into a: upstream's clamp is in place."""
    enter1(ctx, a)
    want_dtype("clamp", "a", a, F32_F16)
    want_contiguous_1("clamp", a)
    return ctx._made(lib.ggml_clamp(ctx._p, a._p, lowest, highest))


def _part(name: str, a: Tensor, b: Tensor, nb: tuple[int, int, int], offset: int) -> None:
    """`b`, laid out with strides `nb` from `offset`, lies inside of `a`."""
    if min(*nb, offset) < 0:
        raise ShapeError(f"{name}: strides and offset must not be negative, got {nb} and {offset}", nb=nb)
    if not 0 < b.n_elements <= a.n_elements:
        raise shape_error(name, "b is empty or larger than a", a=a, b=b)
    if a._type != b._type:
        raise DTypeError(
            f"{name}: a is {show(a)}, b is {show(b)}: expected the same type", a=a.dtype, b=b.dtype
        )
    want_contiguous(name, a=a)
    want_rows(name, "b", b)
    steps = (SIZE[a._type], *nb)
    last = offset + sum((n - 1) * step for n, step in zip(b.ne, steps, strict=True))
    if last + SIZE[a._type] > a.nbytes:
        raise shape_error(
            name, f"with strides {nb} from byte {offset}, b reaches beyond the end of a", a=a, b=b
        )
    if offset >= 2**30:
        raise ShapeError(f"{name}: offset must be below 2**30, got {offset}", offset=offset)


def acc(ctx: TensorArena, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
    """A copy of `a` with `b` added to the part that strides `nb1` to `nb3` and `offset` (bytes) select;
    f32.
    """
    enter2(ctx, a, b)
    want_f32("acc", a=a, b=b)
    _part("acc", a, b, (nb1, nb2, nb3), offset)
    return ctx._made(lib.ggml_acc(ctx._p, a._p, b._p, nb1, nb2, nb3, offset))


def acc_inplace(ctx: TensorArena, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
    """As `acc`, written into a."""
    enter2(ctx, a, b)
    want_f32("acc_inplace", a=a, b=b)
    _part("acc_inplace", a, b, (nb1, nb2, nb3), offset)
    return ctx._made(lib.ggml_acc_inplace(ctx._p, a._p, b._p, nb1, nb2, nb3, offset))


def _set(
    name: str, function: Any, ctx: TensorArena, a: Tensor, b: Tensor, place: tuple[int, int, int, int]
) -> Tensor:
    enter2(ctx, a, b)
    want_dtype(name, "a", a, frozenset({F32, I32}))
    _part(name, a, b, place[:3], place[3])
    return ctx._made(function(ctx._p, a._p, b._p, *place))


def set(ctx: TensorArena, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
    """A copy of `a` with `b` in the part that strides `nb1` to `nb3` and `offset` (bytes) select; f32 or
    i32.
    """
    return _set("set", lib.ggml_set, ctx, a, b, (nb1, nb2, nb3, offset))


def set_inplace(ctx: TensorArena, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
    """As `set`, written into a."""
    return _set("set_inplace", lib.ggml_set_inplace, ctx, a, b, (nb1, nb2, nb3, offset))


def set_1d(ctx: TensorArena, a: Tensor, b: Tensor, offset: int) -> Tensor:
    """As `set`, with the strides of `a`."""
    enter2(ctx, a, b)
    return _set("set_1d", lib.ggml_set, ctx, a, b, (*a.nb[1:], offset))


def set_1d_inplace(ctx: TensorArena, a: Tensor, b: Tensor, offset: int) -> Tensor:
    """As `set_1d`, written into a."""
    enter2(ctx, a, b)
    return _set("set_1d_inplace", lib.ggml_set_inplace, ctx, a, b, (*a.nb[1:], offset))


def set_2d(ctx: TensorArena, a: Tensor, b: Tensor, nb1: int, offset: int) -> Tensor:
    """As `set`, with row stride `nb1` and the other strides of `a`."""
    enter2(ctx, a, b)
    return _set("set_2d", lib.ggml_set, ctx, a, b, (nb1, *a.nb[2:], offset))


def set_2d_inplace(ctx: TensorArena, a: Tensor, b: Tensor, nb1: int, offset: int) -> Tensor:
    """As `set_2d`, written into a."""
    enter2(ctx, a, b)
    return _set("set_2d_inplace", lib.ggml_set_inplace, ctx, a, b, (nb1, *a.nb[2:], offset))
