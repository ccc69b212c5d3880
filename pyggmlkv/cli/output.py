"""How commands print: JSON, aligned columns, sizes, and colour only where a person is looking.

Knows streams and strings only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}


def is_terminal(stream: TextIO | None = None) -> bool:
    """True when a person looks at `stream` (standard output)."""
    return (stream or sys.stdout).isatty()


def has_colour(stream: TextIO | None = None) -> bool:
    """True for a terminal, unless `NO_COLOR` is set or the terminal is dumb."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, *styles: str) -> str:
    """`text` in the given styles where colour is shown, else as it is."""
    if not styles or not has_colour():
        return text
    return f"\x1b[{';'.join(_CODES[s] for s in styles)}m{text}\x1b[0m"


def print_json(value: object) -> None:
    """One JSON value, indented for people."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def print_columns(rows: Iterable[Sequence[object]], indent: int = 0) -> None:
    """Rows with columns aligned to the left."""
    table = [[str(cell) for cell in row] for row in rows]
    widths = [
        max(len(row[i]) for row in table if i < len(row)) for i in range(max(map(len, table), default=0))
    ]
    for row in table:
        line = "  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row))
        print(" " * indent + line.rstrip())


def size(nbytes: int) -> str:
    """A byte count in the unit that reads best: `512 B`, `98.4 MB`, `1.2 GB`."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{nbytes} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _plain(value: object) -> object:
    """What json cannot write by itself: NumPy arrays and scalars, tuples' relatives, paths."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else str(value)
