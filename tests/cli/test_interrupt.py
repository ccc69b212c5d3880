"""Ctrl-C in the middle of a generation: exit code 130, no traceback, what was written stays written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(os.name != "posix", reason="signals are sent the POSIX way")
def test_ctrl_c_while_generating_is_quiet(smollm2: Path) -> None:
    command = [sys.executable, "-m", "pyggmlkv", "generate", str(smollm2), "-p", "Once", "-n", "100000"]
    command += ["-c", "64", "-t", "1", "--context-shift", "--ignore-eos"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert first
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
