"""Plays random scripts by hand: python -m tests.random_scripts [KIND ...] [--scripts N] [--first SEED] [--steps N].

Prints the number of a script before it is played, with --verbose, so that one that ends the process is known.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.oracle.libllama import load
from tests.oracle.tiny_models import TinyModel, write

from .kinds import KINDS
from .soak import Tally, run_kind

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description="Random scripts against the reference, bit for bit.")
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all of them if none is named"
    )
    parser.add_argument("--scripts", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first script")
    parser.add_argument("--steps", type=int, default=12, help="steps of a script, about")
    parser.add_argument("--failures", type=int, default=1, help="stop a kind after so many")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    script = REPOSITORY / "scripts" / "build_reference.py"
    built = subprocess.run(
        [sys.executable, str(script), "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    library = load(Path(json.loads(built.stdout)["module"]))
    numbers = range(options.first, options.first + options.scripts)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:

        def path_of(model: TinyModel) -> Path:
            return write(library, model, Path(folder))

        for name in options.kinds or KINDS:
            begin = time.perf_counter()
            wanted = announced(name, numbers) if options.verbose else numbers
            tally = run_kind(library, path_of, name, wanted, options.steps, most_failures=options.failures)
            print(line(name, tally, time.perf_counter() - begin), *tally.failures, sep="\n", flush=True)
            bad += len(tally.failures)
    return 1 if bad else 0


def announced(name: str, numbers: Iterable[int]) -> Iterator[int]:
    for number in numbers:
        print(f"{name} {number}", file=sys.stderr, flush=True)
        yield number


def line(name: str, tally: Tally, seconds: float) -> str:
    return (
        f"{name:16} {tally.n_scripts:5d} scripts {tally.n_actions:6d} actions {tally.n_rows:7d} rows "
        f"{tally.n_refused:5d} refusals {tally.n_loads:5d} loads {len(tally.failures):3d} failures {seconds:7.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
