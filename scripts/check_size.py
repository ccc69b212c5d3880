"""Checks the size budgets: lines a file, lines a function, parameters, modules a package, names that say nothing.

Knows only syntax trees and line counts. Run by `make check`; exit 1 when something is over budget.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FORBIDDEN_STEMS = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})
SKIPPED_PARTS = frozenset({"__pycache__", "_lib", "build", "ggml"})


@dataclass(frozen=True, slots=True)
class Budget:
    """The most lines a file, lines a function, parameters a function and modules a package may have."""

    file_lines: int = 400
    function_lines: int = 50
    parameters: int = 6
    modules: int = 15


PACKAGE = Budget()
TESTS = Budget(file_lines=600, function_lines=80, parameters=10, modules=40)
OPS = Budget(parameters=20)  # an op's parameters are ggml's own
ROOTS = {
    "pyggmlkv": PACKAGE,
    "scripts": PACKAGE,
    "ggml_build": PACKAGE,
    "build_ggml.py": PACKAGE,
    "setup.py": PACKAGE,
    "tests": TESTS,
}
ARCHITECTURES = Budget(modules=200)  # one file each; what they share is in graph/
FOLDERS = {"pyggmlkv/binding/ops": OPS, "pyggmlkv/models": ARCHITECTURES}
"""Folders in the roots with a budget of their own."""


def python_files(root: Path) -> list[Path]:
    """The Python files under `root` (or `root` itself), in a stable order."""
    if root.is_file():
        return [root]
    return sorted(p for p in root.rglob("*.py") if not SKIPPED_PARTS & set(p.relative_to(root).parts))


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters a caller passes: `self` and `cls` of a method do not count."""
    args = function.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    return len(names)


def is_overload(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for `@overload` stubs, which repeat a signature that is counted elsewhere."""
    return any(ast.unparse(d).rpartition(".")[2] == "overload" for d in function.decorator_list)


def allowed(line: str, what: str) -> bool:
    """True when the line carries `# size: ok (WHAT, reason)`: an exception that says why."""
    _, mark, rest = line.partition("# size: ok (")
    return bool(mark) and rest.startswith(f"{what},")


def check_file(path: Path, budget: Budget) -> Iterator[str]:
    """Yields one sentence for each thing in `path` that is over budget."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if path.stem in FORBIDDEN_STEMS:
        yield f"{path}: a module is named for what it holds, not {path.stem!r}"
    if len(lines) > budget.file_lines:
        yield f"{path}: {len(lines)} lines, the budget is {budget.file_lines}: split it by noun"
    for node in ast.walk(ast.parse(text, str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_overload(node):
            continue
        where = f"{path}:{node.lineno}: {node.name}"
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        length = (node.end_lineno or node.lineno) - first + 1
        if length > budget.function_lines and not allowed(lines[node.lineno - 1], "lines"):
            yield f"{where} has {length} lines, the budget is {budget.function_lines}"
        parameters = parameter_count(node)
        if parameters > budget.parameters and not allowed(lines[node.lineno - 1], "parameters"):
            yield f"{where} takes {parameters} parameters, the budget is {budget.parameters}: pass a frozen dataclass"


def check_packages(base: Path, root: Path, budget: Budget) -> Iterator[str]:
    """Yields one sentence for each folder with too many modules or a name that says nothing."""
    by_folder: dict[Path, int] = {}
    for path in python_files(root):
        if path.name != "__init__.py":
            by_folder[path.parent] = by_folder.get(path.parent, 0) + 1
    for folder, count in sorted(by_folder.items()):
        most = FOLDERS.get(folder.relative_to(base).as_posix(), budget).modules
        if count > most:
            yield f"{folder}: {count} modules, the budget is {most}: make a sub-package"
        if folder.name in FORBIDDEN_STEMS:
            yield f"{folder}: a package is named for what it holds, not {folder.name!r}"


def check(base: Path, roots: dict[str, Budget] = ROOTS) -> list[str]:
    """Everything over budget under `base`, one sentence each."""
    found: list[str] = []
    for name, budget in roots.items():
        root = base / name
        if not root.exists():
            continue
        for path in python_files(root):
            own = FOLDERS.get(path.parent.relative_to(base).as_posix(), budget)
            found += [s.replace(f"{base}/", "") for s in check_file(path, own)]
        if root.is_dir():
            found += [s.replace(f"{base}/", "") for s in check_packages(base, root, budget)]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the size budgets.")
    parser.add_argument("base", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    base = parser.parse_args(argv).base
    found = check(base)
    print("\n".join(found) if found else "size: everything is within budget")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
