"""Backends: streams of work on a device, with their threads and the callback that stops them.

What a backend can do beyond the common interface is asked of its registry by name, so that statically linked
and loaded modules are one case. Upstream: ggml-backend.h, ggml_backend; ggml-cpu.h, ggml_threadpool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding.buffer import BufferType
from pyggmlkv.binding.callbacks import AbortGate
from pyggmlkv.binding.cgraph import ComputeGraph
from pyggmlkv.binding.handle import Owner, Resource
from pyggmlkv.errors import BindingError, ComputeError, UnsupportedOpError

if TYPE_CHECKING:
    from pyggmlkv.binding.device import Device

Priority = Literal["low", "normal", "medium", "high", "realtime"]


def proc_address(registry: Any, name: str, c_type: str) -> Any | None:
    """A backend's own function, None if it has none of that name."""
    pointer = lib.ggml_backend_reg_get_proc_address(registry, name.encode())
    return None if pointer == ffi.NULL else ffi.cast(c_type, pointer)


def check_status(status: int, what: str) -> None:
    """Raises: ComputeError; its facts say `aborted` for a run that a callback stopped."""
    if status == lib.GGML_STATUS_SUCCESS:
        return
    text = ffi.string(lib.ggml_status_to_string(status)).decode()
    aborted = status == lib.GGML_STATUS_ABORTED
    raise ComputeError(
        f"{what}: {'stopped by the abort callback' if aborted else text}", aborted=aborted, status=text
    )


class ThreadPool(Owner):
    """Threads that stay between graph runs. `poll` 0 sleeps, 100 spins; `cpus` pins them.

    Raises: BindingError for a bad count or a backend without pools.
    """

    def __init__(
        self,
        n_threads: int,
        *,
        priority: Priority = "normal",
        poll: int = 50,
        cpus: tuple[int, ...] = (),
        strict_cpu: bool = False,
    ) -> None:
        limit = int(lib.GGML_MAX_N_THREADS)
        if not 1 <= n_threads <= limit:
            raise BindingError(
                f"ThreadPool: n_threads must be 1 to {limit}, got {n_threads}", n_threads=n_threads
            )
        if not 0 <= poll <= 100:
            raise BindingError(f"ThreadPool: poll must be 0 to 100, got {poll}", poll=poll)
        if any(not 0 <= cpu < limit for cpu in cpus):
            raise BindingError(f"ThreadPool: cpus must be 0 to {limit - 1}, got {cpus}", cpus=cpus)
        priorities = {
            "low": lib.GGML_SCHED_PRIO_LOW,
            "normal": lib.GGML_SCHED_PRIO_NORMAL,
            "medium": lib.GGML_SCHED_PRIO_MEDIUM,
            "high": lib.GGML_SCHED_PRIO_HIGH,
            "realtime": lib.GGML_SCHED_PRIO_REALTIME,
        }
        if priority not in priorities:
            raise BindingError(
                f"ThreadPool: priority must be one of {', '.join(priorities)}, got {priority!r}"
            )
        Resource.refuse_after_fork()
        registry = _cpu_registry()
        make = proc_address(
            registry, "ggml_threadpool_new", "ggml_threadpool_t (*)(struct ggml_threadpool_params *)"
        )
        free = proc_address(registry, "ggml_threadpool_free", "void (*)(ggml_threadpool_t)")
        if make is None or free is None:
            raise BindingError("the CPU backend of this build has no thread pools")
        params = ffi.new("struct ggml_threadpool_params *")
        lib.ggml_threadpool_params_init(params, n_threads)
        params.prio, params.poll, params.strict_cpu = priorities[priority], poll, strict_cpu
        for cpu in cpus:
            params.cpumask[cpu] = True
        Resource.mark_computed()
        pointer = make(params)
        if pointer == ffi.NULL:
            raise BindingError(f"ThreadPool: {n_threads} threads could not be started", n_threads=n_threads)
        self.n_threads = n_threads
        self._own(pointer, free)

    def __repr__(self) -> str:
        return f"<ThreadPool {'closed' if self.closed else f'{self.n_threads} threads'}>"


def _cpu_registry() -> Any:

    from pyggmlkv.binding.device import cpu_device

    return lib.ggml_backend_dev_backend_reg(cpu_device()._p)


