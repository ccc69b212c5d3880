"""What a step may depend on: who holds which positions, and what kind of memory it is.

Reads both sides, which agree whenever a step is drawn. Knows the package's memories by their parts: cells of attention
parts (`streams`), state cells of recurrent ones (`cells`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

import pyggmlkv
from pyggmlkv.batch import BatchAllocator, BatchLimits
from tests.side_by_side import Pair

from .actions import Tokens
from .kinds import Kind


def our_parts(memory: Any, kind: str) -> list[Any]:
    """The package's parts in the oracle's order: base before window, attention before recurrent."""
    if kind in ("kv", "recurrent"):
        return [memory]
    if kind == "iswa":
        return list(memory.parts)
    return [*our_parts(memory.attn, "iswa" if kind == "hybrid-iswa" else "kv"), memory.recr]


class View:
    """Facts about a pair of contexts, as they are now."""

    def __init__(self, pair: Pair, kind: Kind) -> None:
        self.pair, self.kind = pair, kind
        self.last_batch: Tokens | None = None
        self.memory: Any = pair.ours.memory
        self.memory_kind = pair.memory_kind
        self.parts = our_parts(self.memory, self.memory_kind)
        self.reference_parts = pair.reference.memory.parts
        self.n_seq = pair.setup.n_seq_max
        self.n_pos = 4 if pair.models.reference.has_mrope else 1
        self.has_state = self.reference_parts[-1].kind == "recurrent"
        self.has_attention = self.memory_kind != "recurrent"
        self.has_window = "iswa" in self.memory_kind
        self.has_streams = self.has_attention and self.reference_parts[0].n_stream > 1

    def last(self, seq_id: int) -> int | None:
        """Highest position of the sequence."""
        found: int | None = self.memory.seq_pos_max(seq_id)
        return found

    def next(self, seq_id: int) -> int:
        last = self.last(seq_id)
        return 0 if last is None else last + 1

    def held(self, seq_id: int) -> tuple[int | None, int | None]:
        return self.memory.seq_pos_min(seq_id), self.memory.seq_pos_max(seq_id)

    def highest(self, seq_id: int) -> int:
        """Highest position in any part, -1 for none."""
        found = [part.seq_pos_max(seq_id) for part in self.parts]
        return max(-1 if pos is None else pos for pos in found)

    def state_pos(self, seq_id: int) -> int | None:
        """Position of the recurrent state, None without one."""
        return self.parts[-1].seq_pos_max(seq_id) if self.has_state else None

    def is_cut_deep(self, seq_id: int) -> bool:
        """The window part has lost the sequence, the full part has not: positions are answered otherwise there."""
        return self.has_window and (
            self.parts[1].seq_pos_max(seq_id) is None and self.parts[0].seq_pos_max(seq_id) is not None
        )

    def is_one_sided(self, seq_id: int) -> bool:
        """Only one of attention and recurrent part has the sequence, as after a copy of a sequence without a state.

        It then has no lowest position here; upstream answers with the attention part's, but has no highest one.
        """
        return (
            len(self.parts) > 1
            and self.has_state
            and ((self.memory.attn.seq_pos_max(seq_id) is None) != (self.state_pos(seq_id) is None))
        )

    def shares_cells(self, a: int, b: int) -> bool:
        """Whether an attention cell belongs to both sequences."""
        return not self.has_streams and any(
            bool((cells.seq_has(a) & cells.seq_has(b)).any())
            for part, info in zip(self.parts, self.reference_parts, strict=True)
            if info.kind != "recurrent"
            for cells in part.streams.cells
        )

    # the one place where two preparations differ

    def reuses_cells_late(self, arguments: dict[str, Any]) -> bool:
        """Whether a ubatch after the first takes a used cell, or the window part might run out of cells.

        Upstream's `prepare` leaves purged what a later ubatch purges, so that earlier ubatches miss it, and leaves it
        purged when there is no slot; here everything is put back. A window part with as many usable cells as the batch
        has tokens never refuses.
        """
        if not self.has_window:
            return False
        swa, ctx = self.parts[1], self.pair.ours
        hp = self.pair.models.ours.hparams
        allocator = BatchAllocator(self.n_pos)
        limits = BatchLimits(hp.n_vocab, hp.n_embd_inp, 256 if not self.has_streams else self.n_seq)
        allocator.init(pyggmlkv.Batch(**arguments), limits, self.memory)
        per_stream = np.bincount([s[0] if self.has_streams else 0 for s in arguments["seq_id"]])
        for stream, n_tokens in enumerate(per_stream):
            if n_tokens > self.n_usable(swa, stream):
                return True
        try:
            plan = self.memory.plan(allocator, ctx.cparams.n_ubatch, False)
        except pyggmlkv.errors.NoSlotError:
            return False
        seen: set[tuple[int, int]] = set()
        for i, step in enumerate(plan):
            slot = step.swa.slot
            taken = [(s, int(c)) for s, row in zip(slot.strm, slot.idxs, strict=True) for c in row]
            if i and any(key in seen or swa.streams.cells[key[0]].pos[key[1]] >= 0 for key in taken):
                return True
            seen.update(taken)
        return False

    def n_usable(self, part: Any, stream: int) -> int:
        """Cells of a stream that are empty, or whose only sequence has moved its window past them."""
        cells = part.streams.cells[stream]
        usable = int(np.count_nonzero(cells.pos < 0))
        for seq_id in range(self.n_seq):
            last = cells.seq_pos_max(seq_id)
            if last is not None:
                idxs = cells.find(seq_id, None, max(0, part.streams.window.first_visible(last + 1)))
                usable += int(np.count_nonzero(cells.seq_count()[idxs] == 1))
        return usable
