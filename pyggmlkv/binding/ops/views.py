"""Other ways to look at a tensor's memory, and copies of it in another order or type.

Sizes are elements, strides and offsets bytes, dimensions ggml's. Upstream: ggml.c, ggml_reshape ...
ggml_transpose, ggml_cpy, ggml_cast, ggml_cont, ggml_dup.
"""

from __future__ import annotations

from typing import Any

from pyggmlkv._ggml import lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.dtypes import F32, I32, QUANTIZED, dtype_info, dtype_name
from pyggmlkv.binding.ops.checks import (
    ACTIVATION_ONLY,
    BLOCK,
    FLOAT,
    SIZE,
    WRITABLE,
    enter1,
    enter2,
    is_packed,
    shape_error,
    show,
    want_blocks,
    want_rows,
)
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import DTypeError, ShapeError


def _reshape(name: str, ctx: TensorArena, a: Tensor, *ne: int) -> None:
    enter1(ctx, a)
    n = 1
    for size in ne:
        if size < 0:
            raise shape_error(name, f"sizes must not be negative, got {list(ne)}", a=a)
        n *= size
    if n != a.n_elements:
        raise shape_error(name, f"{a.n_elements} elements cannot become {list(ne)}, {n} elements", a=a)
    if not lib.ggml_is_contiguous(a._p):
        raise shape_error(name, "a is not contiguous, use cont_2d() and the like", a=a)
    if ne[0] % BLOCK[a._type]:
        raise shape_error(name, f"rows of {ne[0]} are not whole blocks of {BLOCK[a._type]}", a=a)


