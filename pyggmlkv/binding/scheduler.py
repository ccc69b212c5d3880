"""Runs graphs over several backends: ggml's own scheduler, with everything it would assert on checked before.

A graph is looked through once (every op supported somewhere, every buffer usable), then running it again
costs a few dictionary reads. Upstream: ggml-backend.cpp, ggml_backend_sched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.backend import Backend, check_status
from pyggmlkv.binding.buffer import BufferType
from pyggmlkv.binding.callbacks import EvalWatch
from pyggmlkv.binding.cgraph import ComputeGraph
from pyggmlkv.binding.handle import Owner, Resource
from pyggmlkv.binding.row_ids import RowIds, check_row_ids, row_ids_of
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import BackendError, BindingError, ComputeError, DeviceMemoryError, UnsupportedOpError

MAX_BACKENDS = 16  # GGML_SCHED_MAX_BACKENDS, private to ggml-backend.cpp


class Scheduler(Owner):
    """Splits graphs over `backends` (earlier ones preferred, the last is the CPU) and gives them compute
    memory.

    `graph_size` bounds nodes and leafs together. `buffer_types` gives each backend's compute memory
    (its default). Raises: BackendError for a list ggml would refuse.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        buffer_types: Sequence[BufferType] | None = None,
        graph_size: int = 2048,
        parallel: bool = False,
        op_offload: bool = True,
    ) -> None:
        self.backends = tuple(backends)
        _check_backends(self.backends, buffer_types)
        if not 0 < graph_size < 2**24:
            raise BackendError(
                f"Scheduler: graph_size must be positive, got {graph_size}", graph_size=graph_size
            )
        n = len(self.backends)
        pointers = ffi.new("ggml_backend_t[]", [b._pointer for b in self.backends])
        kinds = ffi.NULL
        if buffer_types is not None:
            kinds = ffi.new("ggml_backend_buffer_type_t[]", [k._p for k in buffer_types])
        Resource.refuse_after_fork()
        pointer = lib.ggml_backend_sched_new(pointers, kinds, n, graph_size, parallel, op_offload)
        if pointer == ffi.NULL:
            raise BackendError("ggml could not make a scheduler")
        self._own(pointer, lib.ggml_backend_sched_free, parents=self.backends)
        self.graph_size = graph_size
        self._graph: ComputeGraph | None = None
        self._n_nodes = 0
        self._row_ids: tuple[RowIds, ...] | None = None
        self._allocation: list[bool] = []
        self._watch: EvalWatch | None = None

    # -- memory --

    def reserve(self, graph: ComputeGraph) -> None:
        """Allocate compute memory for a worst-case graph, which is not kept. Every earlier graph loses its
        memory.

        Raises: UnsupportedOpError, BindingError, DeviceMemoryError.
        """
        resource, pointer = self._ready(graph)
        self._forget_graph()
        with _Busy(resource, graph.arena):
            lib.ggml_backend_sched_reset(resource.pointer)
            ok = lib.ggml_backend_sched_reserve(resource.pointer, pointer)
        if not ok:
            raise DeviceMemoryError(
                "compute memory for this graph could not be allocated", n_nodes=graph.n_nodes
            )

    def split_graph(self, graph: ComputeGraph) -> None:
        """Assign each node of `graph` to a backend without giving it memory: `tensor_backend` then tells.

        Raises: BindingError if a graph is allocated; UnsupportedOpError. Upstream:
        ggml_backend_sched_split_graph.
        """
        resource, pointer = self._ready(graph)
        if self._graph is not None:
            raise BindingError("split_graph: this scheduler holds a graph already; reset() first")
        with _Busy(resource, graph.arena):
            lib.ggml_backend_sched_split_graph(resource.pointer, pointer)

    def alloc_graph(self, graph: ComputeGraph) -> None:
        """Give every tensor of `graph` its place; the graph before loses its memory.

        Raises: UnsupportedOpError, DeviceMemoryError; BindingError if a graph is allocated: `reset()` first.
        """
        resource, pointer = self._ready(graph)
        if self._graph is not None:
            raise BindingError("alloc_graph: this scheduler holds a graph already; reset() first")
        self._forget_graph()
        with _Busy(resource, graph.arena):
            ok = lib.ggml_backend_sched_alloc_graph(resource.pointer, pointer)
        if not ok:
            lib.ggml_backend_sched_reset(resource.pointer)
            raise DeviceMemoryError(
                "compute memory for this graph could not be allocated", n_nodes=graph.n_nodes
            )
        self._graph = graph
        self._n_nodes = graph.n_nodes
        self._row_ids = None
        self._allocation = [True]
        for arena in graph.arena._reachable():
            arena._compute = (resource, self._allocation)

    def reset(self) -> None:
        """Let go of the current graph, its tensors' places and what `set_tensor_backend` said."""
        resource = self._checked_resource()
        resource._refuse_if_busy()
        lib.ggml_backend_sched_reset(resource.pointer)
        self._graph = None

    def _forget_graph(self) -> None:
        self._graph = None
        self._allocation.clear()

    def buffer_size(self, backend: Backend) -> int:
        """Bytes of compute memory held on `backend`."""
        return int(lib.ggml_backend_sched_get_buffer_size(self._pointer, self._checked_backend(backend)))

    def buffer_type(self, backend: Backend) -> BufferType:
        """Kind of compute memory used on `backend`."""
        return BufferType(
            lib.ggml_backend_sched_get_buffer_type(self._pointer, self._checked_backend(backend))
        )

    # -- runs --

    def graph_compute(self, graph: ComputeGraph, *, check_ids: bool = True) -> None:
        """Run `graph` and wait; it is allocated if none is. `check_ids` looks at row ids that are inputs first.

        Raises: RowIndexError; ComputeError (`facts["aborted"]` if a callback stopped it), what a callback raised,
        BindingError if the scheduler holds another graph.
        """
        self._compute(graph, lib.ggml_backend_sched_graph_compute, check_ids)

    def graph_compute_async(self, graph: ComputeGraph) -> None:
        """As `graph_compute`, but returns once the work is queued; `synchronize()` before reading results."""
        self._compute(graph, lib.ggml_backend_sched_graph_compute_async, True)

    def _compute(self, graph: ComputeGraph, function: Any, check_ids: bool) -> None:
        resource = self._checked_resource()
        if graph is not self._graph:
            if self._graph is not None:
                raise BindingError("graph_compute: this scheduler holds another graph; reset() first")
            self.alloc_graph(graph)
        pointer = graph._pointer
        arena = graph.arena
        arena._check_operands()
        if lib.ggml_graph_n_nodes(pointer) != self._n_nodes:
            raise BindingError("graph_compute: nodes were added after the graph was allocated; reset() first")
        if check_ids:
            if self._row_ids is None:
                self._row_ids = row_ids_of(graph)
            check_row_ids(self._row_ids)
        watch = self._watch
        if watch is not None:
            watch.begin(arena)
        Resource.refuse_after_fork()
        Resource.mark_computed()
        with _Busy(resource, arena):
            status = function(resource.pointer, pointer)
        for backend in self.backends:
            if backend._gate is not None:
                backend._gate.finish()
        for error in arena._errors:
            error.reraise()
        if watch is not None:
            watch.reraise()
            if watch.stopped:
                raise ComputeError("graph_compute: stopped by the eval callback", aborted=True)
        check_status(status, "graph_compute")

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        lib.ggml_backend_sched_synchronize(self._pointer)

    def set_eval_callback(self, function: Callable[[Tensor, bool], bool] | None) -> None:
        """Show nodes while they are computed: `function(tensor, ask)`. Asked first (`ask`), a wanted node is
        shown once its data is there; False then stops the run. What it raises is raised after C has
        returned.
        """
        resource = self._checked_resource()
        resource._refuse_if_busy()
        self._watch = None if function is None else EvalWatch(function)
        resource.keep(self._watch)
        if self._watch is None:
            lib.ggml_backend_sched_set_eval_callback(resource.pointer, ffi.NULL, ffi.NULL)
        else:
            lib.ggml_backend_sched_set_eval_callback(resource.pointer, lib.pyggmlkv_eval, self._watch.handle)

    # -- placement --

    @property
    def n_splits(self) -> int:
        """Parts the last graph was split into."""
        return int(lib.ggml_backend_sched_get_n_splits(self._pointer))

    @property
    def n_copies(self) -> int:
        """Copies of the inputs held for pipelining (1 unless `parallel`)."""
        return int(lib.ggml_backend_sched_get_n_copies(self._pointer))

    def tensor_backend(self, tensor: Tensor) -> Backend | None:
        """The backend `tensor` was assigned to, None if it was not."""
        found = lib.ggml_backend_sched_get_tensor_backend(self._pointer, tensor._pointer)
        for backend in self.backends:
            if found == backend._pointer:
                return backend
        return None

    def set_tensor_backend(self, tensor: Tensor, backend: Backend) -> None:
        """Assign `tensor` before the graph is allocated. Raises: UnsupportedOpError if `backend` cannot run
        it.
        """
        pointer, target = self._pointer, self._checked_backend(backend)
        if self._graph is not None:
            raise BindingError("set_tensor_backend: a graph is allocated; reset() first")
        if not lib.ggml_backend_supports_op(target, tensor._pointer):
            raise UnsupportedOpError(
                f"backend {backend.name} cannot run {tensor!r}", op=tensor.op, name=tensor.name
            )
        lib.ggml_backend_sched_set_tensor_backend(pointer, tensor._p, target)

    def _checked_backend(self, backend: Backend) -> Any:
        if backend not in self.backends:
            raise BindingError(f"{backend!r} is not one of this scheduler's backends")
        return backend._pointer

    # -- checks --

    def _ready(self, graph: ComputeGraph) -> tuple[Resource, Any]:
        """Everything ggml would assert on for this graph. Raises: BindingError, UnsupportedOpError."""
        resource = self._checked_resource()
        pointer = graph._pointer
        graph.arena._check_operands()
        if graph.n_nodes == 0:
            raise BindingError("this graph has no nodes")
        if id(self) not in graph.checked:
            n = graph.n_tensors(self.graph_size)
            if n > self.graph_size:
                raise BindingError(
                    f"this graph has {n} nodes and leafs, the scheduler was made for {self.graph_size}: "
                    "make it with a larger graph_size",
                    graph_size=self.graph_size,
                    n_tensors=n,
                )
            self._check_buffers(graph.arena)
            self._check_ops(graph)
            graph.checked.add(id(self))
        return resource, pointer

    def _check_buffers(self, arena: TensorArena) -> None:
        for reached in arena._reachable():
            if reached.has_data and len(self.backends) > 1:
                raise BindingError("tensors in arena memory (data_bytes) can only run on the CPU alone")
            for buffer in reached._buffers.values():
                kind = buffer.buffer_type
                if not any(lib.ggml_backend_supports_buft(b._pointer, kind._p) for b in self.backends):
                    raise BindingError(f"no backend of this scheduler can use {buffer!r}", buffer=buffer.name)

    def _check_ops(self, graph: ComputeGraph) -> None:
        """Some backend runs each node; a node whose memory is fixed already, one that can use that memory."""
        nodes = lib.ggml_graph_nodes(graph._p)
        pointers = [b._pointer for b in reversed(self.backends)]  # the CPU first: it runs nearly everything
        supports = lib.ggml_backend_supports_op
        for i in range(graph.n_nodes):
            node = nodes[i]
            if supports(pointers[0], node) and len(pointers) == 1:
                continue
            root = node if node.view_src == ffi.NULL else node.view_src
            kind = ffi.NULL if root.buffer == ffi.NULL else lib.ggml_backend_buffer_get_type(root.buffer)
            if not any(
                supports(p, node) and (kind == ffi.NULL or lib.ggml_backend_supports_buft(p, kind))
                for p in pointers
            ):
                tensor = graph.arena._wrap(node)
                names = ", ".join(b.name for b in self.backends)
                operands = ", ".join(repr(s) for s in tensor.src)
                raise UnsupportedOpError(
                    f"none of the backends ({names}) can run {tensor!r} of {operands}",
                    op=tensor.op,
                    name=tensor.name,
                )

    def __repr__(self) -> str:
        return (
            "<Scheduler closed>" if self.closed else f"<Scheduler {', '.join(b.name for b in self.backends)}>"
        )


