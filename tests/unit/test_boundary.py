"""The C boundary: `ffi`, `lib` and the compiled module are named inside pyggmlkv/binding and nowhere else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "pyggmlkv"
OUTSIDE = sorted(p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] != "binding")

PURE = (
    "pyggmlkv",
    "pyggmlkv.errors",
    "pyggmlkv.batch",
    "pyggmlkv.memory.cells",
    "pyggmlkv.memory.buckets",
    "pyggmlkv.memory.rotation",
    "pyggmlkv.memory.recurrent.cells",
    "pyggmlkv.memory.recurrent.slots",
    "pyggmlkv.memory.seq_ops",
    "pyggmlkv.memory.slots",
    "pyggmlkv.memory.mask",
    "pyggmlkv.text",
    "pyggmlkv.fetch",
    "pyggmlkv.sampling",
    "pyggmlkv.generate",
    "pyggmlkv.cli",
)


def imported_names(path: Path) -> set[str]:
    """Every module and name that a file imports, wherever in it the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_c_outside_the_binding(path: Path) -> None:
    found = {n for n in imported_names(path) if n in ("ffi", "lib") or "_ggml" in n.split(".") or n == "cffi"}
    assert not found


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_with_no_c_library_built(module: str) -> None:
    block = (
        "import sys; sys.modules['pyggmlkv._ggml'] = None; "
        f"import {module}; assert 'pyggmlkv.binding' not in sys.modules"
    )
    command = [sys.executable, "-c", block]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0, done.stderr