def reshape(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """`a`, contiguous, with the shape of `b`."""
    enter2(ctx, a, b)
    _reshape("reshape", ctx, a, *b.ne)
    return ctx._made(lib.ggml_reshape(ctx._p, a._p, b._p))


def reshape_1d(ctx: TensorArena, a: Tensor, ne0: int) -> Tensor:
    """`a`, contiguous, as [ne0]."""
    _reshape("reshape_1d", ctx, a, ne0)
    return ctx._made(lib.ggml_reshape_1d(ctx._p, a._p, ne0))


def reshape_2d(ctx: TensorArena, a: Tensor, ne0: int, ne1: int) -> Tensor:
    """`a`, contiguous, as [ne0, ne1]."""
    _reshape("reshape_2d", ctx, a, ne0, ne1)
    return ctx._made(lib.ggml_reshape_2d(ctx._p, a._p, ne0, ne1))


def reshape_3d(ctx: TensorArena, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
    """`a`, contiguous, as [ne0, ne1, ne2]."""
    _reshape("reshape_3d", ctx, a, ne0, ne1, ne2)
    return ctx._made(lib.ggml_reshape_3d(ctx._p, a._p, ne0, ne1, ne2))


def reshape_4d(ctx: TensorArena, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
    """`a`, contiguous, as [ne0, ne1, ne2, ne3]."""
    _reshape("reshape_4d", ctx, a, ne0, ne1, ne2, ne3)
    return ctx._made(lib.ggml_reshape_4d(ctx._p, a._p, ne0, ne1, ne2, ne3))


def _view(
    name: str, ctx: TensorArena, a: Tensor, ne: tuple[int, ...], nb: tuple[int, ...], offset: int
) -> None:
    """The view, with its strides, stays inside of the memory of `a`."""
    enter1(ctx, a)
    size, block = SIZE[a._type], BLOCK[a._type]
    if min(ne) < 0 or offset < 0 or (nb and min(nb) < 0):
        raise shape_error(name, f"sizes {ne}, strides {nb} and offset {offset} must not be negative", a=a)
    if ne[0] % block:
        raise shape_error(name, f"rows of {ne[0]} are not whole blocks of {block}", a=a)
    end = offset
    if 0 not in ne:
        packed = ne[0] // block * size
        end += packed
        for n, step in zip(ne[1:], nb, strict=True):
            end += (n - 1) * step
            packed *= n
        end = max(end, offset + packed)  # upstream asks for room for a packed copy too
    available = _extent(a)
    if end > available and 0 not in ne:
        raise shape_error(
            name,
            f"sizes {list(ne)}, strides {list(nb)}, offset {offset} reach byte {end} of {available}",
            a=a,
        )


def _extent(a: Tensor) -> int:
    """Bytes from the start of `a` to the end of the memory that its views may show."""
    source = a._p.view_src
    if not source:
        return a.nbytes
    return int(lib.ggml_nbytes(source)) - a._p.view_offs


def view_1d(ctx: TensorArena, a: Tensor, ne0: int, offset: int) -> Tensor:
    """[ne0] elements from `offset`."""
    _view("view_1d", ctx, a, (ne0,), (), offset)
    return ctx._made(lib.ggml_view_1d(ctx._p, a._p, ne0, offset))


def view_2d(ctx: TensorArena, a: Tensor, ne0: int, ne1: int, nb1: int, offset: int) -> Tensor:
    """[ne0, ne1] from `offset`, rows `nb1` bytes apart."""
    _view("view_2d", ctx, a, (ne0, ne1), (nb1,), offset)
    return ctx._made(lib.ggml_view_2d(ctx._p, a._p, ne0, ne1, nb1, offset))


def view_3d(
    ctx: TensorArena, a: Tensor, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int
) -> Tensor:
    """[ne0, ne1, ne2] from `offset`, with strides `nb1`, `nb2`."""
    _view("view_3d", ctx, a, (ne0, ne1, ne2), (nb1, nb2), offset)
    return ctx._made(lib.ggml_view_3d(ctx._p, a._p, ne0, ne1, ne2, nb1, nb2, offset))


def view_4d(
    ctx: TensorArena,
    a: Tensor,
    ne0: int,
    ne1: int,
    ne2: int,
    ne3: int,
    nb1: int,
    nb2: int,
    nb3: int,
    offset: int,
) -> Tensor:
    """[ne0, ne1, ne2, ne3] from `offset`, with strides `nb1`, `nb2`, `nb3`."""
    _view("view_4d", ctx, a, (ne0, ne1, ne2, ne3), (nb1, nb2, nb3), offset)
    return ctx._made(lib.ggml_view_4d(ctx._p, a._p, ne0, ne1, ne2, ne3, nb1, nb2, nb3, offset))


def view_tensor(ctx: TensorArena, a: Tensor) -> Tensor:
    """The same elements under another name."""
    enter1(ctx, a)
    return ctx._made(lib.ggml_view_tensor(ctx._p, a._p))


def permute(ctx: TensorArena, a: Tensor, axis0: int, axis1: int, axis2: int, axis3: int) -> Tensor:
    """Dimension i of `a` becomes dimension axis_i of the view."""
    enter1(ctx, a)
    if sorted((axis0, axis1, axis2, axis3)) != [0, 1, 2, 3]:
        raise ShapeError(
            f"permute: axes must be 0, 1, 2, 3 in some order, got {[axis0, axis1, axis2, axis3]}"
        )
    if max(*a.ne, *a.nb) >= 2**31:
        raise shape_error(
            "permute", "sizes and strides must be below 2**31 (upstream keeps them in an int)", a=a
        )
    return ctx._made(lib.ggml_permute(ctx._p, a._p, axis0, axis1, axis2, axis3))


def transpose(ctx: TensorArena, a: Tensor) -> Tensor:
    """The first two dimensions swapped, as a view."""
    enter1(ctx, a)
    return ctx._made(lib.ggml_transpose(ctx._p, a._p))


def _check_copy(name: str, a: Tensor, number: int, target: Tensor | None) -> None:
    """The CPU copies `a` to type `number`: into contiguous memory (`target` None) or into `target`."""
    source = a._type
    if source == number:
        if source in QUANTIZED:
            want_blocks(name, "a", a)
            if target is not None and not (is_packed(a) and is_packed(target)):
                want_blocks(name, "b", target)  # only whole rows are copied
                if target.ne != a.ne:
                    raise shape_error(
                        name, "a strided quantised tensor needs b of its own shape", a=a, b=target
                    )
        return
    if source == I32 and number == F32 or source == F32 and number == I32:
        return
    if source in FLOAT and number in FLOAT:
        return
    if source in FLOAT and number in WRITABLE:
        want_rows(name, "a", a)
        if target is not None and not lib.ggml_is_contiguous(target._p):
            raise shape_error(name, "a quantised b must be contiguous", a=a, b=target)
        rows = a.ne if target is None else target.ne
        if a.ne[0] != rows[0] or a.ne[0] % BLOCK[number]:
            raise shape_error(
                name, f"rows must be whole blocks of {BLOCK[number]} and as long in a as in b", a=a, b=target
            )
        return
    if source in QUANTIZED - ACTIVATION_ONLY and number == F32:
        want_blocks(name, "a", a)
        if target is not None:
            want_rows(name, "b", target)
            if target.ne[0] % BLOCK[source] and not lib.ggml_is_contiguous(target._p):
                raise shape_error(
                    name,
                    f"b must be contiguous or have rows of whole blocks of {BLOCK[source]}",
                    a=a,
                    b=target,
                )
        return
    raise DTypeError(
        f"{name}: {show(a)} cannot be copied to {dtype_name(number)}", a=a.dtype, b=dtype_name(number)
    )


def cpy(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """Write the elements of `a` over those of `b`, converting; the result is a view of `b`."""
    enter2(ctx, a, b)
    if a.ne != b.ne and a.n_elements != b.n_elements:
        raise shape_error("cpy", "the numbers of elements differ", a=a, b=b)
    if a._type != F32 or b._type not in FLOAT:
        _check_copy("cpy", a, b._type, b)
    return ctx._made(lib.ggml_cpy(ctx._p, a._p, b._p))


def cast(ctx: TensorArena, a: Tensor, dtype: str) -> Tensor:
    """`a` in type `dtype`, contiguous; f32 to i32 drops the fraction."""
    enter1(ctx, a)
    info = dtype_info(dtype)
    if a.ne[0] % info.block_size:
        raise shape_error("cast", f"rows are not whole blocks of {info.name} ({info.block_size})", a=a)
    _check_copy("cast", a, info.number, None)
    return ctx._made(lib.ggml_cast(ctx._p, a._p, info.number))


def dup(ctx: TensorArena, a: Tensor) -> Tensor:
    """A contiguous copy."""
    enter1(ctx, a)
    _check_copy("dup", a, a._type, None)
    return ctx._made(lib.ggml_dup(ctx._p, a._p))


def dup_inplace(ctx: TensorArena, a: Tensor) -> Tensor:
    """A node that copies `a` onto itself."""
    enter1(ctx, a)
    if not lib.ggml_is_contiguous(a._p):
        raise shape_error("dup_inplace", "a is not contiguous", a=a)
    return ctx._made(lib.ggml_dup_inplace(ctx._p, a._p))


def cont(ctx: TensorArena, a: Tensor) -> Tensor:
    """A contiguous copy, the way to go on after `permute`."""
    enter1(ctx, a)
    if a._type not in FLOAT:
        _check_copy("cont", a, a._type, None)
    return ctx._made(lib.ggml_cont(ctx._p, a._p))


def _cont(name: str, ctx: TensorArena, a: Tensor, ne: tuple[int, int, int, int]) -> Any:
    enter1(ctx, a)
    if min(ne) < 0 or ne[0] * ne[1] * ne[2] * ne[3] != a.n_elements:
        raise shape_error(name, f"{a.n_elements} elements cannot become {list(ne)}", a=a)
    if a._type in QUANTIZED and (ne[0] % BLOCK[a._type] or not lib.ggml_is_contiguous(a._p)):
        raise shape_error(
            name, f"quantised: a must be contiguous and rows whole blocks of {BLOCK[a._type]}", a=a
        )
    return lib.ggml_cont_4d(ctx._p, a._p, *ne)


def cont_1d(ctx: TensorArena, a: Tensor, ne0: int) -> Tensor:
    """A contiguous copy as [ne0]."""
    return ctx._made(_cont("cont_1d", ctx, a, (ne0, 1, 1, 1)))


def cont_2d(ctx: TensorArena, a: Tensor, ne0: int, ne1: int) -> Tensor:
    """A contiguous copy as [ne0, ne1]."""
    return ctx._made(_cont("cont_2d", ctx, a, (ne0, ne1, 1, 1)))


def cont_3d(ctx: TensorArena, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
    """A contiguous copy as [ne0, ne1, ne2]."""
    return ctx._made(_cont("cont_3d", ctx, a, (ne0, ne1, ne2, 1)))


def cont_4d(ctx: TensorArena, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
    """A contiguous copy as [ne0, ne1, ne2, ne3]."""
    return ctx._made(_cont("cont_4d", ctx, a, (ne0, ne1, ne2, ne3)))
