"""Owners close, children keep parents alive, Ctrl-C stops a decode, the interpreter leaves in silence."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.binding.handle import Resource


def run_child(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run `code` in a child with dev mode and warnings as errors."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


ENDINGS = {
    "kept in a global": "keep = ctx",
    "kept in a cycle": "loop = [ctx, model]; loop.append(loop)",
    "kept in a thread local": "import threading; local = threading.local(); local.ctx = ctx",
    "model dropped first": "del model",
    "closed twice": "ctx.close(); ctx.close(); model.close(); model.close()",
    "model closed before its context": "model.close()",
    "exit inside with": "\nwith ctx:\n    import sys; sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "failed constructor": "\ntry:\n    pyggmlkv.Context(model, type_v='q8_0', flash_attn='off')\nexcept pyggmlkv.errors.CacheError:\n    pass",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_exits_in_silence(llama_path: Path, ending: str) -> None:
    done = run_child(
        """
        import sys
        import pyggmlkv
        import pyggmlkv.errors
        model = pyggmlkv.Model.load(sys.argv[1])
        ctx = pyggmlkv.Context(model, n_ctx=64, n_threads=2)
        ctx.decode(pyggmlkv.Batch([1, 2, 3]))
        exec(sys.argv[2])
        """,
        llama_path,
        ENDINGS[ending],
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_context_keeps_its_model_alive(llama_path: Path) -> None:
    ctx = pyggmlkv.Context(pyggmlkv.Model.load(llama_path), n_ctx=64, n_threads=1)
    gc.collect()
    ctx.decode(Batch([1, 2, 3]))
    assert ctx.logits.shape == (1, 128)


def test_creating_and_releasing_leaves_nothing_behind(llama_path: Path) -> None:
    def cycle() -> None:
        with pyggmlkv.Model.load(llama_path) as model, pyggmlkv.Context(model, n_ctx=64, n_threads=1) as ctx:
            ctx.decode(Batch([1, 2, 3]))
            ctx.memory.seq_add(0, 0, None, 3)
            ctx.decode(Batch([4]))

    for _ in range(5):
        cycle()
    gc.collect()
    counts, rss = Resource.open_count(), psutil.Process().memory_info().rss
    for _ in range(40):
        cycle()
    gc.collect()
    assert Resource.open_count() == counts
    assert psutil.Process().memory_info().rss - rss < 8 * 2**20


def test_ctrl_c_stops_a_decode_and_the_context_goes_on(llama_path: Path) -> None:
    done = run_child(
        """
        import os, signal, sys, threading, time
        import numpy as np
        import pyggmlkv
        model = pyggmlkv.Model.load(sys.argv[1])
        ctx = pyggmlkv.Context(model, n_ctx=65536, n_batch=65536, n_ubatch=512, n_threads=2)
        def interrupt():
            time.sleep(0.7)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt, daemon=True).start()
        begun = time.monotonic()
        try:
            ctx.decode(pyggmlkv.Batch(np.arange(60000) % 128))
        except KeyboardInterrupt:
            print("stopped", time.monotonic() - begun < 20)
        last = ctx.memory.seq_pos_max(0)
        print("whole ubatches", last is None or (last + 1) % 512 == 0)
        ctx.decode(pyggmlkv.Batch([1]))
        print("goes on", ctx.memory.seq_pos_max(0) == (last or -1) + 1 if last is not None else True)
        """,
        llama_path,
    )
    assert done.stdout.splitlines() == ["stopped True", "whole ubatches True", "goes on True"]
    assert (done.returncode, done.stderr) == (0, "")


def test_decode_after_a_fork_is_a_typed_error_in_the_child_only(llama_path: Path) -> None:
    done = run_child(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        import pyggmlkv
        from pyggmlkv.errors import ForkedError
        model = pyggmlkv.Model.load(sys.argv[1])
        ctx = pyggmlkv.Context(model, n_ctx=64, n_threads=2)
        ctx.decode(pyggmlkv.Batch([1, 2, 3]))
        child = os.fork()
        if child == 0:
            try:
                ctx.decode(pyggmlkv.Batch([4]))
            except ForkedError:
                ctx.close()
                os._exit(7)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ctx.decode(pyggmlkv.Batch([4]))
        print(status, ctx.memory.seq_pos_max(0))
        """,
        llama_path,
    )
    assert (done.stdout.split(), done.stderr, done.returncode) == (["7", "3"], "", 0)