class Backend(Owner):
    """A stream of work on a device: `Device.init()` makes it."""

    def __init__(self, pointer: Any, device: Device) -> None:
        self._own(pointer, lib.ggml_backend_free)
        self.device = device
        self._gate: AbortGate | None = None
        self._attachment: Resource | None = None

    @property
    def name(self) -> str:
        """ggml's name."""
        return str(ffi.string(lib.ggml_backend_name(self._pointer)).decode())

    @property
    def buffer_type(self) -> BufferType:
        """The memory it works in."""
        return BufferType(lib.ggml_backend_get_default_buffer_type(self._pointer))

    def _function(self, name: str, c_type: str) -> Any | None:
        return proc_address(lib.ggml_backend_dev_backend_reg(self.device._p), name, c_type)

    def set_n_threads(self, n_threads: int) -> None:
        """Number of threads of a run; a device without threads ignores it. Raises: BindingError unless
        positive.
        """
        limit = int(lib.GGML_MAX_N_THREADS)
        if not 1 <= n_threads <= limit:
            raise BindingError(f"n_threads must be 1 to {limit}, got {n_threads}", n_threads=n_threads)
        pointer = self._pointer
        function = self._function("ggml_backend_set_n_threads", "ggml_backend_set_n_threads_t")
        if function is not None:
            function(pointer, n_threads)

    def set_threadpool(self, pool: ThreadPool | None) -> None:
        """Run on the threads of `pool`; closing the pool detaches it. Raises: BindingError if it cannot have
        one.
        """
        pointer = self._pointer
        function = self._function(
            "ggml_backend_cpu_set_threadpool", "void (*)(ggml_backend_t, ggml_threadpool_t)"
        )
        if function is None:
            if pool is not None:
                raise BindingError(f"backend {self.name} has no thread pool", backend=self.name)
            return
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None
        if pool is not None:
            parents = (self._checked_resource(), pool._checked_resource())
            function(pointer, pool._pointer)
            self._attachment = Resource(
                "ThreadPool attachment", pointer, lambda p: function(p, ffi.NULL), parents, keep=pool
            )

    def set_abort_callback(self, function: Callable[[], bool] | None, *, interval_ms: float = 20.0) -> bool:
        """Ask `function` during a run, at most once in `interval_ms`; a true answer stops the run
        (ComputeError).

        What it raises is raised once C has returned. Returns False if this backend cannot be stopped.
        """
        gate = None if function is None else AbortGate(function, interval_ms)
        return self.set_abort_gate(gate)

    def set_abort_gate(self, gate: AbortGate | None) -> bool:
        """As `set_abort_callback`, with a gate that several backends share and any thread can `stop()`."""
        pointer = self._pointer
        setter = self._function("ggml_backend_set_abort_callback", "ggml_backend_set_abort_callback_t")
        if setter is None:
            return False
        if gate is None:
            setter(pointer, ffi.NULL, ffi.NULL)
        else:
            setter(pointer, gate.function, gate.state)
        self._gate = gate
        self._checked_resource().keep(gate)
        return True

    def graph_compute(self, graph: ComputeGraph) -> None:
        """Run a graph whose tensors all have memory that this backend can use.

        Raises: BindingError naming a tensor without such memory; RowIndexError; UnsupportedOpError; ComputeError.
        """
        resource = self._checked_resource()
        pointer = graph._pointer
        graph.arena._check_operands()
        for tensor in (*graph.nodes, *graph.leafs):
            p = tensor._p
            if p.data == ffi.NULL:
                raise BindingError(
                    f"{tensor!r} has no memory; allocate it, or run the graph with a Scheduler"
                )
            if p.buffer != ffi.NULL and not lib.ggml_backend_supports_buft(
                resource.pointer, lib.ggml_backend_buffer_get_type(p.buffer)
            ):
                raise BindingError(f"{tensor!r} lies in memory that backend {self.name} cannot use")
            if not lib.ggml_backend_supports_op(resource.pointer, p):
                raise UnsupportedOpError(
                    f"backend {self.name} cannot run {tensor!r}", op=tensor.op, name=tensor.name
                )
        from pyggmlkv.binding.row_ids import check_row_ids, row_ids_of  # it knows graphs, which know backends

        check_row_ids(row_ids_of(graph))
        self._compute(resource, pointer, graph)

    def _compute(self, resource: Resource, pointer: Any, graph: ComputeGraph) -> None:
        Resource.refuse_after_fork()
        Resource.mark_computed()
        used = graph.arena._in_use()
        if not resource.begin(*used):
            raise BindingError("another thread is running a graph on this Backend")
        try:
            status = lib.ggml_backend_graph_compute(resource.pointer, pointer)
        finally:
            resource.end(*used)
        if self._gate is not None:
            self._gate.finish()
        for error in graph.arena._errors:
            error.reraise()
        check_status(status, f"backend {self.name}")

    def synchronize(self) -> None:
        """Wait until all work is done."""
        lib.ggml_backend_synchronize(self._pointer)

    def __repr__(self) -> str:
        return "<Backend closed>" if self.closed else f"<Backend {self.name}>"
