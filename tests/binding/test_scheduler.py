"""Devices, backends and the scheduler: what runs, what is refused before ggml would abort, what callbacks
do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pyggmlkv.binding import (
    AbortGate,
    Backend,
    ComputeGraph,
    Scheduler,
    Tensor,
    TensorArena,
    ThreadPool,
    cpu_device,
    devices,
    ops,
    set_log_level,
)
from pyggmlkv.binding.device import device
from pyggmlkv.errors import (
    BackendError,
    BindingError,
    ComputeError,
    DeviceMemoryError,
    DeviceNotFoundError,
    UnsupportedOpError,
)


class Small:
    """y = silu(w x), with w in a buffer of its own."""

    def __init__(self, backend: Backend, n_layers: int = 1, graph_size: int = 256) -> None:
        self.weights = TensorArena(4)
        self.w = self.weights.new_tensor("f32", 16, 16, name="w")
        self.buffer = backend.buffer_type.alloc_tensors(self.weights)
        self.buffer.usage = "weights"
        self.w.set(np.eye(16, dtype=np.float32))
        self.arena = TensorArena(2 * n_layers + 2, graph_nodes=2 * n_layers + 1)
        self.x = self.arena.new_tensor("f32", 16, 3, name="x")
        self.x.set_input()
        self.y = self.x
        for _ in range(n_layers):
            self.y = ops.silu(self.arena, ops.mul_mat(self.arena, self.w, self.y))
        self.y.name = "y"
        self.y.set_output()
        self.graph = ComputeGraph(self.arena, 2 * n_layers + 1)
        self.graph.build_forward_expand(self.y)
        self.scheduler = Scheduler([backend], graph_size=graph_size)

    def close(self) -> None:
        for owner in (self.scheduler, self.arena, self.buffer, self.weights):
            owner.close()

    def run(self) -> np.ndarray:
        if not self.x.is_allocated:
            self.scheduler.alloc_graph(self.graph)
        self.x.set(np.ones((3, 16), np.float32))
        self.scheduler.graph_compute(self.graph)
        return self.y.to_numpy()


@pytest.fixture
def small(cpu: Backend) -> Iterator[Small]:
    model = Small(cpu)
    yield model
    model.close()


def test_the_cpu_describes_itself() -> None:
    cpu = cpu_device()
    assert cpu in devices()
    assert (cpu.name, cpu.type, cpu.backend_name) == ("CPU", "cpu", "CPU")
    assert device("cpu") == cpu
    free, total = cpu.memory
    assert 0 < free <= total
    assert cpu.caps.buffer_from_host_ptr
    assert cpu.description
    assert cpu.supports_buffer_type(cpu.buffer_type)
    assert cpu.host_buffer_type is None
    assert all(not kind.is_host for kind in cpu.extra_buffer_types)
    assert isinstance(cpu.features, dict)
    with pytest.raises(DeviceNotFoundError, match="no device is called 'toaster'; there are: CPU"):
        device("toaster")


def test_a_graph_runs_again_with_new_inputs(small: Small) -> None:
    small.scheduler.alloc_graph(small.graph)
    first = small.run()
    small.x.set(np.zeros((3, 16), np.float32))
    small.scheduler.graph_compute(small.graph)
    np.testing.assert_allclose(first, 0.7310586, rtol=1e-6)
    assert not small.y.to_numpy().any()
    small.scheduler.graph_compute_async(small.graph)
    small.scheduler.synchronize()


def test_reserving_keeps_memory_from_growing(small: Small, cpu: Backend) -> None:
    small.scheduler.reserve(small.graph)
    size = small.scheduler.buffer_size(cpu)
    assert size > 0
    small.scheduler.alloc_graph(small.graph)
    assert small.scheduler.buffer_size(cpu) == size
    assert small.scheduler.n_splits == 1
    assert small.scheduler.n_copies == 1
    assert small.scheduler.tensor_backend(small.y) is cpu
    assert small.scheduler.buffer_type(cpu) == cpu.buffer_type


def test_a_scheduler_holds_one_graph_at_a_time(small: Small, cpu: Backend) -> None:
    small.scheduler.alloc_graph(small.graph)
    other = Small(cpu)
    with pytest.raises(BindingError, match="holds a graph already; reset"):
        small.scheduler.alloc_graph(other.graph)
    with pytest.raises(BindingError, match="holds another graph; reset"):
        small.scheduler.graph_compute(other.graph)
    with pytest.raises(BindingError, match="reset"):
        small.scheduler.set_tensor_backend(small.y, cpu)
    small.scheduler.reset()
    small.scheduler.set_tensor_backend(other.y, cpu)
    small.scheduler.alloc_graph(other.graph)
    other.close()


def test_a_graph_that_grew_after_allocation_is_refused(small: Small) -> None:
    arena = TensorArena(8, graph_nodes=16)
    graph = ComputeGraph(arena, 16)
    x = arena.new_tensor("f32", 4)
    graph.build_forward_expand(ops.silu(arena, x))
    small.scheduler.alloc_graph(graph)
    graph.build_forward_expand(ops.relu(arena, x))
    with pytest.raises(BindingError, match="nodes were added"):
        small.scheduler.graph_compute(graph)
    small.scheduler.reset()
    small.scheduler.graph_compute(graph)
    arena.close()


def test_a_graph_too_large_for_its_scheduler_is_refused(cpu: Backend) -> None:
    model = Small(cpu, n_layers=40, graph_size=32)
    for use in (model.scheduler.reserve, model.scheduler.alloc_graph, model.scheduler.graph_compute):
        with pytest.raises(BindingError, match="82 nodes and leafs, the scheduler was made for 32"):
            use(model.graph)
    model.close()


def test_an_empty_graph_is_refused(small: Small) -> None:
    with TensorArena(1, graph_nodes=4) as arena, pytest.raises(BindingError, match="no nodes"):
        small.scheduler.alloc_graph(ComputeGraph(arena, 4))


def test_bad_schedulers_are_refused(cpu: Backend) -> None:
    for backends, kinds, message in [
        ([], None, "1 to 16 backends, got 0"),
        ([cpu] * 17, None, "got 17"),
        ([cpu], [], "0 buffer types"),
    ]:
        with pytest.raises(BackendError, match=message):
            Scheduler(backends, kinds)
    with pytest.raises(BackendError, match="graph_size"):
        Scheduler([cpu], graph_size=0)
    with (
        Scheduler([cpu]) as scheduler,
        cpu_device().init() as stranger,
        pytest.raises(BindingError, match="not one of"),
    ):
        scheduler.buffer_size(stranger)


def test_an_op_that_no_backend_runs_is_named(cpu: Backend) -> None:
    repacked = cpu_device().extra_buffer_types
    if not repacked:
        pytest.skip("this CPU has no extra buffer types")
    with TensorArena(2) as weights, TensorArena(8, graph_nodes=8) as arena, Scheduler([cpu]) as scheduler:
        w = weights.new_tensor("q4_0", 64, 64, name="w")
        buffer = repacked[0].alloc_tensors(weights)
        result = ops.get_rows(arena, w, arena.new_tensor("i32", 3))
        result.name = "rows"
        graph = ComputeGraph(arena, 8)
        graph.build_forward_expand(result)
        with pytest.raises(UnsupportedOpError, match="'rows' .* GET_ROWS") as caught:
            scheduler.alloc_graph(graph)
        assert caught.value.facts["op"] == "GET_ROWS"
        with pytest.raises(UnsupportedOpError):
            cpu.graph_compute(graph) if buffer.closed else cpu.graph_compute(_allocated(graph, arena))
        buffer.close()


def _allocated(graph: ComputeGraph, arena: TensorArena) -> ComputeGraph:
    cpu_device().buffer_type.alloc_tensors(arena)
    return graph


def test_too_much_memory_is_a_typed_error() -> None:
    kind = cpu_device().buffer_type
    with pytest.raises(DeviceMemoryError):
        kind.alloc(2**61)
    with TensorArena(1) as arena:
        tensor = arena.new_tensor("f32", 2**40, 2**18)
        with pytest.raises(DeviceMemoryError):
            kind.alloc_tensors(arena)
        assert not tensor.is_allocated
    with TensorArena(1) as arena, pytest.raises(BindingError, match="no tensor without memory"):
        kind.alloc_tensors(arena)


def test_backend_refuses_tensors_without_memory(cpu: Backend, small: Small) -> None:
    with pytest.raises(BindingError, match="has no memory"):
        cpu.graph_compute(small.graph)


# -- threads --


def test_results_do_not_depend_on_the_thread_pool(cpu: Backend) -> None:
    with cpu_device().init() as backend, ThreadPool(2, poll=0) as pool:
        backend.set_n_threads(2)
        backend.set_threadpool(pool)
        model = Small(backend, n_layers=4, graph_size=512)
        with_pool = model.run()
        model.close()
    model = Small(cpu, n_layers=4, graph_size=512)
    np.testing.assert_array_equal(model.run(), with_pool)
    model.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_threads": 0}, "1 to 512"),
        ({"n_threads": 1000}, "1 to 512"),
        ({"n_threads": 1, "poll": 101}, "0 to 100"),
        ({"n_threads": 1, "cpus": (600,)}, "cpus"),
        ({"n_threads": 1, "priority": "urgent"}, "low, normal"),
    ],
    ids=str,
)
def test_bad_thread_pools_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BindingError, match=message):
        ThreadPool(**options)


def test_bad_thread_counts_are_refused(cpu: Backend) -> None:
    with pytest.raises(BindingError, match="1 to 512"):
        cpu.set_n_threads(0)


def test_a_scheduler_is_used_by_one_thread_at_a_time(small: Small) -> None:
    small.scheduler.alloc_graph(small.graph)
    entered, leave = threading.Event(), threading.Event()

    def hold(tensor: Tensor, ask: bool) -> bool:
        entered.set()
        assert leave.wait(20)
        return not ask

    small.scheduler.set_eval_callback(hold)
    worker = threading.Thread(target=small.run)
    worker.start()
    assert entered.wait(20)
    with pytest.raises(BindingError, match="another thread"):
        small.scheduler.graph_compute(small.graph)
    for owner in (small.scheduler, small.arena):
        with pytest.raises(BindingError, match="C code is running"):
            owner.close()
    leave.set()
    worker.join()


# -- callbacks --


def test_an_abort_callback_stops_a_run_and_the_next_run_works(cpu: Backend, small: Small) -> None:
    answers = [True]
    assert cpu.set_abort_callback(lambda: bool(answers and answers.pop()), interval_ms=0)
    try:
        with pytest.raises(ComputeError, match="stopped by the abort callback") as caught:
            small.run()
        assert caught.value.facts["aborted"] is True
        np.testing.assert_allclose(small.run(), 0.7310586, rtol=1e-6)
    finally:
        cpu.set_abort_callback(None)


def test_an_abort_gate_is_stopped_from_another_thread() -> None:
    with cpu_device().init() as backend:
        backend.set_n_threads(1)
        gate = AbortGate()
        backend.set_abort_gate(gate)
        model = Small(backend, n_layers=2000, graph_size=8192)
        model.scheduler.alloc_graph(model.graph)
        gate.stop()
        with pytest.raises(ComputeError) as caught:
            model.run()
        assert caught.value.facts["aborted"] is True
        assert not gate.stopping
        model.run()
        timer = threading.Timer(0.01, gate.stop)
        timer.start()
        deadline = time.monotonic() + 20
        with pytest.raises(ComputeError):
            while time.monotonic() < deadline:
                model.run()
        model.close()


def test_an_exception_in_an_abort_callback_is_raised_after_c(cpu: Backend, small: Small) -> None:
    def fail() -> bool:
        raise KeyboardInterrupt

    cpu.set_abort_callback(fail, interval_ms=0)
    try:
        with pytest.raises(KeyboardInterrupt):
            small.run()
    finally:
        cpu.set_abort_callback(None)
    small.run()


def test_an_eval_callback_sees_the_nodes_it_asked_for(small: Small) -> None:
    seen: list[tuple[str, float]] = []

    def watch(tensor: Tensor, ask: bool) -> bool:
        if ask:
            return tensor.op == "MUL_MAT"
        seen.append((tensor.op, float(tensor.numpy()[0, 0])))
        return True

    small.scheduler.set_eval_callback(watch)
    small.run()
    assert seen == [("MUL_MAT", 1.0)]
    small.scheduler.set_eval_callback(None)
    small.run()
    assert len(seen) == 1


def test_an_eval_callback_can_stop_or_raise(small: Small) -> None:
    small.scheduler.set_eval_callback(lambda tensor, ask: ask)
    with pytest.raises(ComputeError, match="eval callback") as caught:
        small.run()
    assert caught.value.facts["aborted"] is True

    def fail(tensor: Tensor, ask: bool) -> bool:
        raise LookupError(tensor.op)

    small.scheduler.set_eval_callback(fail)
    with pytest.raises(LookupError, match="MUL_MAT"):
        small.run()
    small.scheduler.set_eval_callback(None)
    np.testing.assert_allclose(small.run(), 0.7310586, rtol=1e-6)


def test_ggmls_log_arrives_as_whole_lines(caplog: pytest.LogCaptureFixture) -> None:
    from pyggmlkv.binding import callbacks

    set_log_level(logging.DEBUG)
    try:
        with caplog.at_level(logging.DEBUG, logger="pyggmlkv.ggml"):
            callbacks._receive(2, "first half, ")
            callbacks._receive(5, "second half\n")
            callbacks._receive(3, "a warning\n")
        assert [(r.levelname, r.message) for r in caplog.records] == [
            ("INFO", "first half, second half"),
            ("WARNING", "a warning"),
        ]
    finally:
        set_log_level(logging.WARNING)


def test_ggml_prints_nothing_by_itself(capfd: pytest.CaptureFixture[str], small: Small) -> None:
    small.run()
    with pytest.raises(DeviceMemoryError):
        cpu_device().buffer_type.alloc(2**50)
    out = capfd.readouterr()
    assert (out.out, out.err) == ("", "")
