"""Writes tiny random models for tests and experiments, of any architecture a recipe exists for.

    python scripts/make_tiny_gguf.py RECIPE [OUT.gguf] [--seed N] [--type f32] [--set KEY=VALUE] [--drop
    REGEX] python scripts/make_tiny_gguf.py --list

Keys are metadata without the architecture's prefix: `--set attention.sliding_window=16 --set
rope.scaling.type=yarn`. Needs the reference (scripts/build_reference.py), which says which tensors such a
model has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.oracle.libllama import Library, OracleError, load
from tests.oracle.tiny_models import TinyModel, write
from tests.oracle.tiny_recipes import RECIPES, Value


def reference() -> Library:
    """The reference, built first if it is not there."""
    script = REPOSITORY / "scripts" / "build_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return load(Path(json.loads(done.stdout)["module"]))


def setting(text: str) -> tuple[str, Value]:
    """`key=value`; the value is JSON where it parses, else a string."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a tiny random GGUF model.")
    parser.add_argument("recipe", nargs="?", choices=list(RECIPES))
    parser.add_argument(
        "out", nargs="?", type=Path, help="default: a name made of the choices, in this folder"
    )
    parser.add_argument("--list", action="store_true", help="print the recipes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--type", default="f32", help="of matrices: f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1")
    parser.add_argument("--set", action="append", type=setting, default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--drop", action="append", default=[], metavar="REGEX", help="leave these tensors out"
    )
    options = parser.parse_args(arguments)
    if options.list or options.recipe is None:
        for name, recipe in RECIPES.items():
            print(f"{name:14} {recipe.arch}")
        return 0
    model = TinyModel(options.recipe, options.seed, options.type, dict(options.set), tuple(options.drop))
    out = options.out or Path(model.file_name)
    try:
        with tempfile.TemporaryDirectory(dir=out.resolve().parent) as folder:
            write(reference(), model, Path(folder)).replace(out)
    except OracleError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{out}: {out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
