"""Plants one fault at a time in a copy of the package and shows that a named test catches it.

    python scripts/mutants.py [NAME ...] [--list] [--json]

The faults are in scripts/mutants.toml: text replacements that must fit exactly once, so that they do not rot. The
tests of a fault are run without it first. Exit status 1 when a fault survives, 2 when one cannot be planted or
a test fails without any. The working tree is never touched.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from scripts.build_reference import cache_folder

COPIED = ("pyggmlkv", "tests", "scripts", "ggml_build", "conftest.py", "pyproject.toml", "README.md")
RANDOM = "tests/random_scripts/test_random_scripts.py::test_forty_scripts_are_equal"
LIMIT_SECONDS = 600


class MutantError(Exception):
    """A fault that cannot be planted, or tests that fail without one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: `find` becomes `replace` in `path`; one of `tests` must fail then."""

    name: str
    path: Path
    find: str
    replace: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """The file with the fault.  Raises: MutantError."""
        if (n := text.count(self.find)) != 1:
            raise MutantError(
                f"{self.name}: its text occurs {n} times in {self.path}, once expected:\n{self.find}"
            )
        return text.replace(self.find, self.replace)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What became of a fault. caught_by: the first test that failed, empty for a survivor."""

    name: str
    file: str
    caught_by: str
    seconds: float


def load_mutants(table: Path) -> list[Mutant]:
    """All faults of the data file, in its order."""
    data = tomllib.loads(table.read_text())
    files: Mapping[str, str] = data.pop("files")
    return [
        Mutant(name, Path(files[m["file"]]), m["find"], m["replace"], tuple(node(t) for t in m["tests"]))
        for name, m in data.items()
    ]


def node(test: str) -> str:
    """pytest's name of a test of the data file."""
    kind = test.removeprefix("random:")
    return f"{RANDOM}[{kind}]" if kind != test else f"tests/{test}"


class Workplace:
    """A copy of the package and its tests, at a place that stays, so that the reference's module is built once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in COPIED:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)

    def failing(self, tests: Sequence[str]) -> str | None:
        """The first test that fails, None when all pass.  Raises: MutantError where pytest cannot run them."""
        environment = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(self.folder),
        }
        command = [sys.executable, "-m", "pytest", "-x", "-v", "-rfE", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"no end within {LIMIT_SECONDS} s"
        if done.returncode == 0:
            return None
        if done.returncode < 0:
            begun = re.findall(r"^tests/(\S+::.*?) *$", done.stdout, re.MULTILINE)
            return f"{begun[-1] if begun else tests[0]} (ended by signal {-done.returncode})"
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        if done.returncode != 1 or failed is None:
            raise MutantError(f"pytest says {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return failed[1].removeprefix("tests/")

    def check_clean(self, mutants: Sequence[Mutant]) -> None:
        """Raises: MutantError, when a test fails with no fault planted."""
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        if (test := self.failing(tests)) is not None:
            raise MutantError(f"{test} fails without any fault")

    def judge(self, mutant: Mutant) -> Found:
        """Plants the fault, runs its tests, takes it out again."""
        path, started = self.folder / mutant.path, time.perf_counter()
        before = path.read_text()
        path.write_text(mutant.planted(before))
        try:
            caught = self.failing(mutant.tests)
        finally:
            path.write_text(before)
        return Found(mutant.name, str(mutant.path), caught or "", time.perf_counter() - started)


def judged(workplace: Workplace, mutants: Sequence[Mutant]) -> Iterator[Found]:
    for mutant in mutants:
        yield workplace.judge(mutant)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Plant faults, one at a time, and show that tests catch them."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    parser.add_argument("--list", action="store_true", help="what there is, and whether it still fits")
    parser.add_argument("--json", action="store_true", help="a JSON list instead of the table")
    options = parser.parse_args(arguments)
    mutants = load_mutants(REPOSITORY / "scripts" / "mutants.toml")
    if unknown := set(options.names) - {mutant.name for mutant in mutants}:
        parser.error(f"no fault named {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if not options.names or mutant.name in options.names]
    try:
        for mutant in chosen:
            mutant.planted((REPOSITORY / mutant.path).read_text())
        return show(chosen) if options.list else hunt(chosen, as_json=options.json)
    except MutantError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2


def show(mutants: Sequence[Mutant]) -> int:
    for mutant in mutants:
        print(
            f"{mutant.name:40} {mutant.path!s:36} {' '.join(test.removeprefix('tests/') for test in mutant.tests)}"
        )
    return 0


def hunt(mutants: Sequence[Mutant], *, as_json: bool) -> int:
    """Every fault in turn; 1 when one survives."""
    workplace = Workplace(cache_folder() / "mutants")
    workplace.check_clean(mutants)
    found: list[Found] = []
    for one in judged(workplace, mutants):
        found.append(one)
        if not as_json:
            print(
                f"{one.name:40} {one.file:36} {one.seconds:6.1f} s  {one.caught_by or 'SURVIVES'}", flush=True
            )
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
    survivors = [one.name for one in found if not one.caught_by]
    print(f"{len(found)} faults, {len(survivors)} survive {' '.join(survivors)}", file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
