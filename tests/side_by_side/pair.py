"""Two contexts with the same settings, one on each side, that do the same things and compare the results.

Knows the public API of the package and the oracle's twin of it, and no case. A refusal must be a refusal on
both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

import pyggmlkv
from pyggmlkv.errors import PyggmlkvError
from tests.oracle.libllama import ContextParams, Library, OracleError, RefModel

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """Settings of both contexts: small, flash attention decided rather than automatic, and one thread.

    Two threads that wait for each other at every node are slow where anything else runs.
    """

    n_ctx: int = 256
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 1
    flash_attn: str = "off"
    type_k: str = "f16"
    type_v: str = "f16"
    kv_unified: bool = False
    swa_full: bool = False
    embeddings: bool = False
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None

    @property
    def label(self) -> str:
        """What differs from the default, for people."""
        default = Setup()
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "default"


@dataclasses.dataclass(slots=True)
class Comparison:
    """What was compared so far. state_bytes_equal: None where states were not compared."""

    rows: int = 0
    bits_equal: bool = True
    max_abs_diff: float = 0.0
    squared_error: float = 0.0
    squared_size: float = 0.0
    state_bytes_equal: bool | None = None
    first_difference: str = ""

    @property
    def nmse(self) -> float:
        """Squared error over squared size of the reference."""
        return self.squared_error / self.squared_size if self.squared_size else 0.0

    def differ(self, what: str) -> None:
        """Notes a difference that is not one of logits."""
        self.bits_equal = False
        self.first_difference = self.first_difference or what

    def add(self, ours: Floats, reference: Floats, what: str) -> None:
        """Compares rows."""
        if ours.shape != reference.shape:
            self.differ(f"{what}: shape {ours.shape}, the reference has {reference.shape}")
            return
        self.rows += len(reference)
        if ours.tobytes() == reference.tobytes():
            self.squared_size += float(np.square(reference, dtype=np.float64).sum())
            return
        gap = ours.astype(np.float64) - reference
        self.max_abs_diff = max(self.max_abs_diff, float(np.abs(gap).max()))
        self.squared_error += float(np.square(gap).sum())
        self.squared_size += float(np.square(reference, dtype=np.float64).sum())
        bad = np.flatnonzero((ours != reference).any(axis=1))
        self.differ(f"{what}: {len(bad)} of {len(ours)} rows differ, the first is row {bad[:1]}")


class Models:
    """One file, loaded on both sides."""

    def __init__(self, library: Library, path: Path) -> None:
        self.path = path
        self.reference = RefModel(library, path)
        try:
            self.ours = pyggmlkv.Model.load(path)
        except BaseException:
            self.reference.close()
            raise

    def close(self) -> None:
        self.ours.close()
        self.reference.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pair:
    """A context on each side. Every verb does the same on both; `comparison` says how far they agree."""

    def __init__(self, models: Models, setup: Setup, *, graph_reuse: bool = True) -> None:
        settings = dataclasses.asdict(setup)
        self.models = models
        self.setup = setup
        self.comparison = Comparison()
        self.reference = models.reference.context(ContextParams(**settings))
        try:
            self.ours = pyggmlkv.Context(models.ours, graph_reuse=graph_reuse, **settings)
        except BaseException:
            self.reference.close()
            raise

    @property
    def n_vocab(self) -> int:
        return self.models.reference.n_vocab

    @property
    def has_encoder(self) -> bool:
        return self.models.reference.has_encoder

    @property
    def can_shift(self) -> bool:
        return self.reference.memory.can_shift

    @property
    def memory_kind(self) -> str:
        """kv, iswa, recurrent, hybrid, hybrid-iswa or none."""
        kinds = {part.kind for part in self.reference.memory.parts}
        attention = "iswa" if "kv_swa" in kinds else "kv" if kinds - {"recurrent"} else ""
        if "recurrent" not in kinds:
            return attention or "none"
        return {"": "recurrent", "kv": "hybrid", "iswa": "hybrid-iswa"}[attention]

    def decode(
        self,
        tokens: Sequence[int],
        pos: npt.ArrayLike | None = None,
        seq_id: int | Sequence[int] | Sequence[Sequence[int]] = 0,
        logits: Any = "all",
    ) -> Floats | None:
        """Decodes on both sides and compares the rows; the reference's rows, or None when both refused."""
        refused = self._both("decode", tokens, pos, seq_id, logits)
        if refused:
            return None
        rows = self.reference.logits
        self.comparison.add(self.ours.logits, rows, f"decode of {len(tokens)} tokens")
        return rows

    def encode(self, tokens: Sequence[int]) -> None:
        """Encodes on both sides."""
        self._both("encode", tokens, None, 0, "all")

    def _both(self, verb: str, tokens: Any, pos: Any, seq_id: Any, logits: Any) -> bool:
        theirs: str | None = None
        mine: str | None = None
        try:
            getattr(self.reference, verb)(tokens, pos=pos, seq_id=seq_id, logits=logits)
        except OracleError as error:
            theirs = str(error)
        try:
            getattr(self.ours, verb)(pyggmlkv.Batch(tokens, pos=pos, seq_id=seq_id, logits=logits))
        except PyggmlkvError as error:
            mine = f"{type(error).__name__}: {error}"
        if (theirs is None) != (mine is None):
            self.comparison.differ(f"{verb}: the reference says {theirs or 'ok'}, we say {mine or 'ok'}")
        return theirs is not None or mine is not None

    def greedy(self, n_steps: int, token: int, seq_id: int = 0) -> list[int]:
        """Decodes `n_steps` single tokens, each the reference's likeliest next; compares every row."""
        out = [token]
        for _ in range(n_steps):
            rows = self.decode([out[-1]], seq_id=seq_id, logits="last")
            if rows is None:
                break
            out.append(int(rows[-1].argmax()))
        return out[1:]

    def memory(self, verb: str, *arguments: int | None) -> Any:
        """One memory operation on both sides; what the reference returned."""
        theirs = getattr(self.reference.memory, verb)(*arguments)
        try:
            mine = getattr(self.ours.memory, verb)(*arguments)
        except PyggmlkvError as error:
            self.comparison.differ(f"{verb}{arguments}: the reference says {theirs}, we raise {error}")
            return theirs
        if mine != theirs:
            self.comparison.differ(f"{verb}{arguments}: the reference says {theirs}, we say {mine}")
        return theirs

    def compare_positions(self, n_seq: int) -> None:
        """Smallest and largest position of each sequence."""
        for seq_id in range(n_seq):
            self.memory("seq_pos_min", seq_id)
            self.memory("seq_pos_max", seq_id)

    def compare_state(self, seq_ids: Sequence[int | None] = (None, 0)) -> None:
        """Saved states, whole (None) and by sequence, byte for byte."""
        self.reference.memory.update()  # ours does so before it saves
        for seq_id in seq_ids:
            mine = self.ours.state_get(seq_id)
            theirs = self.reference.state_get(seq_id)
            found, equal = self.comparison, mine == theirs
            found.state_bytes_equal = equal and found.state_bytes_equal is not False
            if not equal:
                whose = "all" if seq_id is None else f"sequence {seq_id}"
                what = f"state of {whose}: {len(mine)} bytes, the reference has {len(theirs)}"
                found.first_difference = found.first_difference or what

    def close(self) -> None:
        self.ours.close()
        self.reference.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
