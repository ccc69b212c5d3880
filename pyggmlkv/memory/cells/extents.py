"""How many cells each sequence has, and its lowest and highest position, kept up to date as cells change.

Adding is O(1). Removing an end marks it unknown; `Cells` then finds it again by one vectorised scan. A window
that forgets its oldest cell with every token would scan every time: there a scan leaves a queue of the next.
Upstream: llama-kv-cells.h, seq_pos (a map from position to count per sequence).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyggmlkv.types import I32, I64, U64

QUEUE_LEN = 1024
"""Cells a queue of the lowest positions holds: one scan serves that many removals."""
POS_MAX = np.iinfo(np.int32).max


class LowestCells:
    """The lowest cells of a sequence at the time of a scan, ascending; `low` is the lowest added since."""

    __slots__ = ("cells", "cursor", "low", "pos")

    def __init__(self, pos: I32, cells: I64) -> None:
        near = pos[cells]
        if near.size > QUEUE_LEN:
            lowest = np.argpartition(near, QUEUE_LEN)[:QUEUE_LEN]
            cells, near = cells[lowest], near[lowest]
        order = np.argsort(near, kind="stable")
        self.pos: list[int] = near[order].tolist()
        self.cells: list[int] = cells[order].tolist()
        self.cursor = 0
        self.low = POS_MAX

    def lowest(self, pos: I32, row: U64, bit: int) -> int | None:
        """Lowest position of the sequence (`bit` of `row`) now, None where only a new scan can tell."""
        for k in range(self.cursor, len(self.pos)):
            cell = self.cells[k]
            if pos[cell] == self.pos[k] and int(row[cell]) & bit:
                self.cursor = k
                return self.pos[k] if self.pos[k] <= self.low else None
        return None

    def copy(self) -> LowestCells:
        """Shares the two lists, which never change."""
        other = object.__new__(LowestCells)
        other.pos, other.cells, other.cursor, other.low = self.pos, self.cells, self.cursor, self.low
        return other


class SeqExtents:
    """`count[s]` cells of sequence s; `lo[s]`, `hi[s]` its lowest and highest position, None if unknown."""

    __slots__ = ("count", "hi", "lo", "queue", "slides")

    def __init__(self, n_seq_max: int) -> None:
        self.count = [0] * n_seq_max
        self.lo: list[int | None] = [None] * n_seq_max
        self.hi: list[int | None] = [None] * n_seq_max
        self.queue: dict[int, LowestCells] = {}
        self.slides: set[int] = set()

    def copy(self) -> SeqExtents:
        other = object.__new__(SeqExtents)
        other.count, other.lo, other.hi = self.count.copy(), self.lo.copy(), self.hi.copy()
        other.queue = {s: queue.copy() for s, queue in self.queue.items()} if self.queue else {}
        other.slides = set(self.slides)
        return other

    def added(self, seq_id: int, n: int, pos_min: int, pos_max: int) -> None:
        """`n` cells joined the sequence, with positions from `pos_min` to `pos_max` (both included)."""
        if self.count[seq_id] == 0:
            self.lo[seq_id], self.hi[seq_id] = pos_min, pos_max
        else:
            lo, hi = self.lo[seq_id], self.hi[seq_id]
            if lo is not None and pos_min < lo:
                self.lo[seq_id] = pos_min
            if hi is not None and pos_max > hi:
                self.hi[seq_id] = pos_max
        self.count[seq_id] += n
        if self.queue and seq_id in self.queue:
            queue = self.queue[seq_id]
            queue.low = min(queue.low, pos_min)

    def removed(self, seq_id: int, n: int, pos_min: int, pos_max: int, *, slides: bool = False) -> None:
        """`n` cells left the sequence; their positions lie within `pos_min` .. `pos_max`.

        `slides` says that more of the lowest cells are likely to follow, one at a time.
        """
        self.count[seq_id] -= n
        if self.count[seq_id] == 0:
            self.forget(seq_id)
            return
        lo, hi = self.lo[seq_id], self.hi[seq_id]
        if lo is not None and pos_min <= lo:
            self.lo[seq_id] = None
            if slides:
                self.slides.add(seq_id)
        if hi is not None and pos_max >= hi:
            self.hi[seq_id] = None

    def moved(self, seq_id: int, delta: int | None) -> None:
        """All positions of the sequence changed by `delta`, or by amounts unknown (None)."""
        self.queue.pop(seq_id, None)
        lo, hi = self.lo[seq_id], self.hi[seq_id]
        known = delta is not None and lo is not None and hi is not None
        self.lo[seq_id] = lo + delta if known else None  # type: ignore[operator]
        self.hi[seq_id] = hi + delta if known else None  # type: ignore[operator]

    def forget(self, seq_id: int) -> None:
        """The sequence has no cells any more."""
        self.count[seq_id] = 0
        self.lo[seq_id] = self.hi[seq_id] = None
        self.queue.pop(seq_id, None)
        self.slides.discard(seq_id)


def ids_of(words: U64) -> list[int]:
    """Sequence ids in a bitset (n_words,), ascending."""
    ids: list[int] = []
    for k, word in enumerate(words.tolist()):
        while word:
            low = word & -word
            ids.append(64 * k + low.bit_length() - 1)
            word ^= low
    return ids


def single_ids(words: U64) -> I64:
    """Ids of cells (n_words, n) that belong to exactly one sequence; undefined for any other cell."""
    ids: I64 = np.bitwise_count(words[0] - np.uint64(1)).astype(np.int64)
    for k in range(1, len(words)):
        row = words[k]
        np.copyto(ids, np.bitwise_count(row - np.uint64(1)).astype(np.int64) + 64 * k, where=row != 0)
    return ids


def per_sequence(words: U64, pos: I32) -> Iterator[tuple[int, int, int, int]]:
    """Yields (seq_id, n, pos_min, pos_max) for every sequence in cells with sets `words` (n_words, n)."""
    if pos.size == 0:
        return
    n_ids = np.bitwise_count(words).sum(axis=0) if len(words) > 1 else np.bitwise_count(words[0])
    if (n_ids == 1).all():
        ids = single_ids(words)
        first = int(ids[0])
        if (ids == first).all():
            yield first, pos.size, int(pos.min()), int(pos.max())
            return
        n = int(ids.max()) + 1
        count = np.bincount(ids, minlength=n)
        lo, hi = np.full(n, POS_MAX, np.int32), np.full(n, -1, np.int32)
        np.minimum.at(lo, ids, pos)
        np.maximum.at(hi, ids, pos)
        for s in np.flatnonzero(count).tolist():
            yield s, int(count[s]), int(lo[s]), int(hi[s])
        return
    for s in ids_of(np.bitwise_or.reduce(words, axis=1)):
        mine = pos[(words[s >> 6] & np.uint64(1 << (s & 63))) != 0]
        yield s, mine.size, int(mine.min()), int(mine.max())
