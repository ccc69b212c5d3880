"""The arena that holds tensor headers and graphs: a ggml_context whose room is counted before ggml would
abort.

Remembers which other arenas and buffers its graphs read, so that a run can refuse what was closed meanwhile.
Upstream: ggml.c, ggml_init, ggml_new_object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding.callbacks import StoredError
from pyggmlkv.binding.dtypes import dtype_info, row_size
from pyggmlkv.binding.handle import Owner, Resource
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import ArenaFullError, BindingError, ClosedError, ShapeError

if TYPE_CHECKING:
    from pyggmlkv.binding.buffer import Buffer

TENSOR_OVERHEAD: int = int(lib.ggml_tensor_overhead())
"""Bytes of an arena that one tensor header takes."""
MEM_ALIGN: int = int(lib.GGML_MEM_ALIGN)
_DATA_HEADER = TENSOR_OVERHEAD - ffi.sizeof("struct ggml_tensor") + MEM_ALIGN
_MAX_BYTES = 2**62


def address(pointer: Any) -> int:
    """The address of a C pointer."""
    return int(ffi.cast("uintptr_t", pointer))


class TensorArena(Owner):
    """Memory for the headers of up to `n_tensors` tensors, and for graphs of `graph_nodes` nodes.

    Tensors get no data memory (a Buffer or a Scheduler gives it) unless `data_bytes` is set; then they lie in
    the arena itself, host memory, and ops allocate their results there. Upstream: ggml.c, ggml_init.

    Raises: ShapeError for negative sizes; ArenaFullError if that much memory cannot be reserved.
    """

    def __init__(self, n_tensors: int, *, graph_nodes: int = 0, data_bytes: int = 0) -> None:
        if n_tensors < 0 or graph_nodes < 0 or data_bytes < 0:
            raise ShapeError(
                f"TensorArena: sizes must not be negative, got n_tensors={n_tensors}, "
                f"graph_nodes={graph_nodes}, data_bytes={data_bytes}"
            )
        graph_bytes = (
            int(lib.ggml_graph_overhead_custom(graph_nodes, False))
            if 0 < graph_nodes < 2**31
            else graph_nodes
        )
        data_total = data_bytes + n_tensors * _DATA_HEADER if data_bytes else 0
        total = n_tensors * TENSOR_OVERHEAD + graph_bytes + data_total + MEM_ALIGN
        if total > _MAX_BYTES:
            raise ArenaFullError(f"TensorArena: {total} bytes cannot be reserved", nbytes=total)
        try:
            memory = np.empty(total + MEM_ALIGN, np.uint8)
        except (MemoryError, ValueError) as error:
            raise ArenaFullError(f"TensorArena: {total} bytes cannot be reserved", nbytes=total) from error
        base = -memory.ctypes.data % MEM_ALIGN + memory.ctypes.data
        pointer = lib.ggml_init([total, ffi.cast("void *", base), True])
        if pointer == ffi.NULL:
            raise ArenaFullError("ggml_init failed", nbytes=total)
        self._own(pointer, lib.ggml_free, keep=memory)
        self._p = pointer
        self._base, self._end = base, base + total
        self._capacity = n_tensors, graph_bytes, data_bytes
        self._foreign: dict[TensorArena, list[bool]] = {}
        self._has_data = bool(data_bytes)
        self._live: list[bool] = self._checked_resource().live
        self._fresh()

    def _fresh(self) -> None:
        """State of an arena without tensors."""
        self._room, self._graph_room, self._data_room = self._capacity
        self._last = ffi.NULL
        self._foreign.clear()
        self._buffers: dict[Any, Buffer] = {}
        self._compute: tuple[Resource, list[bool]] | None = None
        self._keep: list[object] = []  # handles that C holds
        self._errors: list[StoredError] = []  # where ops written in Python leave what they raise

    def _stale(self) -> BindingError:
        resource = self._resource
        if resource is None or not resource.live:
            return ClosedError("TensorArena was never opened") if resource is None else resource.error()
        return ClosedError("this tensor's arena was reset; make the tensor again")

    # -- tensors --

    @property
    def n_tensors(self) -> int:
        """Number of tensor headers made since the start or the last reset."""
        self._checked_resource()
        return self._capacity[0] - self._room

    @property
    def has_data(self) -> bool:
        """True if tensors get their data memory from the arena itself."""
        return self._has_data

    def new_tensor(self, dtype: str, *ne: int, name: str | None = None) -> Tensor:
        """A leaf of 1 to 4 sizes in ggml's order, contiguous.

        Raises: ShapeError for bad sizes or partial blocks; DTypeError; ArenaFullError.
        """
        pointer = self._pointer
        info = dtype_info(dtype)
        if not 1 <= len(ne) <= 4:
            raise ShapeError(f"new_tensor: expected 1 to 4 sizes, got {len(ne)}: {list(ne)}", ne=ne)
        n_bytes = row_size(dtype, ne[0])
        for size in ne:
            if size < 0:
                raise ShapeError(f"new_tensor: sizes must not be negative, got {list(ne)}", ne=ne)
        for size in ne[1:]:
            n_bytes *= size
        if n_bytes > _MAX_BYTES:
            raise ShapeError(
                f"new_tensor: {list(ne)} of {info.name} is {n_bytes} bytes, too many to address", ne=ne
            )
        if self._room < 1:
            raise self._full(1)
        tensor = self._made(lib.ggml_new_tensor(pointer, info.number, len(ne), ne))
        if name is not None:
            tensor.name = name
        return tensor

    def tensors(self) -> Iterator[Tensor]:
        """All tensors in the order they were made, views and op results included."""
        current = lib.ggml_get_first_tensor(self._pointer)
        while current != ffi.NULL:
            yield Tensor(self, current)
            current = lib.ggml_get_next_tensor(self._pointer, current)

    def get(self, name: str) -> Tensor:
        """The first tensor called `name`. Raises: BindingError if there is none."""
        found = lib.ggml_get_tensor(self._pointer, name.encode())
        if found == ffi.NULL:
            raise BindingError(f"this arena has no tensor called {name!r}", name=name)
        return Tensor(self, found)

    def reset(self) -> None:
        """Forget all tensors and graphs, keep the memory; tensors made before raise ClosedError from now on.

        Raises: BindingError while C is running on it, or while NumPy views show data that lies in it.
        """
        resource = self._checked_resource()
        resource._refuse_if_busy()
        if resource.n_views:
            raise BindingError(
                f"reset: {resource.n_views} NumPy views show data of this arena; drop them first"
            )
        for child in reversed(list(resource._children.values())):
            child.close()
        lib.ggml_reset(resource.pointer)
        self._live.clear()
        self._live = resource.live = [True]
        self._fresh()

    # -- used by the ops --

    def _made(self, pointer: Any) -> Tensor:
        """Account for one new header and wrap it."""
        self._room -= 1
        if self._has_data:
            self._give_data()
        return Tensor(self, pointer)

    def _made_many(self, pointer: Any, n: int) -> Tensor:
        self._room -= n - 1
        return self._made(pointer)

    def _full(self, needed: int) -> ArenaFullError:
        total = self._capacity[0]
        return ArenaFullError(
            f"this arena holds {total} tensors and has room for {self._room} more, {needed} needed; "
            "make it with a larger n_tensors",
            n_tensors=total,
            needed=needed,
        )

    def _give_data(self) -> None:
        """Data memory for headers made since the last call (an op may make several)."""
        context = self._p
        if self._last == ffi.NULL:
            current = lib.ggml_get_first_tensor(context)
        else:
            current = lib.ggml_get_next_tensor(context, self._last)
        while current != ffi.NULL:
            if current.data == ffi.NULL:
                source = current.view_src
                if source == ffi.NULL:
                    n_bytes = -(-int(lib.ggml_nbytes(current)) // MEM_ALIGN) * MEM_ALIGN
                    if n_bytes > self._data_room:
                        self._last = current  # it stays without memory
                        room, total = self._data_room, self._capacity[2]
                        raise ArenaFullError(
                            f"this arena has {room} of {total} data bytes left, {n_bytes} needed; "
                            "make it with a larger data_bytes",
                            needed=n_bytes,
                        )
                    self._data_room -= n_bytes
                    current.data = lib.ggml_new_buffer(context, n_bytes)
                elif source.data != ffi.NULL:
                    current.data = ffi.cast("char *", source.data) + current.view_offs
                    current.buffer = source.buffer
            self._last = current
            current = lib.ggml_get_next_tensor(context, current)

    def _adopt(self, *tensors: Tensor) -> None:
        """Slow path of the ops' checks: all alive? remember arenas that this one now depends on."""
        live = self._live
        if not live:
            raise self._stale()
        for tensor in tensors:
            if tensor._live is live:
                continue
            if not tensor._live:
                raise tensor.arena._stale()
            self._foreign[tensor.arena] = tensor._live

    def _check_operands(self) -> None:
        """Everything that this arena's graphs read is still there. Raises: ClosedError."""
        if not self._live:
            raise self._stale()
        for arena, live in self._foreign.items():
            if not live:
                raise ClosedError(
                    "a graph reads tensors of an arena that was closed or reset", arena=repr(arena)
                )
            if arena._foreign and arena is not self:
                arena._check_operands()
            elif arena._buffers:
                arena._check_buffers()
        if self._buffers:
            self._check_buffers()

    def _check_buffers(self) -> None:
        for buffer in self._buffers.values():
            if buffer.closed:
                raise ClosedError("a graph reads tensors whose Buffer was closed")

    def _reachable(self) -> list[TensorArena]:
        """This arena and every one that its graphs may read."""
        found = [self]
        for reached in found:
            found.extend(a for a in reached._foreign if a not in found)
        return found

    def _in_use(self) -> list[Resource]:
        """What has to stay open while C runs a graph of this arena: arenas that it reads, and their buffers."""
        arenas = self._reachable()
        buffers = [buffer._checked_resource() for arena in arenas for buffer in arena._buffers.values()]
        return [arena._checked_resource() for arena in arenas] + buffers

    # -- pointer to object --

    def _owner_of(self, where: int, seen: set[int]) -> TensorArena | None:
        if self._base <= where < self._end:
            return self
        seen.add(id(self))
        for arena in self._foreign:
            if id(arena) not in seen:
                found = arena._owner_of(where, seen)
                if found is not None:
                    return found
        return None

    def _find(self, pointer: Any) -> TensorArena:
        where = address(pointer)
        if self._base <= where < self._end:
            return self
        found = self._owner_of(where, set())
        if found is None:
            raise BindingError("this tensor belongs to no arena known here")
        if not found._live:
            raise found._stale()
        return found

    def _wrap(self, pointer: Any) -> Tensor:
        """The one door from a C pointer to a Tensor."""
        return Tensor(self._find(pointer), pointer)

    def __repr__(self) -> str:
        if self.closed:
            return "<TensorArena closed>"
        return f"<TensorArena {self.n_tensors} of {self._capacity[0]} tensors>"
