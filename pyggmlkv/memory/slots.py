"""Where a ubatch goes: slot search, placing with the purge rule, rollback, and the index inputs of a step.

Positions and sequence sets decide alone; K/V tensors are elsewhere.  Upstream: llama-kv-cache.cpp, find_slot,
apply_ubatch, prepare, get_n_kv, set_input_k_idxs, set_input_v_idxs, set_input_k_shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.errors import NoSlotError
from pyggmlkv.memory.cells import Cells, CellsCopy
from pyggmlkv.memory.cells.extents import single_ids
from pyggmlkv.memory.mask import SlidingWindow
from pyggmlkv.memory.seq_ops import CellStreams
from pyggmlkv.types import I32, I64, Bool

N_KV_PAD = 256
"""Least padding of n_kv, cells, so that graphs stay the same over many steps."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotInfo:
    """Cells for the tokens of one ubatch: token i of stream `strm[s]` goes to `idxs[s, i]`.

    `idxs` is (n_stream, n_tokens_per_stream) int32; `s0`, `s1` are the lowest and highest stream used.
    Upstream: llama_kv_cache::slot_info.
    """

    s0: int
    s1: int
    strm: tuple[int, ...]
    idxs: I32

    @property
    def n_stream(self) -> int:
        return len(self.strm)

    @property
    def size(self) -> int:
        """Tokens per stream."""
        return int(self.idxs.shape[1])

    @property
    def head(self) -> int:
        """First cell of the first stream."""
        return int(self.idxs[0, 0])

    @property
    def is_contiguous(self) -> bool:
        """Whether the cells are one ascending run in a single stream."""
        row = self.idxs[0]
        return self.n_stream == 1 and bool((row == row[0] + np.arange(row.size, dtype=np.int32)).all())


class Journal:
    """What `apply_ubatch` changed, so that it can be undone exactly, heads included."""

    __slots__ = ("_cells", "_heads", "_streams")

    def __init__(self, streams: CellStreams) -> None:
        self._streams = streams
        self._heads = streams.heads.copy()
        self._cells: list[tuple[int, CellsCopy]] = []

    def note(self, stream: int, idxs: I32 | I64) -> None:
        """Remembers cells that are about to change."""
        self._cells.append((stream, self._streams.cells[stream].copy(idxs)))

    def undo(self) -> None:
        """Puts everything back, the last change first."""
        for stream, copy in reversed(self._cells):
            self._streams.cells[stream].restore(copy)
        self._streams.heads[:] = self._heads
        self._cells.clear()


def find_slot(streams: CellStreams, ubatch: UBatch, cont: bool = False) -> SlotInfo | None:
    """Cells for the ubatch, or None. Changes nothing.

    With `cont` the tokens of a stream take one run of cells, else the next usable ones in circular order from
    the head. Usable is an empty cell, or one whose only sequence has moved its window past it.
    """
    if streams.n_stream == 1:
        stream = streams.seq_to_stream[int(ubatch.seq_id_unq[0])]
        cells = _search(streams, stream, ubatch.n_tokens, cont)
        return None if cells is None else SlotInfo(stream, stream, (stream,), cells[None])
    n_tokens = ubatch.n_tokens // ubatch.n_seqs_unq
    strm = tuple(streams.seq_to_stream[s] for s in ubatch.seq_id_unq.tolist())
    rows: list[I32] = []
    for stream in strm:
        cells = _search(streams, stream, n_tokens, cont)
        if cells is None:
            return None
        rows.append(cells)
    return SlotInfo(min(strm), max(strm), strm, np.stack(rows))


def _search(streams: CellStreams, stream: int, n: int, cont: bool) -> I32 | None:
    cells, head = streams.cells[stream], streams.heads[stream]
    if n > cells.size:
        return None
    if head > cells.n_used + 2 * n:
        head = 0
    free = cells.pos[head : head + n]
    if free.size == n and (int(free[0]) < 0 if n == 1 else (free < 0).all()):
        return np.arange(head, head + n, dtype=np.int32)
    window = streams.reused_window
    if n == 1 and _is_past(cells, head, window):
        return np.array([head], np.int32)
    usable = _Usable(cells, window)
    return _search_run(usable, head, n) if cont else _search_cells(usable, head, n)


