"""Owners: closed once, children first, in any order the collector likes; exit and fork are quiet."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from pyggmlkv.binding import Backend, Scheduler, TensorArena, ThreadPool, cpu_device
from pyggmlkv.binding.handle import Owner, Resource
from pyggmlkv.errors import BindingError, ClosedError


class Thing(Owner):
    """Writes down when its C object is freed."""

    def __init__(self, name: str, log: list[str], parents: tuple[Owner, ...] = ()) -> None:
        self._own(name, log.append, parents)


def family() -> tuple[list[str], Thing, Thing, Thing]:
    log: list[str] = []
    grandparent = Thing("grandparent", log)
    parent = Thing("parent", log, (grandparent,))
    return log, grandparent, parent, Thing("child", log, (parent, grandparent))


def test_closing_a_parent_closes_its_children_first() -> None:
    log, grandparent, parent, child = family()
    grandparent.close()
    assert log == ["child", "parent", "grandparent"]
    assert parent.closed
    assert child.closed


def test_close_is_idempotent() -> None:
    log, grandparent, _parent, child = family()
    child.close()
    child.close()
    grandparent.close()
    grandparent.close()
    assert log == ["child", "parent", "grandparent"]


def test_a_child_keeps_its_parents_alive() -> None:
    log, grandparent, parent, child = family()
    del grandparent, parent
    gc.collect()
    assert log == []
    del child
    gc.collect()
    assert log == ["child", "parent", "grandparent"]


@pytest.mark.parametrize("first", ["grandparent", "parent", "child"])
def test_a_cycle_is_freed_children_first(first: str) -> None:
    log, *members = family()
    holder: dict[str, Any] = {}
    for member in sorted(members, key=lambda m: m._resource.pointer != first):  # type: ignore[union-attr]
        holder[str(len(holder))] = member
        member.holder = holder  # type: ignore[attr-defined]
    del members, member, holder
    gc.collect()
    assert log == ["child", "parent", "grandparent"]


def test_with_closes_and_refuses_a_second_use() -> None:
    log: list[str] = []
    with Thing("a", log) as thing:
        assert not thing.closed
    assert log == ["a"]
    with pytest.raises(ClosedError, match="Thing was used after close"), thing:
        pass


def test_a_busy_owner_is_not_closed() -> None:
    log, grandparent, _parent, child = family()
    resource = child._checked_resource()
    resource.busy += 1
    with pytest.raises(BindingError, match="C code is running"):
        grandparent.close()
    assert log == []
    resource.busy -= 1
    grandparent.close()
    assert len(log) == 3


def test_memory_with_views_is_freed_when_the_last_view_dies() -> None:
    log: list[str] = []
    resource = Resource("memory", "m", log.append)
    resource.export()
    resource.close()
    assert log == []
    assert not resource.live
    resource.unexport()
    assert log == ["m"]


def test_a_failed_constructor_leaves_nothing_behind() -> None:
    before = Resource.open_count()
    with pytest.raises(BindingError):
        ThreadPool(0)
    assert Resource.open_count() == before
    assert Thing.__new__(Thing).closed
    with pytest.raises(ClosedError, match="never opened"):
        _ = Thing.__new__(Thing)._pointer


def test_every_method_of_a_closed_owner_says_so() -> None:
    backend = cpu_device().init()
    scheduler = Scheduler([backend], graph_size=64)
    pool = ThreadPool(1)
    arena = TensorArena(4, graph_nodes=64)
    tensor = arena.new_tensor("f32", 1)
    buffer = cpu_device().buffer_type.alloc(64)
    backend.set_threadpool(pool)
    backend.close()
    assert scheduler.closed
    pool.close()
    buffer.close()
    uses: list[Any] = [
        lambda: backend.name, lambda: backend.buffer_type, lambda: backend.set_n_threads(1), backend.synchronize,
        lambda: backend.set_threadpool(None), lambda: backend.set_abort_callback(None), lambda: Scheduler([backend]),
        lambda: scheduler.n_splits, lambda: scheduler.n_copies, scheduler.reset, scheduler.synchronize,
        lambda: scheduler.tensor_backend(tensor), lambda: scheduler.set_eval_callback(None),
        lambda: buffer.nbytes, lambda: buffer.name, lambda: buffer.usage, buffer.clear, lambda: buffer.place(tensor, 0),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(ClosedError):
            use()
    for owner in (backend, scheduler, pool, buffer):
        assert "closed" in repr(owner)
    arena.close()


def test_closing_a_pool_detaches_it_from_its_backends(cpu: Backend) -> None:
    pool = ThreadPool(1)
    cpu.set_threadpool(pool)
    pool.close()
    cpu.set_threadpool(None)
    with pytest.raises(ClosedError):
        cpu.set_threadpool(pool)


PRELUDE = """
import gc, os, sys, threading
import numpy as np
from pyggmlkv.binding import *
from pyggmlkv.binding import Scheduler, TensorArena, ComputeGraph, ThreadPool, cpu_device, ops

