"""The cells of one stream: position, pending shift and sequence set of every K/V row, as NumPy arrays.

Every operation is a few vectorised passes over the used prefix; placing one token is a few scalar writes.
Knows nothing of heads, windows, other streams or tensors.  Upstream: llama-kv-cells.h, llama_kv_cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.memory.cells.extents import POS_MAX, LowestCells, SeqExtents, ids_of, per_sequence
from pyggmlkv.types import I32, I64, U64, Bool


@dataclass(frozen=True, slots=True, eq=False)
class CellsCopy:
    """Some cells and every total, as they were: what `Cells.restore` needs to put them back exactly."""

    idxs: I32 | I64
    pos: I32
    shift: I32
    seq: U64
    ext: I32 | None
    has_shift: bool
    n_used: int
    bound: int
    extents: SeqExtents


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


class Cells:
    """`size` cells for sequence ids below `n_seq_max`; with `n_pos_per_embd` > 1 they also keep a 2-D place.

    Read-only views: `pos` (size,) int32, -1 empty; `shift` (size,) int32, positions moved since the last
    K-shift; `seq` (size, n_words) uint64, bit s % 64 of word s // 64; `ext_x`, `ext_y` (size,) int32 or None.
    """

    __slots__ = (
        *("ext_x", "ext_y", "has_shift", "n_seq_max", "n_used", "n_words", "pos", "seq", "shift", "size"),
        *("_bound", "_ext", "_extents", "_pos", "_rows", "_seq", "_shift"),
    )

    def __init__(self, size: int, n_seq_max: int = 1, n_pos_per_embd: int = 1) -> None:
        self.size: Final = size
        self.n_seq_max: Final = n_seq_max
        self.n_words: Final = (n_seq_max + 63) // 64
        self._pos = np.full(size, -1, np.int32)
        self._shift = np.zeros(size, np.int32)
        self._seq = np.zeros((self.n_words, size), np.uint64)
        self._rows = list(self._seq)
        self._ext = np.zeros((2, size), np.int32) if n_pos_per_embd > 1 else None
        self._extents = SeqExtents(n_seq_max)
        self._bound = 0
        self.n_used = 0
        self.has_shift = False
        self.pos: I32 = _read_only(self._pos)
        self.shift: I32 = _read_only(self._shift)
        self.seq: U64 = _read_only(self._seq.T)
        self.ext_x: I32 | None = None if self._ext is None else _read_only(self._ext[0])
        self.ext_y: I32 | None = None if self._ext is None else _read_only(self._ext[1])

    # what is there

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in (self._pos, self._shift, self._seq, self._ext) if a is not None)

    @property
    def used_max_p1(self) -> int:
        """One past the last used cell, 0 when all are empty. Amortised O(1)."""
        n, chunk = self._bound, 256
        while n and self._pos[n - 1] < 0:
            start = max(0, n - chunk)
            used = np.flatnonzero(self._pos[start:n] >= 0)
            n, chunk = (start + int(used[-1]) + 1 if used.size else start), chunk * 4
        self._bound = n
        return n

    def seq_words(self, start: int = 0, stop: int | None = None) -> U64:
        """Sequence sets of cells start .. stop as contiguous rows (n_words, n), read-only."""
        return self.seq[start:stop].T

    def seq_has(self, seq_id: int, stop: int | None = None) -> Bool:
        """Which of the first `stop` cells belong to the sequence."""
        has: Bool = (self._rows[seq_id >> 6][:stop] & np.uint64(1 << (seq_id & 63))) != 0
        return has

    def seq_count(self, stop: int | None = None) -> I64:
        """Sequences per cell (n,)."""
        count: I64 = np.bitwise_count(self._seq[:, :stop]).sum(axis=0, dtype=np.int64)
        return count

    def seq_ids(self, cell: int) -> list[int]:
        """Ids of the sequences that share a cell, ascending."""
        return ids_of(self._seq[:, cell])

    def seqs(self) -> list[int]:
        """Ids of the sequences that have cells, ascending."""
        return [s for s, n in enumerate(self._extents.count) if n]

    def seq_n_cells(self, seq_id: int) -> int:
        """Cells of the sequence. O(1)."""
        return self._extents.count[seq_id]

    def seq_pos_min(self, seq_id: int) -> int | None:
        """Lowest position of the sequence, None without cells. O(1) unless the lowest cell was removed."""
        ext = self._extents
        if ext.lo[seq_id] is None and ext.count[seq_id]:
            ext.lo[seq_id] = self._find_lowest(seq_id)
        return ext.lo[seq_id]

    def seq_pos_max(self, seq_id: int) -> int | None:
        """Highest position of the sequence, None without cells. O(1) unless the highest cell was removed."""
        ext = self._extents
        if ext.hi[seq_id] is None and ext.count[seq_id]:
            n = self.used_max_p1
            ext.hi[seq_id] = int(np.where(self.seq_has(seq_id, n), self._pos[:n], -1).max())
        return ext.hi[seq_id]

    def find(self, seq_id: int | None, p0: int | None = None, p1: int | None = None) -> I64:
        """Cells of the sequence (None: any) with a position in [p0, p1), ascending by index."""
        return np.flatnonzero(self._select(seq_id, p0, p1))

    def _find_lowest(self, seq_id: int) -> int:
        ext, row, bit = self._extents, self._rows[seq_id >> 6], 1 << (seq_id & 63)
        queue = ext.queue.get(seq_id)
        if queue is not None:
            low = queue.lowest(self._pos, row, bit)
            if low is not None:
                return low
            del ext.queue[seq_id]
        n = self.used_max_p1
        has = self.seq_has(seq_id, n)
        if seq_id not in ext.slides:
            return int(np.where(has, self._pos[:n], POS_MAX).min())
        ext.queue[seq_id] = LowestCells(self._pos, np.flatnonzero(has))
        return ext.queue[seq_id].pos[0]

    def _select(self, seq_id: int | None, p0: int | None, p1: int | None) -> Bool:
        """Mask over the used prefix of cells of the sequence (None: any used cell) within [p0, p1)."""
        n = self.used_max_p1
        pos = self._pos[:n]
        lo = 0 if p0 is None else max(p0, 0)
        if seq_id is None:
            hit = pos >= lo
        else:
            hit = self.seq_has(seq_id, n)
            if lo > 0:
                hit &= pos >= lo
        if p1 is not None and p1 <= POS_MAX:
            hit &= pos < p1
        return hit

    # placing and removing

    def place(self, idxs: I32 | I64, ubatch: UBatch, start: int = 0) -> dict[int, int]:
        """Puts tokens start .. start + len(idxs) of the ubatch into the cells `idxs` (distinct).

        Returns, for each sequence that lost an overwritten cell, the highest position lost.
        Upstream: llama-kv-cache.cpp, apply_ubatch (without the purge and the head).
        """
        n = len(idxs)
        if n == 1 and self._ext is None and len(ubatch.seq_id_flat) == ubatch.n_tokens:
            return self._place_one(int(idxs[0]), int(ubatch.pos[0, start]), int(ubatch.seq_id_flat[start]))
        taken = idxs[self._pos[idxs] >= 0]
        lost = self._drop(taken) if taken.size else {}
        pos, words = ubatch.pos[:, start : start + n], ubatch.seq_mask[start : start + n].T
        self.put(idxs, pos[0], words, pos[[2, 1]] if self._ext is not None and ubatch.is_pos_2d else None)
        return lost

    def _place_one(self, cell: int, pos: int, seq_id: int) -> dict[int, int]:
        ext, lost = self._extents, {}
        if (old := int(self._pos[cell])) >= 0:
            for s in self.seq_ids(cell):
                lost[s] = old
                ext.removed(s, 1, old, old, slides=True)
            for row in self._rows:
                row[cell] = 0
            self._shift[cell] = 0
        else:
            self.n_used += 1
        self._pos[cell] = pos
        self._rows[seq_id >> 6][cell] = 1 << (seq_id & 63)
        ext.added(seq_id, 1, pos, pos)
        self._bound = max(self._bound, cell + 1)
        return lost

    def put(self, idxs: I32 | I64, pos: I32, seq: U64, ext: I32 | None = None) -> None:
        """Fills empty, distinct cells: `pos` (n,), sequence sets `seq` (n_words, n), `ext` (2, n) x and y."""
        if len(idxs) == 0:
            return
        self._pos[idxs] = pos
        for row, word in zip(self._rows, seq, strict=False):
            row[idxs] = word
        if ext is not None and self._ext is not None:
            self._ext[:, idxs] = ext
        self.n_used += len(idxs)
        self._bound = max(self._bound, int(idxs.max()) + 1)
        for s, n, lo, hi in per_sequence(seq, pos):
            self._extents.added(s, n, lo, hi)

    def put_from(self, other: Cells, idxs: I32 | I64, seq_id: int) -> None:
        """Fills empty cells with those of another stream at the same indices, owned by `seq_id` alone."""
        seq = np.zeros((self.n_words, len(idxs)), np.uint64)
        seq[seq_id >> 6] = 1 << (seq_id & 63)
        self.put(idxs, other._pos[idxs], seq, None if other._ext is None else other._ext[:, idxs])
        self._shift[idxs] = other._shift[idxs]
        self.has_shift = self.has_shift or bool(self._shift[idxs].any())

    def remove(self, idxs: I32 | I64) -> None:
        """Empties the given used, distinct cells whatever their sequences."""
        if len(idxs):
            self._drop(idxs)

    def _drop(self, idxs: I32 | I64) -> dict[int, int]:
        lost: dict[int, int] = {}
        for s, n, lo, hi in per_sequence(self._seq[:, idxs], self._pos[idxs]):
            self._extents.removed(s, n, lo, hi, slides=True)
            lost[s] = hi
        self._pos[idxs] = -1
        self._shift[idxs] = 0
        self._seq[:, idxs] = 0
        if self._ext is not None:
            self._ext[:, idxs] = 0
        self.n_used -= len(idxs)
        return lost

    def clear(self) -> None:
        """Empties every cell."""
        self._pos.fill(-1)
        self._shift.fill(0)
        self._seq.fill(0)
        if self._ext is not None:
            self._ext.fill(0)
        self._extents = SeqExtents(self.n_seq_max)
        self._bound = self.n_used = 0
        self.has_shift = False

    # ranges of one sequence; each returns the first cell that became empty, or None

    def seq_rm(self, seq_id: int | None, p0: int | None = None, p1: int | None = None) -> int | None:
        """Takes the sequence (None: all) off its cells in [p0, p1); a cell left without one is emptied."""
        hit = self._select(seq_id, p0, p1)
        n_hit = int(np.count_nonzero(hit))
        if n_hit == 0:
            return None
        if seq_id is None:
            for s in self._ids_in(hit):
                self._forget_range(s, int(np.count_nonzero(hit & self.seq_has(s, hit.size))), p0, p1)
            return self._empty(hit)
        row = self._rows[seq_id >> 6][: hit.size]
        row ^= hit.astype(np.uint64) << np.uint64(seq_id & 63)
        self._forget_range(seq_id, n_hit, p0, p1)
        for other in self._rows:
            hit &= other[: hit.size] == 0
        return self._empty(hit, no_seq=True)

    def seq_cp(self, src: int, dst: int, p0: int | None = None, p1: int | None = None) -> None:
        """Adds sequence `dst` to every cell of `src` in [p0, p1)."""
        if src == dst:
            return
        hit = self._select(src, p0, p1)
        row = self._rows[dst >> 6][: hit.size]
        n_dst = self._extents.count[dst]
        if n_dst:
            hit &= ~self.seq_has(dst, hit.size)
        n_new = int(np.count_nonzero(hit))
        if n_new == 0:
            return
        row |= hit.astype(np.uint64) << np.uint64(dst & 63)
        ext = self._extents
        ext.moved(dst, None)
        ext.count[dst] += n_new
        if n_dst == 0 and n_new == ext.count[src]:
            ext.lo[dst], ext.hi[dst] = ext.lo[src], ext.hi[src]

    def seq_keep(self, seq_id: int) -> int | None:
        """Empties every cell that the sequence is not in, and takes all other sequences off its cells."""
        n, ext = self.used_max_p1, self._extents
        mine = self.seq_has(seq_id, n)
        self._seq[:, :n] = 0
        self._rows[seq_id >> 6][:n] = mine.astype(np.uint64) << np.uint64(seq_id & 63)
        for s in range(self.n_seq_max):
            if s != seq_id and ext.count[s]:
                ext.forget(s)
        np.logical_not(mine, out=mine)
        mine &= self._pos[:n] >= 0
        return self._empty(mine, no_seq=True)

    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> int | None:
        """Moves positions in [p0, p1) and their pending shift by `delta`; cells below 0 are emptied."""
        hit = self._select(seq_id, p0, p1)
        n_hit = int(np.count_nonzero(hit))
        if n_hit == 0:
            return None
        self.has_shift = True
        step = np.multiply(hit, np.int32(delta), dtype=np.int32)
        self._pos[: hit.size] += step
        self._shift[: hit.size] += step
        below = hit & (self._pos[: hit.size] < 0) if delta < 0 else np.zeros(0, np.bool_)
        if below.any():
            self._note_moved(hit, None)
            dead = np.flatnonzero(below)
            for s in ids_of(np.bitwise_or.reduce(self._seq[:, dead], axis=1)):
                n_dead = int(np.count_nonzero(self.seq_has(s)[dead]))
                self._extents.removed(s, n_dead, 0, POS_MAX)
            return self._empty(below)
        self._note_moved(hit, delta if n_hit == self._extents.count[seq_id] else None)
        return None

    def seq_div(self, seq_id: int, p0: int | None, p1: int | None, d: int, *, turn: int = 1) -> None:
        """Divides positions in [p0, p1) by `d`; their pending shift grows by `turn` times the change."""
        hit = self._select(seq_id, p0, p1)
        if not hit.any():
            return
        self.has_shift = True
        pos = self._pos[: hit.size]
        step = (pos // np.int32(d) - pos) * hit
        pos += step
        self._shift[: hit.size] += np.int32(turn) * step
        self._note_moved(hit, None)

    def reset_shift(self, begin: int = 0, end: int | None = None) -> None:
        """Forgets pending shifts of cells begin .. end: the K-shift was applied to them."""
        if self.has_shift:
            self._shift[begin:end] = 0
            self.has_shift = end is not None and bool(self._shift.any())

    def _note_moved(self, hit: Bool, delta: int | None) -> None:
        """All sequences in the `hit` cells moved; `delta` holds for a lone one that moved as a whole."""
        ids = self._ids_in(hit)
        for s in ids:
            self._extents.moved(s, delta if len(ids) == 1 else None)

    def _forget_range(self, seq_id: int, n: int, p0: int | None, p1: int | None) -> None:
        hi = POS_MAX if p1 is None else p1 - 1
        self._extents.removed(seq_id, n, 0 if p0 is None else p0, hi)

    def _ids_in(self, hit: Bool) -> list[int]:
        """Sequences with a cell among the marked ones."""
        n = hit.size
        ids = ids_of(np.array([np.bitwise_or.reduce(row[:n]) for row in self._rows]))
        if len(ids) <= 4:
            return [s for s in ids if (hit & self.seq_has(s, n)).any()]
        keep = np.negative(hit.astype(np.uint64))
        return ids_of(np.array([np.bitwise_or.reduce(row[:n] & keep) for row in self._rows]))

    def _empty(self, gone: Bool, *, no_seq: bool = False) -> int | None:
        """Empties the marked cells (`no_seq`: no sets are left there). Totals per sequence: the caller's."""
        n, n_gone = gone.size, int(np.count_nonzero(gone))
        if n_gone == 0:
            return None
        np.copyto(self._pos[:n], -1, where=gone)
        if self.has_shift:
            np.copyto(self._shift[:n], 0, where=gone)
        for row in () if no_seq else self._rows:
            np.copyto(row[:n], 0, where=gone)
        if self._ext is not None:
            np.copyto(self._ext[:, :n], 0, where=gone)
        self.n_used -= n_gone
        return int(gone.argmax())

    # transactions and defrag

    def copy(self, idxs: I32 | I64) -> CellsCopy:
        """The given cells and all totals, for `restore`."""
        ext = None if self._ext is None else self._ext[:, idxs]
        totals = self.has_shift, self.n_used, self._bound, self._extents.copy()
        return CellsCopy(idxs, self._pos[idxs], self._shift[idxs], self._seq[:, idxs], ext, *totals)

    def restore(self, copy: CellsCopy) -> None:
        """Puts a copy back; exact when other cells that changed since were put back before."""
        self._pos[copy.idxs] = copy.pos
        self._shift[copy.idxs] = copy.shift
        self._seq[:, copy.idxs] = copy.seq
        if self._ext is not None and copy.ext is not None:
            self._ext[:, copy.idxs] = copy.ext
        self.has_shift, self.n_used, self._bound = copy.has_shift, copy.n_used, copy.bound
        self._extents = copy.extents.copy()

    def move(self, src: I32 | I64, dst: I32 | I64) -> None:
        """Moves used cells `src` (n,) onto empty cells `dst` (n,), with shift, sequences and 2-D place."""
        self._pos[dst], self._pos[src] = self._pos[src], -1
        self._shift[dst], self._shift[src] = self._shift[src], 0
        self._seq[:, dst], self._seq[:, src] = self._seq[:, src], 0
        if self._ext is not None:
            self._ext[:, dst], self._ext[:, src] = self._ext[:, src], 0
        self._extents.queue.clear()
        if len(dst):
            self._bound = max(self._bound, int(dst.max()) + 1)
