"""The README's Python example runs as printed and prints what its comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyggmlkv import fetch as fetching

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_example_prints_what_its_comments_say(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetching, "fetch", lambda name: smollm2)
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(README), "exec"), {"__name__": "example"})
    text = capsys.readouterr().out
    assert "Paris" in text
    assert "\n(1, 49152)\n2\n" in text
    assert "111......" in text


def test_every_command_in_the_readme_exists() -> None:
    from pyggmlkv.cli import COMMANDS

    named = set(re.findall(r"python -m pyggmlkv (\S+)", README.read_text(encoding="utf-8")))
    assert named == {command.NAME for command in COMMANDS}
