"""Runs graphs on a list of backends: reserve, allocate, compute, with threads and Ctrl-C.

Knows graphs, not what they mean. One graph is allocated at a time; `is_allocated` tells whether it still is.
Upstream: llama_context::sched_reserve, graph_compute, ggml_backend_sched.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Self

from pyggmlkv.binding import (
    AbortGate,
    Backend,
    BufferType,
    ComputeGraph,
    Device,
    Scheduler,
    Tensor,
    ThreadPool,
    cpu_device,
    devices,
)
from pyggmlkv.errors import BackendError


@dataclasses.dataclass(frozen=True, slots=True)
class Threads:
    """CPU threads for one token at a time, and for batches."""

    n_threads: int
    n_threads_batch: int


def default_threads() -> int:
    """One thread per CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _never() -> bool:
    """Stops nothing by itself, but runs Python's signal handlers: Ctrl-C raises here and ends the run."""
    return False


class Runner:
    """Backends in order of preference, the CPU last, and one scheduler over them.

    `gpus` are the devices that layers may live on; accelerators such as BLAS join by themselves.
    """

    def __init__(
        self,
        gpus: Sequence[Device] = (),
        threads: Threads | None = None,
        max_nodes: int = 1024,
        op_offload: bool = True,
    ) -> None:
        self.threads = threads or Threads(default_threads(), default_threads())
        self.max_nodes = max_nodes
        accel = [device for device in devices() if device.type == "accel"]
        self._backends: list[Backend] = [device.init() for device in (*gpus, *accel)]
        self.cpu = cpu_device().init()
        self._backends.append(self.cpu)
        bufts = [backend.buffer_type for backend in self._backends]
        if gpus and gpus[0].host_buffer_type is not None:
            bufts[-1] = gpus[0].host_buffer_type
        self._pool = ThreadPool(max(self.threads.n_threads, self.threads.n_threads_batch))
        self.cpu.set_threadpool(self._pool)
        self._gate = AbortGate(_never)
        self._set_gate(self._gate)
        self._n_threads = 0
        self.scheduler = Scheduler(self._backends, bufts, graph_size=max_nodes, op_offload=op_offload)
        self._allocated: ComputeGraph | None = None
        self._is_new = True

    @property
    def backends(self) -> tuple[Backend, ...]:
        return tuple(self._backends)

    @property
    def cpu_buffer_type(self) -> BufferType:
        """Plain host memory."""
        return self.cpu.buffer_type

    def reserve(self, graph: ComputeGraph) -> None:
        """Size compute buffers for the worst case `graph`; forgets the allocated graph.

        Raises:
            DeviceMemoryError: no room.
        """
        self._begin()
        self.scheduler.reserve(graph)

    def split(self, graph: ComputeGraph) -> None:
        """Assign nodes to backends without allocating.  Upstream: ggml_backend_sched_split_graph."""
        self._begin()
        self.scheduler.split_graph(graph)

    def alloc(self, graph: ComputeGraph) -> None:
        """Give every node of `graph` memory; the graph allocated before loses its own."""
        self._begin()
        self.scheduler.alloc_graph(graph)
        self._allocated = graph

    def is_allocated(self, graph: ComputeGraph) -> bool:
        return self._allocated is graph

    def forget(self) -> None:
        """Drop the allocated graph, and where nodes were to be placed: call it before building a graph with `place`."""
        self._allocated = None
        self.scheduler.reset()
        self._is_new = True

    def _begin(self) -> None:
        """Forget the last graph, but not the places of nodes that were named since."""
        if not self._is_new:
            self.forget()
        self._is_new = False

    def compute(
        self,
        graph: ComputeGraph,
        *,
        batched: bool = True,
        stoppable: bool = True,
        single: bool = False,
        check_ids: bool = True,
    ) -> None:
        """Run the allocated `graph` and wait; one that is not `stoppable` runs to its end, Ctrl-C comes after.

        `single` takes one CPU thread: many small nodes cost more to share than to run. `check_ids` False trusts row ids
        that are inputs, for callers who made them.

        Raises:
            RowIndexError: an id out of range; nothing was run.
            KeyboardInterrupt: Ctrl-C; the run was stopped, the process and the runner are as usable as before.
            ComputeError: a backend failed.
        """
        if self._allocated is not graph:
            raise BackendError("compute: this graph is not the allocated one; call alloc first")
        n = 1 if single else self.threads.n_threads_batch if batched else self.threads.n_threads
        if n != self._n_threads:
            for backend in self._backends:
                backend.set_n_threads(n)
            self._n_threads = n
        if stoppable:
            self.scheduler.graph_compute(graph, check_ids=check_ids)
            return
        self._set_gate(None)
        try:
            self.scheduler.graph_compute(graph, check_ids=check_ids)
        finally:
            self._set_gate(self._gate)

    def _set_gate(self, gate: AbortGate | None) -> None:
        for backend in self._backends:
            backend.set_abort_gate(gate)

    def device_of(self, tensor: Tensor) -> Device | None:
        """Device that will run a node of the graph split or allocated last."""
        backend = self.scheduler.tensor_backend(tensor)
        return None if backend is None else backend.device

    def place(self, tensor: Tensor, device: Device) -> None:
        """Ask for a node to run on `device`, where that supports it."""
        for backend in self._backends:
            if backend.device == device and device.supports_op(tensor):
                self.scheduler.set_tensor_backend(tensor, backend)

    def buffer_sizes(self) -> dict[str, int]:
        """Compute buffers reserved, bytes by buffer type name."""
        out: dict[str, int] = {}
        for backend in self._backends:
            name = backend.buffer_type.name
            out[name] = out.get(name, 0) + self.scheduler.buffer_size(backend)
        return out

    def close(self) -> None:
        self._allocated = None
        self.scheduler.close()
        self._pool.close()
        for backend in self._backends:
            backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
