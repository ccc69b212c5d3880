"""What a step came to: one call with its arguments, for both sides, and how it prints as Python.

An action knows no memory; `resolve` makes it, `play` does it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

Call = tuple[str, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """A batch for either side. embd_seed: rows of embeddings instead of tokens, (n_tokens, n_embd)."""

    tokens: list[int]
    pos: list[int] | list[list[int]]
    seq_id: list[list[int]]
    logits: str | list[int]
    embd_seed: int | None = None
    n_embd: int = 0

    def arguments(self) -> dict[str, Any]:
        """Keywords of `RefContext.decode` and of `Batch`."""
        return {
            "tokens": self.tokens if self.embd_seed is None else None,
            "pos": self.pos,
            "seq_id": self.seq_id,
            "logits": self.logits,
            "embd": self.embd,
        }

    @property
    def embd(self) -> npt.NDArray[np.float32] | None:
        if self.embd_seed is None:
            return None
        rng = np.random.default_rng(self.embd_seed)
        return rng.standard_normal((len(self.tokens), self.n_embd), np.float32)

    def __str__(self) -> str:
        rest = f"pos={_short(self.pos)}, seq_id={_same(self.seq_id)}, logits={self.logits!r}"
        if self.embd_seed is None:
            return f"{self.tokens}, {rest}"
        shape = (len(self.tokens), self.n_embd)
        return f"embd=default_rng({self.embd_seed}).standard_normal({shape}, float32), {rest}"


def _short(pos: list[int] | list[list[int]]) -> str:
    """A run of positions as a range."""
    runs = len(pos) > 2 and isinstance(pos[0], int) and pos == list(range(pos[0], pos[0] + len(pos)))
    return f"range({pos[0]}, {pos[0] + len(pos)})" if runs else str(pos)  # type: ignore[operator]


def _same(seq_id: list[list[int]]) -> str:
    """Equal sets, counted."""
    runs = len(seq_id) > 1 and all(ids == seq_id[0] for ids in seq_id)
    return f"[{seq_id[0]}] * {len(seq_id)}" if runs else str(seq_id)


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A saved state. seq_id: None for all. n_streams: the most streams that a part had cells in.

    has_empty_part: an attention part without a cell; upstream leaves such a part as it is when it loads.
    """

    seq_id: int | None
    data: bytes
    n_streams: int
    has_empty_part: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """One call here and, unless `reference` says otherwise, the same call there.

    reference: other calls to the same effect there, or () for none. refused: the error that this side must
    raise, False for an operation that must say False; memory must then be exactly as before.
    """

    verb: str
    arguments: tuple[Any, ...] = ()
    reference: tuple[Call, ...] | None = None
    refused: type[Exception] | bool | None = None
    why: str = ""

    def __str__(self) -> str:
        owner = "ctx" if self.verb in ("decode", "encode", "save", "load") else "m"
        call = f"{owner}.{self.verb}({', '.join(map(str, self.arguments))})"
        if self.refused is not None:
            call += f"  # refused here: {self.why}"
        elif self.reference is not None:
            call += f"  # there: {', '.join(f'{verb}{args}' for verb, args in self.reference)}"
        return call
