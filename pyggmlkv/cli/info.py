"""`pyggmlkv info MODEL`: what a model file holds, without loading its weights."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyggmlkv.cli import arguments, output

if TYPE_CHECKING:
    from pyggmlkv.gguf.reader import GGUFReader

NAME = "info"
HELP = "show what a model file holds: metadata, tensors, sizes"

_SHOWN = 60
"""Characters of a value, or entries of an array, that text and JSON show."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor (JSON always does)")


def run(args: argparse.Namespace) -> int:
    from pyggmlkv.gguf.reader import GGUFReader

    with GGUFReader(args.model) as reader:
        found = describe(reader)
    if args.json:
        output.print_json(found)
        return 0
    size = f"{output.size(reader.nbytes)} of weights, {reader.n_params / 1e6:.1f} M parameters"
    print(
        output.styled(f"{found['name']} ({found['arch']})", "bold")
        + f": {len(reader.tensors)} tensors, {size}"
    )
    print("types: " + ", ".join(f"{n} x {dtype}" for dtype, n in reader.type_counts.items()) + "\n")
    output.print_columns(((key, _short(value)) for key, value in reader.metadata.items()))
    if args.tensors:
        print()
        rows = [(t.name, t.dtype, list(t.ne), output.size(t.nbytes)) for t in reader.tensors.values()]
        output.print_columns([("tensor", "type", "[ne]", "size"), *rows])
    return 0


def describe(reader: GGUFReader) -> dict[str, object]:
    """What `--json` prints; long arrays are given by their length and their first entries."""
    return {
        "path": os.path.abspath(reader.path),
        "arch": reader.arch,
        "name": str(reader.metadata.get("general.name", os.path.basename(reader.path))),
        "n_params": reader.n_params,
        "nbytes": reader.nbytes,
        "types": dict(reader.type_counts),
        "metadata": _metadata(reader.metadata),
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "ne": list(t.ne), "nbytes": t.nbytes}
            for t in reader.tensors.values()
        ],
    }


def _metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    return {key: _entries(value) for key, value in metadata.items()}


def _entries(value: object) -> object:
    values = _as_list(value)
    if values is None or len(values) <= _SHOWN:
        return value if values is None else values
    return {"n": len(values), "first": values[:_SHOWN]}


def _as_list(value: object) -> list[object] | None:
    """The entries of a list or an array; None for a plain value."""
    if isinstance(value, str | int | float | bool):
        return None
    to_list = getattr(value, "tolist", None)
    found = to_list() if callable(to_list) else value
    return found if isinstance(found, list) else None


def _short(value: object) -> str:
    values = _as_list(value)
    if values is None:
        text = repr(value) if isinstance(value, str) else str(value)
    else:
        text = f"{len(values)} entries: {', '.join(map(repr, values[:8]))}"
    return text if len(text) <= _SHOWN + 30 else text[: _SHOWN + 29] + "…"
