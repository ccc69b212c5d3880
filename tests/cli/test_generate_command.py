"""`generate` and `cells` on the real model: what they print, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyggmlkv import cli

PROMPT = "The capital of France is"


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main([*argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_generate_prints_text_tokens_and_timings(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(smollm2), "-p", PROMPT, "-n", "4", "--temp", "0", "--n-ctx", "64", "-t", "1"]
    found = run_json(capsys, *argv)
    assert found["text"].startswith(" Paris")
    assert len(found["prompt_tokens"]) == 5 and len(found["tokens"]) == 4
    assert found["stop_reason"] == "length"
    assert (found["timings"]["prompt_n"], found["timings"]["decode_n"]) == (5, 3)


def test_text_for_people_is_the_text_of_the_json(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(smollm2), "-p", PROMPT, "-n", "4", "--n-ctx", "64", "-t", "1"]
    text = run_json(capsys, *argv)["text"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == text + "\n"


def test_equal_seeds_write_equal_texts(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "generate",
        str(smollm2),
        "-p",
        PROMPT,
        "-n",
        "6",
        "--temp",
        "1",
        "--seed",
        "3",
        "-c",
        "64",
        "-t",
        "1",
    ]
    assert run_json(capsys, *argv)["tokens"] == run_json(capsys, *argv)["tokens"]


def test_a_context_shift_writes_past_the_context(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(smollm2), "-p", PROMPT, "-n", "40", "-c", "32", "-t", "1", "--ignore-eos"]
    full = run_json(capsys, *argv)
    assert (full["stop_reason"], full["context_shifts"]) == ("context", 0)
    shifted = run_json(capsys, *argv, "--context-shift", "--keep", "5")
    assert (shifted["stop_reason"], len(shifted["tokens"])) == ("length", 40)
    assert shifted["context_shifts"] == 1
    assert shifted["tokens"][:27] == full["tokens"][:27]


def test_keep_without_context_shift_is_wrong_usage(smollm2: Path) -> None:
    assert cli.main(["generate", str(smollm2), "-p", "x", "--keep", "3"]) == 2


def test_a_prompt_can_come_from_a_file(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    argv = ["generate", str(smollm2), "-f", str(tmp_path / "prompt.txt"), "-n", "1", "-c", "64", "-t", "1"]
    assert len(run_json(capsys, *argv)["prompt_tokens"]) == 5


def test_chat_puts_the_template_around_the_prompt(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(smollm2), "-p", "Hi", "--chat", "-n", "1", "-c", "64", "-t", "1"]
    ids = run_json(capsys, *argv)["prompt_tokens"]
    assert ids[0] == 1 and ids.count(1) == 3 and len(ids) > 10


def test_cells_shows_one_used_cell_for_each_prompt_token(
    smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(capsys, "cells", str(smollm2), "-p", PROMPT, "-c", "64", "-t", "1")
    assert "5 used" in found["map"] and "00000." in found["map"]
    assert len(found["prompt_tokens"]) == 5
