"""Buffers: data memory of a device or of the host, and the placing of tensors in it.

A Buffer refuses what ggml would assert on: too small, misaligned, already placed. Does not know graphs.
Upstream: ggml-backend.h, ggml_backend_buffer(_type); ggml-alloc.h, ggml_backend_alloc_ctx_tensors_from_buft.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.handle import Owner, Resource
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import BindingError, DeviceMemoryError, ShapeError

if TYPE_CHECKING:
    from pyggmlkv.binding.device import Device

Usage = Literal["any", "weights", "compute"]
_USAGES: Mapping[Usage, int] = {
    "any": lib.GGML_BACKEND_BUFFER_USAGE_ANY,
    "weights": lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS,
    "compute": lib.GGML_BACKEND_BUFFER_USAGE_COMPUTE,
}


class BufferType:
    """A kind of memory (`CPU`, `CPU_REPACK`, `Vulkan0`, ...). Lives as long as the process."""

    __slots__ = ("_p",)

    def __init__(self, pointer: Any) -> None:
        self._p = pointer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BufferType) and bool(self._p == other._p)

    def __hash__(self) -> int:
        return hash(self._p)

    @property
    def name(self) -> str:
        """ggml's name."""
        return str(ffi.string(lib.ggml_backend_buft_name(self._p)).decode())

    @property
    def alignment(self) -> int:
        """Bytes that a tensor's place must be a multiple of."""
        return int(lib.ggml_backend_buft_get_alignment(self._p))

    @property
    def max_size(self) -> int:
        """Bytes of the largest buffer."""
        return int(lib.ggml_backend_buft_get_max_size(self._p))

    @property
    def is_host(self) -> bool:
        """True if NumPy can see the memory."""
        return bool(lib.ggml_backend_buft_is_host(self._p))

    @property
    def is_repacked(self) -> bool:
        """True for the CPU's extra buffer types, which keep weights in layouts of their own.

        Upstream: ggml-cpu/repack.cpp, whose buffers have no `get_tensor`.
        """
        from pyggmlkv.binding.device import (
            devices,
        )  # devices know buffers, not the other way round, but for this

        return any(self in device.extra_buffer_types for device in devices() if device.type == "cpu")

    def alloc_size(self, tensor: Tensor) -> int:
        """Bytes that `tensor` takes here, padding included."""
        return int(lib.ggml_backend_buft_get_alloc_size(self._p, tensor._pointer))

    def alloc_tensors_size(self, arena: TensorArena) -> int:
        """Bytes that `alloc_tensors` would allocate; nothing is allocated."""
        return int(lib.ggml_backend_alloc_ctx_tensors_from_buft_size(arena._pointer, self._p))

    def alloc(self, nbytes: int) -> Buffer:
        """An empty buffer to `place` tensors in. Raises: DeviceMemoryError."""
        if nbytes < 0:
            raise ShapeError(f"a buffer cannot have {nbytes} bytes", nbytes=nbytes)
        if nbytes > min(self.max_size, 2**62):
            raise DeviceMemoryError(
                f"{self.name}: a buffer has at most {self.max_size} bytes, {nbytes} wanted"
            )
        Resource.refuse_after_fork()
        pointer = lib.ggml_backend_buft_alloc_buffer(self._p, nbytes)
        if pointer == ffi.NULL:
            raise DeviceMemoryError(f"{self.name}: {nbytes} bytes could not be allocated", nbytes=nbytes)
        return Buffer(pointer)

    def alloc_tensors(self, arena: TensorArena) -> Buffer:
        """Memory for every tensor of `arena` that has none; the buffer keeps them until it is closed.

        Raises: DeviceMemoryError; BindingError if the arena holds data itself or nothing is left to allocate.
        """
        pointer = arena._pointer
        if arena.has_data:
            raise BindingError("this arena gives its tensors memory itself (data_bytes); make it without")
        Resource.refuse_after_fork()
        nbytes = int(lib.ggml_backend_alloc_ctx_tensors_from_buft_size(pointer, self._p))
        if nbytes == 0:
            return self._of_empty_tensors(arena)
        for tensor in arena.tensors():
            size = (
                self.alloc_size(tensor)
                if tensor._p.data == ffi.NULL and tensor._p.view_src == ffi.NULL
                else 0
            )
            if size > min(self.max_size, 2**62):
                raise DeviceMemoryError(
                    f"{self.name}: {tensor!r} needs {size} bytes, at most {self.max_size} fit"
                )
        unplaced = [t for t in arena.tensors() if t._p.buffer == ffi.NULL]
        raw = lib.ggml_backend_alloc_ctx_tensors_from_buft(pointer, self._p)
        if raw == ffi.NULL:
            _forget(unplaced)
            raise DeviceMemoryError(f"{self.name}: {nbytes} bytes could not be allocated", nbytes=nbytes)
        buffer = Buffer(raw)
        buffer._serve(arena, {t._p.buffer for t in unplaced if t._p.view_src == ffi.NULL})
        return buffer

    def _of_empty_tensors(self, arena: TensorArena) -> Buffer:
        """ggml allocates nothing for tensors without elements; give them a place so that they count as
        allocated.
        """
        unplaced = [t for t in arena.tensors() if t._p.data == ffi.NULL and t._p.view_src == ffi.NULL]
        if not unplaced:
            raise BindingError("this arena has no tensor without memory")
        buffer = self.alloc(self.alignment)
        for tensor in unplaced:
            buffer.place(tensor, 0)
        return buffer

    def __repr__(self) -> str:
        return f"<BufferType {self.name}>"


