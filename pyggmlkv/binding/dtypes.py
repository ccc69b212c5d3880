"""Element types by ggml's names, with what the compiled library says of them, and ggml's own (de)quantisers.

Names are `ggml_type_name`'s (`f32`, `q4_K`); any case is understood. Knows nothing of tensors.
Upstream: ggml.h, ggml_type, ggml_type_traits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.errors import DTypeError, ShapeError


@dataclass(frozen=True, slots=True)
class DTypeInfo:
    """One element type. `numpy` is None where NumPy has no equal (quantised types); bf16 shows as uint16."""

    number: int
    name: str
    block_size: int
    type_size: int
    is_quantized: bool
    numpy: np.dtype[Any] | None


_NUMPY_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "f32": "<f4",
        "f16": "<f2",
        "bf16": "<u2",
        "f64": "<f8",
        "i8": "<i1",
        "i16": "<i2",
        "i32": "<i4",
        "i64": "<i8",
    }
)
FLOATS: frozenset[str] = frozenset({"f32", "f16", "bf16", "f64"})


def _read_types() -> tuple[DTypeInfo, ...]:
    infos = []
    for number in range(lib.GGML_TYPE_COUNT):
        traits = lib.ggml_get_type_traits(number)
        if traits.type_name == ffi.NULL or traits.blck_size == 0 or traits.type_size == 0:
            continue  # a number that upstream retired
        name = ffi.string(traits.type_name).decode()
        numpy_name = _NUMPY_NAMES.get(name)
        infos.append(
            DTypeInfo(
                number,
                name,
                int(traits.blck_size),
                int(traits.type_size),
                bool(traits.is_quantized),
                np.dtype(numpy_name) if numpy_name else None,
            )
        )
    return tuple(infos)


BY_NUMBER: Mapping[int, DTypeInfo] = MappingProxyType({info.number: info for info in _read_types()})
DTYPES: Mapping[str, DTypeInfo] = MappingProxyType({info.name: info for info in BY_NUMBER.values()})
_ANY_CASE: Mapping[str, DTypeInfo] = MappingProxyType({name.lower(): info for name, info in DTYPES.items()})

F32 = DTYPES["f32"].number
F16 = DTYPES["f16"].number
BF16 = DTYPES["bf16"].number
I8 = DTYPES["i8"].number
I16 = DTYPES["i16"].number
I32 = DTYPES["i32"].number
I64 = DTYPES["i64"].number
QUANTIZED: frozenset[int] = frozenset(info.number for info in BY_NUMBER.values() if info.is_quantized)


def dtype_info(dtype: str) -> DTypeInfo:
    """The type called `dtype`. Raises: DTypeError with the known names."""
    info = DTYPES.get(dtype)
    if info is None and isinstance(dtype, str):
        info = _ANY_CASE.get(dtype.lower())
    if info is None:
        raise DTypeError(f"unknown element type {dtype!r}; known are {', '.join(DTYPES)}", dtype=dtype)
    return info


def dtype_name(number: int) -> str:
    """The name of type `number`, also for numbers that upstream retired."""
    info = BY_NUMBER.get(number)
    return info.name if info else f"type {number}"


def type_traits(dtype: str) -> tuple[int, int, bool]:
    """(elements a block, bytes a block, is quantised)."""
    info = dtype_info(dtype)
    return info.block_size, info.type_size, info.is_quantized


def row_size(dtype: str, n: int) -> int:
    """Bytes of a row of `n` elements. Raises: ShapeError if `n` is not a whole number of blocks."""
    info = dtype_info(dtype)
    if n < 0 or n % info.block_size:
        raise ShapeError(
            f"{n} elements are not whole blocks of {info.name} ({info.block_size} elements each)", n=n
        )
    return n // info.block_size * info.type_size


def requires_imatrix(dtype: str) -> bool:
    """True for the types that ggml cannot quantise without an importance matrix."""
    return bool(lib.ggml_quantize_requires_imatrix(dtype_info(dtype).number))


def _has_quantize_chunk(info: DTypeInfo) -> bool:
    # ggml_quantize_chunk has no case for the two activation-only types and for the integers.
    if info.name in ("f32", "f16", "bf16"):
        return True
    return info.is_quantized and info.name not in ("q8_1", "q8_K")


def quantize(
    dtype: str, array: npt.NDArray[np.float32], imatrix: npt.NDArray[np.float32] | None = None
) -> bytes:
    """`array` (..., n_per_row) as bytes of `dtype`, by `ggml_quantize_chunk`; `imatrix` (n_per_row,) weighs
    columns.

    Raises: DTypeError for a type without a quantiser or a missing importance matrix; ShapeError for partial
    blocks.
    """
    info = dtype_info(dtype)
    source = np.ascontiguousarray(array, dtype=np.float32)
    n_per_row = source.shape[-1] if source.ndim else 1
    n_bytes = row_size(dtype, n_per_row) * (source.size // n_per_row if n_per_row else 0)
    if not n_bytes:
        return b""
    out = ffi.new("uint8_t[]", n_bytes)
    if not _has_quantize_chunk(info):
        traits = lib.ggml_get_type_traits(info.number)
        if traits.from_float_ref == ffi.NULL:
            raise DTypeError(f"ggml has no quantiser for {info.name}", dtype=info.name)
        traits.from_float_ref(ffi.from_buffer("float[]", source), out, source.size)
        return bytes(ffi.buffer(out))
    weights = ffi.NULL
    if imatrix is not None:
        matrix = np.ascontiguousarray(imatrix, dtype=np.float32)
        if matrix.shape != (n_per_row,):
            raise ShapeError(f"imatrix is {matrix.shape}, expected ({n_per_row},)", imatrix=matrix.shape)
        weights = ffi.from_buffer("float[]", matrix)
    elif requires_imatrix(dtype):
        raise DTypeError(
            f"{info.name} cannot be quantised without an importance matrix: pass imatrix", dtype=info.name
        )
    values = ffi.from_buffer("float[]", source)
    lib.ggml_quantize_chunk(info.number, values, out, 0, source.size // n_per_row, n_per_row, weights)
    return bytes(ffi.buffer(out))


def dequantize(dtype: str, data: Any, n: int) -> npt.NDArray[np.float32]:
    """The first `n` elements of `data` (any buffer of `dtype`) as (n,) float32, by ggml's own `to_float`.

    Raises: DTypeError for integers and types ggml cannot read back; ShapeError if `data` is too short.
    """
    info = dtype_info(dtype)
    needed = row_size(dtype, n)
    source = ffi.from_buffer("uint8_t[]", data)
    if len(source) < needed:
        raise ShapeError(
            f"{n} elements of {info.name} need {needed} bytes, got {len(source)}", n=n, given=len(source)
        )
    if info.name == "f32":
        return np.frombuffer(data, np.float32, n).copy()
    to_float = lib.ggml_get_type_traits(info.number).to_float
    if to_float == ffi.NULL:
        raise DTypeError(f"ggml cannot turn {info.name} into floats", dtype=info.name)
    out = np.empty(n, np.float32)
    if n:
        to_float(source, ffi.from_buffer("float[]", out), n)
    return out
