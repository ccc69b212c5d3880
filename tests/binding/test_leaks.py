"""Making and releasing every kind of owner many times leaves no object open and no memory behind."""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Callable

import numpy as np
import psutil
import pytest

from pyggmlkv.binding import Buffer, ComputeGraph, Scheduler, TensorArena, ThreadPool, cpu_device, ops
from pyggmlkv.binding.handle import Resource


def arena() -> None:
    with TensorArena(512, graph_nodes=512, data_bytes=1 << 20) as ctx:
        x = ctx.new_tensor("f32", 1000)
        x.set(np.ones(1000, np.float32))
        y = ops.add(ctx, x, x)
        ComputeGraph(ctx, 256).build_forward_expand(y)
        x.numpy()
        y.to_numpy()


def arena_dropped() -> None:
    ctx = TensorArena(512, data_bytes=1 << 20)
    ctx.new_tensor("f32", 1000).numpy()


def buffer() -> None:
    with TensorArena(4) as ctx:
        ctx.new_tensor("f32", 1 << 16)
        with cpu_device().buffer_type.alloc_tensors(ctx) as memory:
            memory.clear(1)


def host_memory() -> None:
    with mmap.mmap(-1, 1 << 20) as memory, Buffer.from_host_memory(cpu_device(), memory, 1 << 20):
        pass


def thread_pool() -> None:
    with cpu_device().init() as backend, ThreadPool(2) as pool:
        backend.set_threadpool(pool)


def scheduler() -> None:
    with (
        cpu_device().init() as backend,
        Scheduler([backend], graph_size=64) as sched,
        TensorArena(8, graph_nodes=16) as ctx,
    ):
        backend.set_n_threads(1)
        backend.set_abort_callback(lambda: False)
        sched.set_eval_callback(lambda tensor, ask: False)
        y = ops.map_custom1(ctx, ctx.new_tensor("f32", 1 << 14), lambda *args: None)
        graph = ComputeGraph(ctx, 16)
        graph.build_forward_expand(y)
        sched.graph_compute(graph)
        y.numpy()


def refused() -> None:
    with contextlib.suppress(MemoryError):
        TensorArena(2**50)
    with contextlib.suppress(MemoryError):
        cpu_device().buffer_type.alloc(2**60)


@pytest.mark.parametrize(
    "once",
    [arena, arena_dropped, buffer, host_memory, thread_pool, scheduler, refused],
    ids=lambda f: f.__name__,
)
def test_nothing_is_left(once: Callable[[], None]) -> None:
    process = psutil.Process()
    for _ in range(30):
        once()
    gc.collect()
    before, memory = Resource.open_count(), process.memory_info().rss
    for _ in range(300):
        once()
    gc.collect()
    assert Resource.open_count() == before
    assert process.memory_info().rss - memory < 4 << 20