def _forget(tensors: list[Tensor]) -> None:
    """Undo what a failed allocation wrote: those places are freed already."""
    for tensor in tensors:
        tensor._p.buffer = ffi.NULL
        tensor._p.data = ffi.NULL


class Buffer(Owner):
    """Memory that tensors lie in. Closing it makes their `numpy()` and every graph that reads them raise
    ClosedError.
    """

    def __init__(self, pointer: Any, *, readonly: bool = False, keep: object = None) -> None:
        self._own(pointer, lib.ggml_backend_buffer_free, keep=keep)
        self.is_host = bool(lib.ggml_backend_buffer_is_host(pointer))
        """True if NumPy can see the memory."""
        self.readonly = readonly
        """True if the memory must not be written (a read-only file mapping)."""
        self.is_repacked = self.buffer_type.is_repacked
        """True if the device lays tensors out its own way: they are written whole and cannot be read back."""

    @classmethod
    def from_host_memory(cls, device: Device, memory: Any, max_tensor_size: int) -> Buffer:
        """A buffer over existing memory (an mmap, an array), without a copy; it keeps `memory` alive.

        Raises: BindingError if the device cannot do that or the memory is not aligned for it;
        DeviceMemoryError.
        """
        if not device.caps.buffer_from_host_ptr:
            raise BindingError(f"device {device.name} cannot use host memory in place", device=device.name)
        Resource.refuse_after_fork()
        held = ffi.from_buffer(memory)
        start = int(ffi.cast("uintptr_t", held))
        alignment = device.buffer_type.alignment
        if start % alignment:
            raise BindingError(
                f"host memory must start at a multiple of {alignment} bytes", alignment=alignment
            )
        pointer = lib.ggml_backend_dev_buffer_from_host_ptr(
            device._p, ffi.cast("void *", start), len(held), max_tensor_size
        )
        if pointer == ffi.NULL:
            raise DeviceMemoryError(
                f"device {device.name} could not use {len(held)} bytes of host memory in place"
            )
        return cls(pointer, readonly=memoryview(memory).readonly, keep=held)

    def _serve(self, arena: TensorArena, pointers: set[Any]) -> None:
        """Tensors of `arena` lie in these C buffers (several if the device's largest is too small)."""
        for pointer in pointers:
            arena._buffers[pointer] = self

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return int(lib.ggml_backend_buffer_get_size(self._pointer))

    @property
    def name(self) -> str:
        """ggml's name of the kind of memory."""
        return str(ffi.string(lib.ggml_backend_buffer_name(self._pointer)).decode())

    @property
    def buffer_type(self) -> BufferType:
        """The kind of memory."""
        return BufferType(lib.ggml_backend_buffer_get_type(self._pointer))

    @property
    def usage(self) -> Usage:
        """`weights` steers the Scheduler: ops run where their weights are."""
        number = lib.ggml_backend_buffer_get_usage(self._pointer)
        return next(name for name, value in _USAGES.items() if value == number)

    @usage.setter
    def usage(self, usage: Usage) -> None:
        if usage not in _USAGES:
            raise BindingError(f"usage must be one of {', '.join(_USAGES)}, got {usage!r}", usage=usage)
        lib.ggml_backend_buffer_set_usage(self._pointer, _USAGES[usage])

    def clear(self, value: int = 0) -> None:
        """Fill with a byte. Raises: BindingError if read-only."""
        pointer = self._pointer
        if self.readonly:
            raise BindingError("this buffer is read-only memory")
        if not 0 <= value <= 255:
            raise BindingError(f"clear: a byte is 0 to 255, got {value}", value=value)
        if lib.ggml_backend_buffer_get_size(pointer):
            lib.ggml_backend_buffer_clear(pointer, value)

    def place(self, tensor: Tensor, offset: int) -> None:
        """Let `tensor` lie at `offset` bytes; a view takes its source's place and ignores `offset`.

        Raises: BindingError if it has memory already or the place is misaligned; ShapeError if it does not
        fit.
        """
        pointer, t = self._pointer, tensor._pointer
        if t.data != ffi.NULL or t.buffer != ffi.NULL:
            raise BindingError(f"{tensor!r} has memory already")
        if t.view_src != ffi.NULL:
            if t.view_src.buffer == ffi.NULL:
                raise BindingError(f"{tensor!r} is a view of a tensor without memory: place that first")
            status = lib.ggml_backend_view_init(t)
        else:
            alignment = int(lib.ggml_backend_buffer_get_alignment(pointer))
            if offset < 0 or offset % alignment:
                raise BindingError(
                    f"place: offset {offset} is not a multiple of {alignment} bytes", offset=offset
                )
            needed = int(lib.ggml_backend_buffer_get_alloc_size(pointer, t))
            if offset + needed > self.nbytes:
                raise ShapeError(
                    f"{tensor!r} needs {needed} bytes at {offset}, the buffer has {self.nbytes}",
                    needed=needed,
                    offset=offset,
                )
            base = ffi.cast("char *", lib.ggml_backend_buffer_get_base(pointer))
            self._serve(tensor.arena, {pointer})
            status = lib.ggml_backend_tensor_alloc(pointer, t, base + offset)
        if status != lib.GGML_STATUS_SUCCESS:
            raise DeviceMemoryError(f"{self.name}: {tensor!r} could not be placed")

    def __repr__(self) -> str:
        return "<Buffer closed>" if self.closed else f"<Buffer {self.name} {self.nbytes} bytes>"
