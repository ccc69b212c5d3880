"""What every op asks before it calls ggml: are the operands alive, is there room, do types and shapes fit.

The common case costs one call. The rules are ggml's own asserts, plus those the CPU backend would only meet
while computing: an op that passes here runs on the CPU. Upstream: ggml.c; ggml-cpu/ops.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

from pyggmlkv._ggml import lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.dtypes import BF16, BY_NUMBER, DTYPES, F16, F32, QUANTIZED, dtype_name
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import BindingError, DTypeError, ShapeError

Ne = tuple[int, int, int, int]

SIZE: Mapping[int, int] = MappingProxyType({number: info.type_size for number, info in BY_NUMBER.items()})
"""Bytes of a block, by type number."""
BLOCK: Mapping[int, int] = MappingProxyType({number: info.block_size for number, info in BY_NUMBER.items()})
"""Elements of a block, by type number."""
F32_F16: frozenset[int] = frozenset({F32, F16})
FLOAT: frozenset[int] = frozenset({F32, F16, BF16})
ACTIVATION_ONLY: frozenset[int] = frozenset({DTYPES["q8_1"].number, DTYPES["q8_K"].number})
"""Quantised types that exist only inside mul_mat."""
NO_FROM_FLOAT: frozenset[int] = frozenset(
    DTYPES[name].number for name in ("iq2_xxs", "iq2_xs", "iq3_xxs", "iq3_s", "iq2_s", "iq1_s", "iq1_m")
)
"""Types that the CPU cannot write row by row (they need an importance matrix or tables)."""
READABLE: frozenset[int] = FLOAT | (QUANTIZED - ACTIVATION_ONLY)
"""Types that mul_mat, get_rows and flash attention read."""
WRITABLE: frozenset[int] = FLOAT | (QUANTIZED - NO_FROM_FLOAT - ACTIVATION_ONLY)
"""Types that set_rows and cpy write from floats."""
PRECISIONS: Mapping[str, int] = MappingProxyType({"default": lib.GGML_PREC_DEFAULT, "f32": lib.GGML_PREC_F32})


def enter1(ctx: TensorArena, a: Tensor) -> None:
    """`a` is alive and `ctx` has room for one tensor. Raises: ClosedError, ArenaFullError, BindingError."""
    try:
        live = ctx._live
        if live and a._live is live and ctx._room > 0:
            return
    except AttributeError:
        not_tensors(ctx, a)
    enter(ctx, 1, a)


def enter2(ctx: TensorArena, a: Tensor, b: Tensor) -> None:
    """As `enter1`, for two operands."""
    try:
        live = ctx._live
        if live and a._live is live and b._live is live and ctx._room > 0:
            return
    except AttributeError:
        not_tensors(ctx, a, b)
    enter(ctx, 1, a, b)


def enter(ctx: TensorArena, needed: int, *operands: Tensor | None) -> None:
    """As `enter1`, for any operands (None: left out) and an op that makes `needed` tensors."""
    if not isinstance(ctx, TensorArena):
        raise BindingError(f"the first argument of an op is a TensorArena, got {type(ctx).__name__}")
    given = []
    for operand in operands:
        if isinstance(operand, Tensor):
            given.append(operand)
        elif operand is not None:
            raise BindingError(f"expected a Tensor, got {type(operand).__name__}")
    ctx._adopt(*given)
    if ctx._room < needed:
        raise ctx._full(needed)


def need(name: str, **operands: object) -> None:
    """Operands that must not be None. Raises: BindingError."""
    for label, operand in operands.items():
        if operand is None:
            raise BindingError(f"{name}: {label} is missing (None)")


def not_tensors(ctx: object, *operands: object) -> NoReturn:
    """Raises: BindingError that says which argument is no tensor."""
    if not isinstance(ctx, TensorArena):
        raise BindingError(f"the first argument of an op is a TensorArena, got {type(ctx).__name__}")
    wrong = [type(o).__name__ for o in operands if not isinstance(o, Tensor)]
    raise BindingError(f"expected a Tensor, got {', '.join(wrong) or 'something else'}")


def show(t: Tensor) -> str:
    """`f32 [64, 8]`, for messages."""
    return f"{t.dtype} {list(t.ne[: t.n_dims])}"


def shape_error(name: str, why: str, **operands: Tensor | None) -> ShapeError:
    """A ShapeError that shows every operand."""
    shown = ", ".join(f"{label} is {show(t)}" for label, t in operands.items() if t is not None)
    return ShapeError(
        f"{name}: {shown}: {why}", **{label: t.ne for label, t in operands.items() if t is not None}
    )


def dtype_error(name: str, label: str, t: Tensor, allowed: frozenset[int]) -> DTypeError:
    """A DTypeError that says what is taken."""
    names = ", ".join(sorted(dtype_name(n) for n in allowed))
    return DTypeError(f"{name}: {label} is {show(t)}, expected {names}", given=t.dtype, expected=names)


def want_dtype(name: str, label: str, t: Tensor, allowed: frozenset[int]) -> None:
    """Raises: DTypeError."""
    if t._type not in allowed:
        raise dtype_error(name, label, t, allowed)


def want_f32(name: str, **operands: Tensor) -> None:
    """Raises: DTypeError."""
    for label, t in operands.items():
        if t._type != F32:
            raise DTypeError(f"{name}: {label} is {show(t)}, expected f32", given=t.dtype, expected="f32")


def want_i32(name: str, label: str, t: Tensor) -> None:
    """Raises: DTypeError."""
    if t.dtype != "i32":
        raise DTypeError(f"{name}: {label} is {show(t)}, expected i32", given=t.dtype, expected="i32")


def want_rows(name: str, label: str, t: Tensor) -> None:
    """The elements of a row lie side by side. Raises: ShapeError."""
    if t._p.nb[0] != SIZE[t._type]:
        raise shape_error(
            name, f"{label} is permuted in its first dimension, apply cont() first", **{label: t}
        )


def want_blocks(name: str, label: str, t: Tensor) -> None:
    """Rows are whole blocks, side by side: not so in a transposed quantised tensor. Raises: ShapeError."""
    if t.ne[0] % BLOCK[t._type]:
        raise shape_error(name, f"the rows of {label} are not whole blocks of {BLOCK[t._type]}", **{label: t})
    want_rows(name, label, t)


def is_packed(t: Tensor) -> bool:
    """The elements lie in order without gaps, and every stride that a flat row index could meet says so.

    Stricter than ggml_is_contiguous, which ignores the strides of dimensions of one element: kernels that
    step through all rows by nb[1] write elsewhere if dimension 1 has one element and a stride of its own.
    """
    nb, ne = t.nb, t.ne
    size = SIZE[t._type]
    row = size * ne[0] // BLOCK[t._type]
    matrix = row * ne[1]
    if nb == (size, row, matrix, matrix * ne[2]):
        return True
    used = 4 if ne[3] != 1 else 3 if ne[2] != 1 else 2 if ne[1] != 1 else 1
    return nb[:used] == (size, row, matrix, matrix * ne[2])[:used]


def want_contiguous(name: str, **operands: Tensor) -> None:
    """Raises: ShapeError."""
    for label, t in operands.items():
        if not is_packed(t):
            raise shape_error(name, f"{label} is not contiguous, apply cont() first", **{label: t})


def want_contiguous_1(name: str, *operands: Tensor) -> None:
    """Rows follow each other at one distance, so that a flat row index finds them. Raises: ShapeError."""
    for t in operands:
        if t._p.nb[0] != SIZE[t._type] or not lib.ggml_is_contiguous_1(t._p):
            raise shape_error(name, "rows must follow each other, apply cont() first", a=t)


def want_same_shape(name: str, a: Tensor, b: Tensor) -> None:
    """Raises: ShapeError."""
    if a.ne != b.ne:
        raise shape_error(name, "the shapes differ", a=a, b=b)


def want_ne(name: str, label: str, t: Tensor, *expected: int | None) -> None:
    """The first sizes of `t` are `expected` (None: any). Raises: ShapeError."""
    for given, size in zip(t.ne, expected, strict=False):
        if size is not None and given != size:
            wanted = ", ".join("any" if e is None else str(e) for e in expected)
            raise ShapeError(
                f"{name}: {label} is {show(t)}, expected [{wanted}]", given=t.ne, expected=expected
            )


def want_dims(name: str, label: str, t: Tensor, n: int) -> None:
    """At most `n` sizes differ from 1. Raises: ShapeError."""
    if any(size != 1 for size in t.ne[n:]):
        raise shape_error(name, f"{label} has more than {n} dimensions", **{label: t})


def can_repeat(small: Ne, large: Ne) -> bool:
    """`small`, repeated, fills `large`. Upstream: ggml_can_repeat."""
    if small == large:
        return True
    if 0 in small:
        return 0 in large
    return not (large[0] % small[0] or large[1] % small[1] or large[2] % small[2] or large[3] % small[3])


def divides(small: int, large: int) -> bool:
    """True if `large` is a multiple of `small`; nothing is a multiple of 0 here (ggml would divide by it)."""
    return small > 0 and large % small == 0


def choice(name: str, label: str, value: str, table: Mapping[str, int]) -> int:
    """The number of a named option. Raises: BindingError with the names there are."""
    number = table.get(value)
    if number is None:
        raise BindingError(f"{name}: {label} must be one of {', '.join(table)}, got {value!r}", given=value)
    return number


def want_positive(name: str, **values: int) -> None:
    """Raises: ShapeError."""
    for label, value in values.items():
        if not 0 < value < 2**31:
            raise ShapeError(f"{name}: {label} must be positive, got {value}", **{label: value})


def want_not_negative(name: str, **values: float) -> None:
    """Raises: ShapeError."""
    for label, value in values.items():
        if not 0 <= value < 2**31:
            raise ShapeError(f"{name}: {label} must not be negative, got {value}", **{label: value})
