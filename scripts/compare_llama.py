"""Compares this package with the reference libllama, case by case, and prints the table.

    python scripts/compare_llama.py [ARCH|RECIPE|FILE ...] [--case NAME] [--json] [--seed N] [--type T]

Without names: a tiny random model of every architecture the package has. Exit status 1 when something
differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from pyggmlkv.errors import PyggmlkvError
from pyggmlkv.models import registry
from tests.oracle.libllama import Library, OracleError, load
from tests.oracle.tiny_models import TinyModel, write
from tests.oracle.tiny_recipes import RECIPES
from tests.side_by_side import CASES, Models, run_case


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One case of one model. memory: its kind; config: dense, moe, a recipe's variant or a file name."""

    arch: str
    config: str
    memory: str
    case: str
    rows: int
    bits_equal: bool | None
    max_abs_diff: float | None
    nmse: float | None
    state_bytes_equal: bool | None
    note: str = ""


def reference_module() -> Path:
    """Where the reference is, built first if it is not there."""
    script = REPOSITORY / "scripts" / "build_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return Path(json.loads(done.stdout)["module"])


def recipe_config(name: str) -> tuple[str, str]:
    """Architecture and configuration of a recipe."""
    arch = RECIPES[name].arch
    variant = name.removeprefix(arch).strip("-")
    return arch, variant or ("moe" if "expert_count" in RECIPES[name].keys else "dense")


def models_wanted(
    names: Sequence[str], library: Library, tiny: TinyModel, folder: Path
) -> Iterator[tuple[str, str, Path]]:
    """(architecture, configuration, file) of everything asked for. Raises: SystemExit for an unknown name."""
    known = set(registry.MODULES)
    for name in names or [recipe for recipe in RECIPES if RECIPES[recipe].arch in known]:
        if Path(name).is_file():
            yield "", Path(name).name, Path(name)
            continue
        recipes = [r for r in RECIPES if r == name] or [r for r in RECIPES if RECIPES[r].arch == name]
        if not recipes:
            raise SystemExit(f"{name} is neither a file nor one of: {', '.join(RECIPES)}")
        for recipe in recipes:
            yield *recipe_config(recipe), write(library, dataclasses.replace(tiny, recipe=recipe), folder)


def compare_model(
    library: Library, arch: str, config: str, path: Path, cases: Sequence[str]
) -> Iterator[Row]:
    """One row a case."""
    try:
        models = Models(library, path)
    except (PyggmlkvError, OracleError) as error:
        yield Row(arch, config, "", "load", 0, False, None, None, None, f"{type(error).__name__}: {error}")
        return
    with models:
        arch = arch or models.ours.arch
        for name in cases:
            try:
                result = run_case(models, name)
            except (PyggmlkvError, OracleError) as error:
                yield Row(
                    arch, config, "", name, 0, False, None, None, None, f"{type(error).__name__}: {error}"
                )
                continue
            kind, found = result.memory, result.comparison
            if found is None:
                yield Row(arch, config, kind, name, 0, None, None, None, None, result.note)
                continue
            yield Row(
                arch, config, kind, name, found.rows, found.bits_equal, found.max_abs_diff, found.nmse,
                found.state_bytes_equal, found.first_difference,
            )  # fmt: skip


def show(row: Row) -> None:
    """A line of the table."""
    words = {True: "equal", False: "DIFFER", None: "-"}
    bits, state = words[row.bits_equal], words[row.state_bytes_equal]
    diff = "-" if row.max_abs_diff is None else f"{row.max_abs_diff:.2e}"
    nmse = "-" if row.nmse is None else f"{row.nmse:.2e}"
    print(
        f"{row.arch:10} {row.config:12.12} {row.memory:10} {row.case:15} {row.rows:5d} {bits:7}"
        f"{diff:>9} {nmse:>9}  {state:7} {row.note}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare with the reference libllama, bit for bit, on the CPU."
    )
    parser.add_argument("names", nargs="*", metavar="ARCH|RECIPE|FILE")
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="only this case (may be repeated)"
    )
    parser.add_argument("--json", action="store_true", help="a JSON list of rows instead of the table")
    parser.add_argument("--seed", type=int, default=1, help="of the tiny models' weights")
    parser.add_argument(
        "--type", default="f32", help="of the tiny models' weights: f32 f16 bf16 q8_0 q4_0 ..."
    )
    options = parser.parse_args(arguments)
    library = load(reference_module())
    rows: list[Row] = []
    if not options.json:
        head = f"{'arch':10} {'config':12} {'memory':10} {'case':15}"
        print(f"{head}  rows bits     max diff      nmse  state   note")
    with tempfile.TemporaryDirectory() as folder:
        tiny = TinyModel("llama", seed=options.seed, weight_type=options.type)
        for arch, config, path in models_wanted(options.names, library, tiny, Path(folder)):
            for row in compare_model(library, arch, config, path, options.case or list(CASES)):
                rows.append(row)
                if not options.json:
                    show(row)
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    bad = [row for row in rows if row.bits_equal is False or row.state_bytes_equal is False]
    print(f"{len(rows)} cases, {len(bad)} differ", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
