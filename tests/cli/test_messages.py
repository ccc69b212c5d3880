"""What the commands say when something is wrong: one line with the file or setting at fault, no traceback, a code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pyggmlkv import cli


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command; its exit code and the last line on stderr."""

    def run(*argv: object) -> tuple[int, str]:
        try:
            code = cli.main([str(a) for a in argv])
        except SystemExit as error:
            code = int(str(error.code))
        err = capsys.readouterr().err
        assert "Traceback" not in err
        return code, err.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize("command", ["info", "state", "generate", "cells"])
def test_a_missing_file_is_named_first(
    said: Callable[..., tuple[int, str]], command: str, tmp_path: Path
) -> None:
    path = tmp_path / "nowhere"
    more = ["-p", "x"] if command in ("generate", "cells") else []
    code, line = said(command, path, *more)
    assert code == 1
    assert line.startswith(f"pyggmlkv {command}: {path}: ")
    assert line.endswith("No such file or directory")


@pytest.mark.parametrize("command", ["info", "state"])
def test_a_folder_is_no_file(said: Callable[..., tuple[int, str]], command: str, tmp_path: Path) -> None:
    code, line = said(command, tmp_path)
    assert code == 1
    assert line.startswith(f"pyggmlkv {command}: {tmp_path}: ")


@pytest.mark.parametrize(
    "data", [b"", b"abc", b"GGUF" + bytes(60), bytes(1000)], ids=["empty", "3", "gguf", "zeros"]
)
def test_what_is_no_state_is_said_to_be_none(
    said: Callable[..., tuple[int, str]], tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    code, line = said("state", path)
    assert code == 1
    assert line.startswith(f"pyggmlkv state: {path}: not a saved state: ")


def test_a_prompt_that_is_no_text_is_named(
    said: Callable[..., tuple[int, str]], smollm2: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prompt.bin"
    path.write_bytes(b"abc\xff\xfe")
    code, line = said("generate", smollm2, "-f", path)
    assert code == 2
    assert f"{path}: not a text in UTF-8 (byte 3" in line


@pytest.mark.parametrize(
    ("argv", "said_of"),
    [
        (["-n", "-3"], "-3 is below 0"),
        (["-t", "x"], "'x' is not a whole number"),
        (["-c", "1.5"], "'1.5' is not a whole number"),
        (["--temp", "-1"], "temp is -1.0, expected 0 (greedy) or more"),
        (["--flash-attn", "maybe"], "maybe"),
        (["--keep", "3"], "--context-shift"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_wrong_usage_is_code_2(said: Callable[..., tuple[int, str]], argv: list[str], said_of: str) -> None:
    code, line = said("generate", "model.gguf", "-p", "x", *argv)
    assert (code, said_of in line) == (2, True), line


@pytest.mark.parametrize(
    ("argv", "said_of"),
    [
        (["-c", "8000000000"], "n_ctx=8000000000"),
        (["--type-k", "q9"], "type_k='q9'"),
        (["--type-v", "q8_0", "--flash-attn", "off", "-c", "64"], "flash attention"),
        (["-c", "2", "-p", "one two three four five"], "the context has room for 2"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_what_no_context_can_do_is_code_1(
    said: Callable[..., tuple[int, str]], smollm2: Path, argv: list[str], said_of: str
) -> None:
    prompt = [] if "-p" in argv else ["-p", "x"]
    code, line = said("generate", smollm2, *prompt, "-t", "1", *argv)
    assert (code, said_of in line) == (1, True), line