def _is_past(cells: Cells, cell: int, window: SlidingWindow) -> bool:
    """Whether the window of a used cell's only sequence has moved past it."""
    if window.swa_type == "none" or cell == cells.size or len(ids := cells.seq_ids(cell)) != 1:
        return False
    last = cells.seq_pos_max(ids[0])
    return last is not None and int(cells.pos[cell]) < window.first_visible(last + 1)


def _search_cells(usable: _Usable, head: int, n: int) -> I32 | None:
    """The first n usable cells in circular order from `head`; looks no further than it must."""
    size = usable.cells.size
    found: list[I64] = []
    missing, chunk = n, max(64, 2 * n)
    for begin, end in ((head, size), (0, head)):
        while begin < end and missing:
            stop = min(end, begin + chunk)
            hits = (np.flatnonzero(usable.mask(begin, stop)) + begin)[:missing]
            found.append(hits)
            missing -= hits.size
            begin, chunk = stop, chunk * 4
    return None if missing else np.concatenate(found).astype(np.int32)


def _search_run(usable: _Usable, head: int, n: int) -> I32 | None:
    """The first run of n usable cells that starts at or after `head`, then one that starts before it."""
    size = usable.cells.size
    ends = np.r_[np.flatnonzero(~usable.mask(0, size)), size]
    starts = np.r_[0, ends[:-1] + 1]
    for at in (head, 0):
        # a run that `at` cuts in two counts from `at`
        begins = np.maximum(starts, at)
        fits = np.flatnonzero(ends - begins >= n)
        if fits.size:
            begin = int(begins[fits[0]])
            return np.arange(begin, begin + n, dtype=np.int32)
    return None


class _Usable:
    """Which cells a new token may take. Limits per sequence are worked out once, when first needed."""

    __slots__ = ("_first", "cells", "window")

    def __init__(self, cells: Cells, window: SlidingWindow) -> None:
        self.cells = cells
        self.window = window
        self._first: I32 | None = None

    def mask(self, begin: int, end: int) -> Bool:
        pos = self.cells.pos[begin:end]
        empty: Bool = pos < 0
        if self.window.swa_type == "none":
            return empty
        words = self.cells.seq_words(begin, end)
        alone = np.bitwise_count(words).sum(axis=0) == 1
        ids = single_ids(words)
        ids[~alone] = 0
        empty |= alone & (pos < self._first_visible()[ids])
        return empty

    def _first_visible(self) -> I32:
        """(n_seq_max,): the lowest position that a sequence's next token will see."""
        if self._first is None:
            cells = self.cells
            self._first = np.full(cells.n_seq_max, -1, np.int32)
            for s in cells.seqs():
                if (last := cells.seq_pos_max(s)) is not None:
                    self._first[s] = self.window.first_visible(last + 1)
        return self._first


def apply_ubatch(
    streams: CellStreams, slot: SlotInfo, ubatch: UBatch, journal: Journal | None = None
) -> None:
    """Places the ubatch in its slot and moves the heads behind it.

    Where a cell of a sequence is overwritten, all its cells with positions up to the overwritten one go as
    well: what a sequence holds stays free of holes.
    """
    for s, stream in enumerate(slot.strm):
        cells, idxs = streams.cells[stream], slot.idxs[s]
        if journal is not None:
            journal.note(stream, idxs)
        for seq_id, pos in cells.place(idxs, ubatch, s * slot.size).items():
            lowest = cells.seq_pos_min(seq_id)
            if lowest is not None and lowest <= pos:
                if journal is not None:
                    journal.note(stream, cells.find(seq_id, None, pos + 1))
                cells.seq_rm(seq_id, None, pos + 1)
        streams.heads[stream] = int(idxs[-1]) + 1


