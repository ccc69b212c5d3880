"""`pyggmlkv info MODEL`: what a model file holds, without loading its weights."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from pyggmlkv.cli import arguments, output

NAME = "info"
HELP = "show what a model file holds: metadata, hyperparameters, tensors"

_SHOWN = 88
"""Characters of a value that the text shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor (JSON always does)")


def run(args: argparse.Namespace) -> int:
    from pyggmlkv.gguf.describe import describe
    from pyggmlkv.gguf.reader import GGUFReader

    with GGUFReader(args.model) as reader:
        found = describe(reader)
        if args.json:
            output.print_json(found)
            return 0
        print_heading(reader.arch, found)
        for title in ("hparams", "metadata"):
            values = found[title]
            if isinstance(values, dict):
                print("\n" + output.styled(title, "bold"))
                output.print_columns(((key, _short(value)) for key, value in values.items()), indent=2)
        if args.tensors:
            print("\n" + output.styled("tensors", "bold"))
            rows = ((t.name, t.dtype, list(t.ne), output.size(t.nbytes)) for t in reader.tensors.values())
            output.print_columns(rows, indent=2)
    return 0


def print_heading(arch: str, found: Mapping[str, object]) -> None:
    """Name, sizes and element types, in two lines."""
    n_params, nbytes, types = found["n_params"], found["nbytes"], found["types"]
    assert isinstance(n_params, int) and isinstance(nbytes, int) and isinstance(types, dict)
    print(output.styled(str(found["name"] or found["path"]), "bold") + f": architecture {arch}")
    print(
        f"{n_params / 1e6:.1f} M parameters in {output.size(nbytes)}, {found['bits_per_weight']} bits per weight"
    )
    print("types: " + ", ".join(f"{kind['tensors']} x {dtype}" for dtype, kind in types.items()))


def _short(value: object) -> str:
    """A value in one line: long arrays by their length and first entries."""
    if isinstance(value, dict) and "length" in value:
        text = f"{value['length']} x {value['type']}: {', '.join(map(repr, value['first']))}, ..."
    else:
        text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
