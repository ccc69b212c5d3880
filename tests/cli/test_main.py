"""The command line's manners: exit codes, one-line errors, output for people and for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pyggmlkv import cli
from pyggmlkv.cli import fetch as fetch_command
from pyggmlkv.cli import output
from pyggmlkv.errors import FetchError, UsageError


def failing(error: BaseException) -> object:
    def run(*args: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FetchError("it\nbroke"), 1),
        (FileNotFoundError(2, "No such file", "x.gguf"), 1),
        (UsageError("wrong"), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=["error", "os error", "usage", "ctrl-c"],
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch_command, "run", failing(error))
    assert cli.main(["fetch", "smollm2-135m"]) == code
    assert len(capsys.readouterr().err.splitlines()) == (0 if code == 130 else 1)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_command, "run", failing(FetchError("broken")))
    with pytest.raises(FetchError):
        cli.main(["fetch", "smollm2-135m", "--debug"])


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["fetch"], ["fetch", "no-such-model"]], ids=str)
def test_wrong_usage_is_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2


@pytest.mark.parametrize("command", ["info", "generate", "cells"])
def test_a_missing_file_is_one_line_that_names_it(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.gguf"
    prompt = [] if command == "info" else ["-p", "x"]
    assert cli.main([command, str(missing), *prompt]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pyggmlkv {command}: ") and str(missing) in line


def test_a_file_that_is_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("this is no model")
    assert cli.main(["info", str(path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_reader_that_goes_away_causes_no_traceback() -> None:
    command = (
        f"{sys.executable} -m pyggmlkv devices --json | true; {sys.executable} -m pyggmlkv --help | head -1"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_devices_lists_the_cpu_and_the_pinned_ggml(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(d["type"] == "cpu" for d in found["devices"])
    assert found["ggml"]["ggml_commit"] == "8c63e70982c95ceb862e3a1073a2c1beef75d60a"


def test_devices_for_people_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["devices"]) == 0
    text = capsys.readouterr().out
    assert "CPU" in text and "8c63e70982c9" in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (10**12, "1.0 TB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_sizes_read_well(nbytes: int, text: str) -> None:
    assert output.size(nbytes) == text


def test_no_colour_is_written_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert output.styled("x", "bold") == "x"


def test_no_color_is_respected_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda stream=None: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output.styled("x", "bold") == "\x1b[1mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.styled("x", "bold") == "x"
