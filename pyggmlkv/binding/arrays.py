"""Tensor data in and out as NumPy arrays: a view where the host can see the memory, a copy through the
backend else.

A tensor's host pointer is followed only if its buffer is host memory. A view keeps the memory alive: an owner
that is closed while views exist is unusable at once, its memory goes when the last view dies. Upstream:
ggml-backend.h, ggml_backend_tensor_get / _set; ggml.c, ggml_nbytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding.dtypes import FLOATS, DTypeInfo, dequantize, quantize
from pyggmlkv.binding.handle import Resource
from pyggmlkv.errors import BindingError, ClosedError, DTypeError, ShapeError

if TYPE_CHECKING:
    from pyggmlkv.binding.tensor import Tensor

_UINT8 = np.dtype(np.uint8)
_FLOAT_ARRAYS = frozenset("efd")  # NumPy's character codes of float16, float32, float64


class _Memory:
    """Whose memory a tensor lies in, and what may be done with it."""

    __slots__ = ("bare", "is_host", "readonly", "repacked", "resource")

    def __init__(
        self,
        resource: Resource,
        is_host: bool,
        readonly: bool = False,
        bare: bool = False,
        repacked: bool = False,
    ) -> None:
        self.resource = resource
        self.is_host = is_host
        self.readonly = readonly
        self.bare = bare  # arena memory: no ggml buffer around it
        self.repacked = repacked  # written whole, never read


def _memory(tensor: Tensor) -> _Memory:
    """Raises: BindingError if the tensor has no memory, ClosedError if it is gone."""
    pointer = tensor._pointer
    if pointer.data == ffi.NULL:
        raise BindingError(
            f"{tensor!r} has no memory yet: allocate it in a Buffer or with Scheduler.alloc_graph"
        )
    arena = tensor._root_arena()
    where = pointer.buffer
    if where == ffi.NULL:
        return _Memory(arena._checked_resource(), True, bare=True)
    buffer = arena._buffers.get(where)
    if buffer is not None:
        return _Memory(
            buffer._checked_resource(), buffer.is_host, buffer.readonly, repacked=buffer.is_repacked
        )
    if arena._compute is None:
        raise BindingError(f"{tensor!r} lies in a buffer that is not known here")
    resource, current = arena._compute
    if not resource.live:
        raise resource.error()
    if not current:
        raise ClosedError(
            f"the memory of {tensor!r} was given to a newer graph of its Scheduler; read it before"
        )
    return _Memory(resource, bool(lib.ggml_backend_buffer_is_host(where)))


class _Export:
    """Base object of a NumPy view: as long as it lives, the memory's owner does not free it."""

    __slots__ = ("__array_interface__", "_resource", "_tensor")

    def __init__(
        self,
        memory: _Memory,
        tensor: Tensor,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> None:
        self.__array_interface__ = {
            "data": (int(ffi.cast("uintptr_t", tensor._p.data)), memory.readonly),
            "shape": shape,
            "strides": strides,
            "typestr": dtype.str,
            "version": 3,
        }
        self._tensor = tensor  # and with it the Python owners
        self._resource = memory.resource
        memory.resource.export()

    def __del__(self) -> None:
        self._resource.unexport()


def view(tensor: Tensor) -> npt.NDArray[Any]:
    """See `Tensor.numpy`."""
    info = tensor.dtype_info
    if info.numpy is None:
        raise DTypeError(f"{tensor!r} is quantised: a view is not possible, use to_numpy()", dtype=info.name)
    memory = _memory(tensor)
    if not memory.is_host:
        raise BindingError(f"{tensor!r} is not in host memory: use to_numpy() and set()")
    return _shown(memory, tensor, info.numpy)


def _shown(memory: _Memory, tensor: Tensor, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    n = tensor.n_dims
    strides = tensor.nb[n - 1 :: -1] if n < 4 else tensor.nb[::-1]
    return np.asarray(_Export(memory, tensor, dtype, tensor.shape, strides))


def raw_view(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """See `Tensor.raw`."""
    memory = _memory(tensor)
    if not memory.is_host:
        raise BindingError(f"{tensor!r} is not in host memory: use get_bytes() and set_bytes()")
    if not tensor.is_contiguous():
        raise BindingError(f"{tensor!r} is a strided view; the gaps between its rows belong to other tensors")
    return np.asarray(_Export(memory, tensor, _UINT8, (tensor.nbytes,), (1,)))


def _span(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """(nbytes,) uint8 copy of everything between the first and the last element."""
    memory = _memory(tensor)
    n = tensor.nbytes
    raw = np.empty(n, np.uint8)
    if n:
        _get(memory, tensor, raw, 0, n)
    return raw


def _check_readable(memory: _Memory, tensor: Tensor) -> None:
    if memory.repacked:
        raise BindingError(
            f"{tensor!r} lies in {tensor.buffer!r}: the device has laid it out its own way and it cannot be read back; "
            "read the file, or load the weight into plain memory"
        )


def _get(memory: _Memory, tensor: Tensor, into: Any, offset: int, n: int) -> None:
    _check_readable(memory, tensor)
    target = ffi.from_buffer("char[]", into, require_writable=True)
    if memory.bare:
        ffi.memmove(target, ffi.cast("char *", tensor._p.data) + offset, n)
    else:
        lib.ggml_backend_tensor_get(tensor._p, target, offset, n)


def _put(memory: _Memory, tensor: Tensor, data: Any, offset: int, n: int) -> None:
    if memory.readonly:
        raise BindingError(f"{tensor!r} lies in read-only memory")
    if memory.repacked and (offset or n != tensor.nbytes):
        raise BindingError(f"{tensor!r} lies in {tensor.buffer!r}: it can only be written whole")
    if memory.bare:
        ffi.memmove(ffi.cast("char *", tensor._p.data) + offset, data, n)
    else:
        lib.ggml_backend_tensor_set(tensor._p, ffi.from_buffer(data), offset, n)


def _rows(tensor: Tensor, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(ne3, ne2, ne1, row bytes) view of `raw`, whose rows lie as in the tensor."""
    info = tensor.dtype_info
    if tensor.nb[0] != info.type_size:
        raise DTypeError(
            f"{tensor!r} is quantised and permuted in its first dimension: its blocks cannot be read"
        )
    row = tensor.ne[0] // info.block_size * info.type_size
    shape = (tensor.ne[3], tensor.ne[2], tensor.ne[1], row)
    return np.lib.stride_tricks.as_strided(raw, shape, (tensor.nb[3], tensor.nb[2], tensor.nb[1], 1))


def read(tensor: Tensor, dequantized: bool = True) -> npt.NDArray[Any]:
    """See `Tensor.to_numpy`."""
    info = tensor.dtype_info
    raw = _span(tensor)
    if info.numpy is None:
        packed = np.ascontiguousarray(_rows(tensor, raw))
        if not dequantized:
            return packed.reshape(*tensor.shape[:-1], packed.shape[-1])
        return dequantize(info.name, packed, tensor.n_elements).reshape(tensor.shape)
    n = tensor.n_dims
    strides = tensor.nb[n - 1 :: -1] if n < 4 else tensor.nb[::-1]
    if tensor.n_elements == 0:
        values = np.empty(tensor.shape, info.numpy)
    else:
        values = np.ndarray(tensor.shape, info.numpy, raw, 0, strides)
    if info.name == "bf16" and dequantized:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values)


def _converted(info: DTypeInfo, array: npt.NDArray[Any], tensor: Tensor) -> npt.NDArray[Any]:
    """`array` in the tensor's own representation, C-contiguous. Raises: DTypeError."""
    if array.dtype == info.numpy:
        return np.ascontiguousarray(array)
    from_float = array.dtype.char in _FLOAT_ARRAYS
    if from_float and info.numpy is not None and info.name in FLOATS and info.name != "bf16":
        return np.ascontiguousarray(array, dtype=info.numpy)
    if from_float and (info.is_quantized or info.name == "bf16"):
        return np.frombuffer(quantize(info.name, np.asarray(array, np.float32)), info.numpy or _UINT8)
    wanted = "floats" if info.is_quantized else str(info.numpy)
    raise DTypeError(f"{tensor!r} takes {wanted}, got {array.dtype}", dtype=info.name, given=str(array.dtype))


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    i = 0
    while i < len(shape) - 1 and shape[i] == 1:
        i += 1
    return shape[i:] or (1,)


def write(tensor: Tensor, values: npt.ArrayLike) -> None:
    """See `Tensor.set`."""
    array = np.asarray(values)
    if array.shape != tensor.shape and _without_leading_ones(array.shape) != _without_leading_ones(
        tensor.shape
    ):
        raise ShapeError(
            f"{tensor!r} is {tensor.shape} in NumPy order, the array is {array.shape}",
            expected=tensor.shape,
            given=array.shape,
        )
    memory = _memory(tensor)
    info = tensor.dtype_info
    data = _converted(info, array, tensor)
    if not data.size:
        return
    if tensor.is_contiguous():
        _put(memory, tensor, data, 0, data.nbytes)
        return
    if memory.readonly:
        raise BindingError(f"{tensor!r} lies in read-only memory")
    if info.numpy is not None and memory.is_host:
        _shown(memory, tensor, info.numpy)[...] = data.reshape(tensor.shape)
        return
    raw = _span(tensor)
    if info.numpy is None:
        rows = _rows(tensor, raw)
        rows[...] = data.reshape(rows.shape)
    else:
        np.ndarray(tensor.ne[::-1], info.numpy, raw, 0, tensor.nb[::-1])[...] = data.reshape(tensor.ne[::-1])
    _put(memory, tensor, raw, 0, raw.nbytes)


def copy(target: Tensor, source: Tensor) -> None:
    """See `Tensor.copy_from`."""
    if target.ne != source.ne or target._type != source._type or target.nb != source.nb:
        raise ShapeError(
            f"copy_from: layouts differ: {target!r} nb {target.nb} from {source!r} nb {source.nb}"
        )
    into, out_of = _memory(target), _memory(source)
    if into.readonly:
        raise BindingError(f"{target!r} lies in read-only memory")
    _check_readable(out_of, source)
    if into.bare or out_of.bare or into.repacked:
        write_bytes(target, read_bytes(source, 0, None), 0)
    else:
        lib.ggml_backend_tensor_copy(source._p, target._p)


def _checked_range(tensor: Tensor, offset: int, n: int) -> None:
    total = tensor.nbytes
    if offset < 0 or n < 0 or offset + n > total:
        raise ShapeError(
            f"bytes {offset} to {offset + n} are outside of {tensor!r}, {total} bytes", offset=offset, n=n
        )


def read_bytes(tensor: Tensor, offset: int, n: int | None) -> bytes:
    """See `Tensor.get_bytes`."""
    memory = _memory(tensor)
    count = tensor.nbytes - offset if n is None else n
    _checked_range(tensor, offset, count)
    raw = bytearray(count)
    if count:
        _get(memory, tensor, raw, offset, count)
    return bytes(raw)


def write_bytes(tensor: Tensor, data: Any, offset: int) -> None:
    """See `Tensor.set_bytes`."""
    memory = _memory(tensor)
    raw = memoryview(data).cast("B")
    _checked_range(tensor, offset, raw.nbytes)
    if raw.nbytes:
        _put(memory, tensor, raw, offset, raw.nbytes)


def fill_bytes(tensor: Tensor, value: int) -> None:
    """See `Tensor.set_zero`."""
    memory = _memory(tensor)
    if memory.readonly:
        raise BindingError(f"{tensor!r} lies in read-only memory")
    _check_readable(memory, tensor)
    if not tensor.nbytes:
        return
    if not tensor.is_contiguous():
        raise ShapeError(f"set_zero: {tensor!r} is a strided view; its gaps belong to other tensors")
    if memory.bare:
        ffi.memmove(tensor._p.data, bytes([value]) * tensor.nbytes, tensor.nbytes)
    else:
        lib.ggml_backend_tensor_memset(tensor._p, value, 0, tensor.nbytes)