def commit_ubatch(streams: CellStreams, ubatch: UBatch, journal: Journal | None = None) -> None:
    """Where cells behind the window are pruned, empties those that no query after the ubatch sees.

    Upstream: older llama_kv_cache_unified_iswa::commit.
    """
    if streams.spec.forget == "reuse" or streams.window.swa_type == "none":
        return
    for seq_id in ubatch.seq_id_unq.tolist():
        mine = ubatch.pos[0, (ubatch.seq_mask[:, seq_id >> 6] >> np.uint64(seq_id & 63)) & np.uint64(1) != 0]
        first, last = int(mine.min()), int(mine.max())
        if journal is not None:
            stop = max(0, streams.window.first_visible(last))
            journal.note(streams.seq_to_stream[seq_id], streams.of(seq_id).find(seq_id, None, stop))
        streams.prune(seq_id, first, last)


def prepare(streams: CellStreams, ubatches: Sequence[UBatch]) -> list[SlotInfo]:
    """Slots for all ubatches, each found with the ones before it in place. Cells and heads end as they began.

    Raises: NoSlotError, with the ubatch that does not fit and the cells free by then.
    Differs: upstream leaves cells purged meanwhile removed, and everything when a later ubatch does not fit.
    """
    slots: list[SlotInfo] = []
    journals: list[Journal] = []
    try:
        for i, ubatch in enumerate(ubatches):
            slot = find_slot(streams, ubatch)
            if slot is None:
                raise _no_slot(streams, ubatch, i)
            slots.append(slot)
            if i + 1 < len(ubatches):
                journals.append(Journal(streams))
                apply_ubatch(streams, slot, ubatch, journals[-1])
                commit_ubatch(streams, ubatch, journals[-1])
    finally:
        for journal in reversed(journals):
            journal.undo()
    return slots


def _no_slot(streams: CellStreams, ubatch: UBatch, index: int) -> NoSlotError:
    n = ubatch.n_tokens if streams.n_stream == 1 else ubatch.n_tokens // ubatch.n_seqs_unq
    used = [streams.cells[t].n_used for t in {streams.seq_to_stream[s] for s in ubatch.seq_id_unq.tolist()}]
    name, size, free = streams.spec.name, streams.size, streams.size - max(used)
    return NoSlotError(
        f"{name}: no slot for ubatch {index}: {n} cells needed, {free} of {size} free in its fullest stream; "
        f"remove or shorten sequences, or make the cache larger",
        part=name,
        ubatch=index,
        needed=n,
        free=free,
        size=size,
    )


def n_kv(streams: CellStreams, slot: SlotInfo, n_pad: int = 1) -> int:
    """Cells that the graph reads per stream: past the last used one of the slot's streams, padded.

    Upstream: get_n_kv.
    """
    pad = max(n_pad, N_KV_PAD)
    used = max(streams.cells[stream].used_max_p1 for stream in slot.strm)
    return min(streams.size, max(pad, -(-used // pad) * pad))


def fill_k_idxs(slot: SlotInfo, kv_size: int, out: I64) -> None:
    """Rows that K is written to, over all streams: `out` (n_tokens,) int64.  Upstream: set_input_k_idxs."""
    if slot.n_stream == 1:
        np.add(slot.idxs[0], np.int64(slot.strm[0] * kv_size), out=out)
        return
    offset = np.array(slot.strm, np.int64) * kv_size
    np.add(slot.idxs, offset[:, None], out=out.reshape(slot.idxs.shape))


def fill_v_idxs(slot: SlotInfo, kv_size: int, n_embd_v: int, out: I64) -> None:
    """Elements that a transposed V is written to: `out` (n_tokens * n_embd_v,) int64, token after token.

    `n_embd_v` is the padded V row, elements. A V that is not transposed takes `fill_k_idxs`.
    Upstream: set_input_v_idxs.
    """
    offset = np.array(slot.strm, np.int64) * (kv_size * n_embd_v)
    first = slot.idxs + offset[:, None]
    rows = np.arange(n_embd_v, dtype=np.int64) * kv_size
    np.add(first[:, :, None], rows, out=out.reshape(*slot.idxs.shape, n_embd_v))


def fill_k_shift(streams: CellStreams, out: I32) -> None:
    """Pending shift of every cell, positions: `out` (n_stream * kv_size,).  Upstream: set_input_k_shift."""
    for cells, row in zip(streams.cells, out.reshape(streams.n_stream, -1), strict=True):
        row[:] = cells.shift