def _check_backends(backends: tuple[Backend, ...], buffer_types: Sequence[BufferType] | None) -> None:
    if not 1 <= len(backends) <= MAX_BACKENDS:
        raise BackendError(f"Scheduler: expected 1 to {MAX_BACKENDS} backends, got {len(backends)}")
    if backends[-1].device.type != "cpu":
        raise BackendError(
            f"Scheduler: the last backend must be the CPU, got {backends[-1].name}",
            backends=[b.name for b in backends],
        )
    if buffer_types is None:
        return
    if len(buffer_types) != len(backends):
        raise BackendError(f"Scheduler: {len(backends)} backends but {len(buffer_types)} buffer types")
    for backend, kind in zip(backends, buffer_types, strict=True):
        if not lib.ggml_backend_supports_buft(backend._pointer, kind._p):
            raise BackendError(f"Scheduler: backend {backend.name} cannot use {kind.name} memory")


class _Busy:
    """While C runs on these, they and the memory of their tensors cannot be closed, and no other thread may enter."""

    __slots__ = ("_scheduler", "_used")

    def __init__(self, scheduler: Resource, arena: TensorArena) -> None:
        self._scheduler = scheduler
        self._used = arena._in_use()

    def __enter__(self) -> None:
        if not self._scheduler.begin(*self._used):
            raise BindingError("another thread is running a graph on this Scheduler")

    def __exit__(self, *error: object) -> None:
        self._scheduler.end(*self._used)