def make():
    backend = cpu_device().init()
    pool = ThreadPool(2)
    backend.set_n_threads(2)
    backend.set_threadpool(pool)
    scheduler = Scheduler([backend], graph_size=64)
    arena = TensorArena(16, graph_nodes=64)
    x = arena.new_tensor("f32", 1024)
    x.set_input()
    y = ops.silu(arena, x)
    y.set_output()
    graph = ComputeGraph(arena, 64)
    graph.build_forward_expand(y)
    return backend, pool, scheduler, arena, x, y, graph

def run(things):
    backend, pool, scheduler, arena, x, y, graph = things
    scheduler.reset()
    scheduler.alloc_graph(graph)
    x.set(np.ones(1024, np.float32))
    scheduler.graph_compute(graph)
    assert abs(y.to_numpy()[0] - 0.7310586) < 1e-5
"""
EXITS = {
    "global": "things = make(); run(things)",
    "view in a global": "things = make(); run(things); view = things[5].numpy()",
    "cycle": "things = list(make()); run(things); things.append(things)",
    "thread local": "local = threading.local(); local.things = make(); run(local.things)",
    "thread": "t = threading.Thread(target=lambda: run(make())); t.start(); t.join()",
    "parents dropped first": "things = list(make()); run(things); del things[0], things[0]; gc.collect()",
    "closed in a bad order": "things = make(); run(things); [t.close() for t in things[:4]]; things[0].close()",
    "failed constructor": "things = make()\ntry: Scheduler([])\nexcept Exception: pass",
    "os._exit": "things = make(); run(things); os._exit(0)",
    "sys.exit in with": "with make()[2] as s: sys.exit(0)",
    "exception in flight": "things = make()\ntry:\n    with things[2]: raise KeyError\nexcept KeyError: pass",
    "log callback": "import logging; set_log_level('DEBUG'); logging.getLogger('pyggmlkv.ggml').addHandler(logging.NullHandler()); things = make(); run(things)",  # noqa: E501
    "callbacks set": "things = make(); things[0].set_abort_callback(lambda: False); things[2].set_eval_callback(lambda t, a: True); run(things)",  # noqa: E501
}


def child(code: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", PRELUDE.replace("from pyggmlkv.binding import *\n", "from pyggmlkv.binding import set_log_level\n") + textwrap.dedent(code)],  # noqa: E501
        capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


@pytest.mark.parametrize("code", EXITS.values(), ids=EXITS)
def test_exit_is_silent(code: str) -> None:
    done = child(code)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    done = child(
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from pyggmlkv.errors import ForkedError
        things = make(); run(things)
        view = things[5].numpy()
        pid = os.fork()
        if not pid:
            code = 0
            for use in (lambda: run(things), lambda: things[3].new_tensor("f32", 1), lambda: things[4].name,
                        lambda: ops.silu(things[3], things[4]), lambda: things[6].n_nodes, things[5].numpy, make):
                try:
                    use()
                    code = 1
                except ForkedError as error:
                    assert "spawn" in str(error)
            assert abs(view[0] - 0.7310586) < 1e-5
            for owner in things[:4]:
                assert owner.closed
                owner.close()
            del view, things
            gc.collect()
            sys.stdout.flush()
            sys.exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        run(things)
        """
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_before_any_run_may_compute() -> None:
    done = child(
        """
        cpu_device()
        pid = os.fork()
        if not pid:
            run(make())
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_spawned_child_works() -> None:
    done = child(
        """
        import subprocess
        run(make())
        print(subprocess.run([sys.executable, "-c", "from pyggmlkv.binding import devices; print(len(devices()) > 0)"],
                             capture_output=True, text=True).stdout)
        """
    )
    assert done.stdout.strip() == "True"
