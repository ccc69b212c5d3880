"""`pyggmlkv state FILE`: what a saved state holds, without the model that it belongs to."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pyggmlkv.cli import output
from pyggmlkv.errors import StateError
from pyggmlkv.state.layouts import Container, LayoutName

NAME = "state"
HELP = "explain a saved state: tokens, sequences, cells, tensors"

_TOKENS_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a state file, or bytes that were saved to memory")
    parser.add_argument("--container", choices=get_args(Container), help="what FILE is (default: recognised)")
    parser.add_argument(
        "--layout", choices=get_args(LayoutName), help="the age of the format (default: recognised)"
    )


def run(args: argparse.Namespace) -> int:
    from pyggmlkv.state.explain import explain

    data = Path(args.file).read_bytes()
    try:
        facts = explain(data, container=args.container, layout=args.layout, type_names=_type_names())
    except StateError as error:
        raise StateError(f"{args.file}: not a saved state: {error}", **error.facts) from error
    if args.json:
        output.print_json(facts)
    else:
        _print(args.file, facts)
    return 1 if "problem" in facts else 0


def _type_names() -> Mapping[int, str]:
    """ggml's names of element types; none where ggml is not built."""
    try:
        from pyggmlkv.binding import dtypes
    except ImportError:
        return {}
    return {number: info.name for number, info in dtypes.BY_NUMBER.items()}


def _print(name: str, facts: Mapping[str, Any]) -> None:
    words = facts["container"].replace("_", " ")
    print(
        output.styled(name, "bold") + f": {words}, layout {facts['layout']}, {output.size(facts['nbytes'])}"
    )
    if "arch" in facts:
        print(f"architecture {facts['arch']}")
    if "seq_id" in facts:
        print(f"saved as sequence {facts['seq_id']}")
    if "tokens" in facts:
        tokens = facts["tokens"]
        more = " ..." if len(tokens) > _TOKENS_SHOWN else ""
        print(f"{len(tokens)} tokens: {' '.join(map(str, tokens[:_TOKENS_SHOWN]))}{more}")
    for part in facts.get("parts", ()):
        _print_part(part)
    if "problem" in facts:
        print(output.styled("damaged: ", "red") + str(facts["problem"]["message"]))


def _print_part(part: Mapping[str, Any]) -> None:
    streams = part.get("streams")
    shape = (
        "" if streams is None else f", {part['n_stream']} stream(s)" + (", M-RoPE" if part["m_rope"] else "")
    )
    print("\n" + output.styled(part["kind"], "bold") + f"{shape}, {output.size(part['nbytes'])}")
    for holder in [part] if streams is None else streams:
        where = "" if streams is None else f"stream {holder['stream']}: "
        print(f"  {where}{holder['n_cells']} cells")
        output.print_columns(
            (
                (
                    f"sequence {seq}",
                    f"{mine['n_cells']} cells",
                    f"positions {mine['pos_min']} to {mine['pos_max']}",
                )
                for seq, mine in holder.get("sequences", {}).items()
            ),
            indent=4,
        )
        output.print_columns((_tensor_row(side, holder) for side in "kvrs" if holder.get(side)), indent=4)


def _tensor_row(side: str, holder: Mapping[str, Any]) -> tuple[str, ...]:
    """One line for all layers of K, V, r or s."""
    tensors = holder[side]
    types = sorted({str(t.get("type_name", f"type {t['type']}")) for t in tensors})
    transposed = " transposed" if "n_embd" in tensors[0] else ""
    size = output.size(sum(t["nbytes"] for t in tensors))
    return (
        side.upper() if side in "kv" else side,
        f"{len(tensors)} layers",
        "/".join(types) + transposed,
        size,
    )
