"""The size gate itself: what it counts and what it lets pass."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_size", ROOT / "scripts" / "check_size.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_size"] = module
    spec.loader.exec_module(module)
    return module


def found(gate: ModuleType, tmp_path: Path, text: str, name: str = "noun.py") -> list[str]:
    folder = tmp_path / "pyggmlkv"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    result: list[str] = gate.check(tmp_path)
    return result


def test_a_small_module_passes(gate: ModuleType, tmp_path: Path) -> None:
    assert found(gate, tmp_path, "x = 1\n") == []


def test_a_long_file_is_named_with_its_length(gate: ModuleType, tmp_path: Path) -> None:
    assert found(gate, tmp_path, "x = 1\n" * 401) == [
        "pyggmlkv/noun.py: 401 lines, the budget is 400: split it by noun"
    ]


def test_a_long_function_is_named(gate: ModuleType, tmp_path: Path) -> None:
    body = "def long():\n" + "    x = 1\n" * 50
    (message,) = found(gate, tmp_path, body)
    assert "long has 51 lines" in message


def test_decorators_count_to_the_function(gate: ModuleType, tmp_path: Path) -> None:
    body = "import functools\n\n\n@functools.cache\ndef long():\n" + "    x = 1\n" * 49
    (message,) = found(gate, tmp_path, body)
    assert "51 lines" in message


def test_seven_parameters_are_too_many_but_self_is_free(gate: ModuleType, tmp_path: Path) -> None:
    text = (
        "class C:\n    def six(self, a, b, c, d, *, e, f): ...\n\n\ndef seven(a, b, c, d, *, e, f, g): ...\n"
    )
    (message,) = found(gate, tmp_path, text)
    assert "seven takes 7 parameters" in message


def test_an_exception_needs_a_reason_on_the_line(gate: ModuleType, tmp_path: Path) -> None:
    text = "def seven(a, b, c, d, e, f, g): ...  # size: ok (parameters, public names)\n"
    assert found(gate, tmp_path, text) == []


@pytest.mark.parametrize("stem", ["utils", "helpers", "common", "misc"])
def test_names_that_say_nothing_are_refused(gate: ModuleType, tmp_path: Path, stem: str) -> None:
    (message,) = found(gate, tmp_path, "x = 1\n", f"{stem}.py")
    assert stem in message


def test_sixteen_modules_are_too_many_for_a_package(gate: ModuleType, tmp_path: Path) -> None:
    for i in range(15):
        assert found(gate, tmp_path, "x = 1\n", f"part{i}.py") == []
    (message,) = found(gate, tmp_path, "x = 1\n", "part15.py")
    assert "16 modules" in message
