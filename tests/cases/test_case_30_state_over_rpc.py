"""Case 30: a cache on an RPC server (loopback) is saved, restored, shifted and defragmented as one in host memory."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyggmlkv.cli.devices import build_info

SERVER = """
    import sys
    from pyggmlkv._ggml import ffi, lib
    from pyggmlkv.binding import devices
    devices()
    cpu = ffi.new("ggml_backend_dev_t[]", [lib.ggml_backend_dev_by_type(lib.GGML_BACKEND_DEVICE_TYPE_CPU)])
    lib.ggml_backend_rpc_start_server(sys.argv[1].encode(), ffi.NULL, 1, 1, cpu)
"""
CLIENT = """
    import sys
    import numpy as np
    import pyggmlkv
    from pyggmlkv import Batch
    from pyggmlkv._ggml import lib
    from pyggmlkv.binding import devices

    devices()
    lib.ggml_backend_register(lib.ggml_backend_rpc_add_server(sys.argv[1].encode()))
    name = next(d.name for d in devices() if d.name.startswith("RPC"))
    kinds = {"llama": {"flash_attn": "off"}, "gemma3": {"flash_attn": "on", "type_k": "q8_0"}, "jamba": {}}
    for path in sys.argv[2:]:
        with (
            pyggmlkv.Model.load(path, devices=[name]) as there,
            pyggmlkv.Model.load(path, devices=["CPU"]) as here,
        ):
            kind = {"n_ctx": 64, "n_threads": 1, "n_seq_max": 2, "kv_unified": True, **kinds[here.arch]}
            with pyggmlkv.Context(there, **kind) as remote, pyggmlkv.Context(here, **kind) as local:
                assert name in remote.memory.memory_breakdown(), remote.memory.memory_breakdown()
                for ctx in (remote, local):
                    ctx.decode(Batch(np.arange(20)))
                assert np.abs(remote.logits - local.logits).max() < 1e-3
                whole, one = remote.state_get(), remote.state_get(0)
                local.state_set(whole)
                assert local.state_get() == whole
                remote.memory.clear()
                remote.state_set(whole)
                assert remote.state_get() == whole
                remote.state_set(one, 1)
                local.state_set(one, 1)
                assert remote.state_get(1) == local.state_get(1)
                for ctx in (remote, local):
                    if here.arch != "jamba":
                        ctx.memory.seq_rm(0, 2, 5)
                        ctx.memory.seq_add(0, 5, None, -3)
                        ctx.memory.seq_rm(1)
                        ctx.memory.update()
                        assert ctx.memory.defrag().done
                    ctx.decode(Batch([5]))
                assert np.abs(remote.logits - local.logits).max() < 1e-3
                with np.testing.assert_raises(pyggmlkv.errors.StateError):
                    remote.state_set(whole[:-7])
            split = {**kind, "flash_attn": "off", "type_k": "f16", "offload_kqv": False}
            with pyggmlkv.Context(there, **split) as remote, pyggmlkv.Context(here, **split) as local:
                assert name not in remote.memory.memory_breakdown()
                for ctx in (remote, local):
                    ctx.decode(Batch(np.arange(20)))
                assert np.abs(remote.logits - local.logits).max() < 1e-3
        print(here.arch)
"""


@pytest.fixture
def server() -> Iterator[str]:
    """host:port of a server in a process of its own, on the loopback interface."""
    if "rpc" not in str(build_info()["backends"]):
        pytest.skip("ggml was built without the RPC backend")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-c", textwrap.dedent(SERVER), f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(400):
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def test_states_pass_between_a_remote_and_a_local_cache(
    server: str, tiny_model: Callable[[str], Path]
) -> None:
    paths = [str(tiny_model(recipe)) for recipe in ("llama", "gemma3", "jamba")]
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), server, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["llama", "gemma3", "jamba"]), done.stderr
