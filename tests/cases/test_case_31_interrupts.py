"""Case 31 where decode runs outside of the main thread: the main thread gets Ctrl-C, the decode is not disturbed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

CODE = """
    import os, signal, sys, threading, time
    import numpy as np
    import pyggmlkv

    model = pyggmlkv.Model.load(sys.argv[1])
    ctx = pyggmlkv.Context(model, n_ctx=4096, n_batch=4096, n_ubatch=256, n_threads=1)
    found = []

    finished = threading.Event()  # Thread.join takes an interrupted thread for a finished one (CPython 3.11)

    def work():
        try:
            ctx.decode(pyggmlkv.Batch(np.arange(3000) % 128))
            found.append("done")
        except BaseException as error:
            found.append(type(error).__name__)
        finished.set()

    threading.Thread(target=work).start()
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    interrupts = 0
    while not (finished.is_set() and timer.finished.is_set()):
        try:
            finished.wait(0.05)
        except KeyboardInterrupt:
            interrupts += 1
    last = ctx.memory.seq_pos_max(0)
    print(found, interrupts, last)
    ctx.decode(pyggmlkv.Batch([1]))
    print(ctx.memory.seq_pos_max(0))
"""

EXIT_WHILE_DECODING = """
    import sys, threading, time
    import numpy as np
    import pyggmlkv

    model = pyggmlkv.Model.load(sys.argv[1])
    ctx = pyggmlkv.Context(model, n_ctx=65536, n_batch=65536, n_ubatch=512, n_threads=1)
    threading.Thread(target=lambda: ctx.decode(pyggmlkv.Batch(np.arange(30000) % 128)), daemon=True).start()
    time.sleep(0.3)
"""


def child(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_main_thread_stays_interruptible_and_the_decode_goes_on(
    tiny_model: Callable[[str], Path],
) -> None:
    done = child(CODE, tiny_model("llama"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["['done'] 1 2999", "3000"]


def test_the_interpreter_may_exit_while_a_daemon_thread_decodes(tiny_model: Callable[[str], Path]) -> None:
    done = child(EXIT_WHILE_DECODING, tiny_model("llama"))
    assert (done.returncode, done.stderr) == (0, "")


EXIT_BETWEEN_TWO_CALLS = """
    import atexit, sys, threading, time
    atexit.register(time.sleep, 0.5)  # runs last: the thread goes on after the package's own exit
    import numpy as np
    import pyggmlkv
    from pyggmlkv.graph.reuse import GraphCache

    model = pyggmlkv.Model.load(sys.argv[1])
    ctx = pyggmlkv.Context(model, n_ctx=256)
    get, waits = GraphCache.get, threading.Event()

    def slow(*args):
        waits.set()
        time.sleep(0.2)
        return get(*args)

    GraphCache.get = slow
    threading.Thread(target=lambda: ctx.decode(pyggmlkv.Batch([1, 2])), daemon=True).start()
    waits.wait()
"""


def test_the_interpreter_may_exit_between_two_calls_of_a_daemon_thread(
    tiny_model: Callable[[str], Path],
) -> None:
    done = child(EXIT_BETWEEN_TWO_CALLS, tiny_model("llama"))
    assert (done.returncode, done.stderr) == (0, "")
