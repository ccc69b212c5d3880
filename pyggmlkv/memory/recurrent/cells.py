"""State cells of recurrent memory: which cell holds which sequences, and where states are to be copied from.

A sequence has at most one cell, its tail; sequences share a cell until one of them decodes. Pure NumPy: the
r and s tensors live elsewhere and follow what `s_copy`, `head`, `n` and `rs_z` say. The slot search is in
`recurrent_slots.py`.  Upstream: llama-memory-recurrent.cpp, llama_memory_recurrent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.errors import CacheError, SequenceError
from pyggmlkv.memory.recurrent.slots import (
    POS_END,
    RecurrentSlot,
    RecurrentSnapshot,
    SlotRequest,
    place,
    range_of,
    request_from_ubatch,
)
from pyggmlkv.types import I32, U64

OptPos: TypeAlias = int | None


class RecurrentCells:
    """Bookkeeping of `size` state cells for sequence ids 0 .. n_seq_max-1.

    `n_rs_seq` is the number of rollback snapshots a cell keeps: plane 0 of the r and s tensors holds the
    newest state, plane j the one j tokens earlier, at row `j * size + cell`.

    Differs: with `strict` (the default) an operation that a recurrent state cannot follow is refused instead
    of being ignored: removing or copying a part of a sequence, rolling back to a snapshot never written, or
    rolling back a state that another sequence shares. `strict=False` answers such calls as upstream does.
    """

    def __init__(
        self, size: int, n_seq_max: int | None = None, n_rs_seq: int = 0, *, strict: bool = True
    ) -> None:
        n_seq_max = size if n_seq_max is None else n_seq_max
        if size < 1 or not 1 <= n_seq_max <= size or n_rs_seq < 0:
            raise CacheError(
                f"recurrent memory: 1 <= n_seq_max <= size and n_rs_seq >= 0 needed, "
                f"{n_seq_max}, {size} and {n_rs_seq} given"
            )
        self.size, self.n_seq_max, self.n_rs_seq, self.strict = size, n_seq_max, n_rs_seq, strict
        self._table: I32 = np.empty((5, size), np.int32)
        self.pos, self.src, self.src0, self.tail, self.rs_idx = self._table
        self.rs_pos: I32 = np.empty((size, n_rs_seq), np.int32)
        n_words = (size + 63) // 64
        self.seq: U64 = np.empty((size, n_words), np.uint64)
        self.bits: U64 = np.zeros((size, n_words), np.uint64)
        ids = np.arange(size)
        self.bits[ids, ids // 64] = np.uint64(1) << (ids % 64).astype(np.uint64)
        self._last_version = 0
        self.clear()

    def clear(self) -> None:
        """Frees every cell. The tensors may keep their bytes: a new sequence reads a zeroed state anyway."""
        self._table[:] = -1
        self.rs_idx[:] = 0
        self.rs_pos[:] = -1
        self.seq[:] = 0
        self.head, self.n, self.used = 0, 0, 0
        self.rs_z: int | None = None
        self.s_copy: I32 = np.empty(0, np.int32)
        self.touch()

    # transactions

    def touch(self) -> None:
        """Marks the cells as changed, so that slots planned before no longer apply."""
        self._last_version += 1
        self.version = self._last_version

    def snapshot(self) -> RecurrentSnapshot:
        """Everything that `restore` needs, copied."""
        arrays = self._table.copy(), self.rs_pos.copy(), self.seq.copy(), self.s_copy
        return RecurrentSnapshot(*arrays, (self.head, self.n, self.used, self.rs_z), self.version)

    def restore(self, snapshot: RecurrentSnapshot) -> None:
        """Puts back a snapshot of these cells, search head included."""
        self._table[:] = snapshot.table
        self.rs_pos[:] = snapshot.rs_pos
        self.seq[:] = snapshot.seq
        self.s_copy = snapshot.s_copy
        self.head, self.n, self.used, self.rs_z = snapshot.numbers
        self.version = snapshot.version

    def prepare(self, ubatches: Iterable[UBatch]) -> list[RecurrentSlot]:
        """A slot for every ubatch, in order; the cells are as before.

        Raises: NoSlotError, SequenceError, BatchError.
        Upstream: prepare. Differs: restores `n` and `rs_z` too.
        """
        before = self.snapshot()
        try:
            return [self.find_slot(ubatch) for ubatch in ubatches]
        finally:
            self.restore(before)

    def apply(self, slot: RecurrentSlot) -> None:
        """Makes a planned slot real; slots of one plan are applied in order.

        Raises: CacheError: the cells have changed since the plan.
        """
        if self.version != slot.before.version:
            raise CacheError("recurrent memory: the cells changed after this slot was planned; plan again")
        self.restore(slot.after)

    def undo(self, slot: RecurrentSlot, computed: bool = False) -> list[int]:
        """Restores what `apply` changed.

        `computed`: a graph has run for this slot, to whatever point; sequences whose state row it may have
        overwritten, bystanders included, are removed and returned.
        """
        self.restore(slot.before)
        lost = [s for cell in slot.overwritten().tolist() for s in self.seq_ids(cell)] if computed else []
        for seq_id in lost:
            self.seq_rm(seq_id)
        return lost

    # slots

    def find_slot(self, ubatch: UBatch) -> RecurrentSlot:
        """Places a ubatch of equally long sequences in contiguous cells, and stages what each is copied from.

        Raises: NoSlotError, SequenceError, BatchError; the cells are then unchanged.  Upstream: find_slot.
        """
        return self._place(request_from_ubatch(ubatch, self.n_seq_max, self.n_rs_seq))

    def _place(self, request: SlotRequest) -> RecurrentSlot:
        before = self.snapshot()
        try:
            place(self, request)
        except BaseException:
            self.restore(before)
            raise
        self.touch()
        return RecurrentSlot(
            self.head, self.n, self.rs_z, self.s_copy, len(request.owner), before, self.snapshot()
        )

    def full_slot(self) -> RecurrentSlot:
        """The worst case for reserving graphs: all cells, nothing changed.  Upstream: init_full."""
        now = self.snapshot()
        return RecurrentSlot(0, self.size, 0, np.arange(self.size, dtype=np.int32), self.size, now, now)

    # sequence operations

    def seq_rm(self, seq_id: int | None, p0: OptPos = None, p1: OptPos = None) -> bool:
        """Removes positions [p0, p1) of a sequence, or everything of all sequences (`seq_id` None or -1).

        True: done, or nothing was there to remove. False: the state cannot forget only these positions, and
        nothing changed; a whole sequence can always go. A cut at the end works as far as snapshots reach.

        Raises: SequenceError.  Upstream: seq_rm. Differs: see the class.
        """
        lo, hi = range_of(p0, p1)
        if seq_id is None or seq_id == -1:
            return self._rm_all(lo, hi)
        cell = int(self.tail[self._checked(seq_id)])
        if cell < 0 or lo >= hi:
            return True
        last = int(self.pos[cell])
        if lo > last:
            return True
        if hi <= last:
            return not self.strict
        if lo > 0:
            return self._roll_back(cell, lo)
        self.tail[seq_id] = -1
        self.seq[cell] &= ~self.bits[seq_id]
        if not self.seq[cell].any():
            self.free(cell)
            self.head = min(self.head, cell)
        self.touch()
        return True

    def _rm_all(self, lo: int, hi: int) -> bool:
        if (lo, hi) == (0, POS_END + 1):
            self._free_cells(np.flatnonzero(self.seq.any(axis=1)))
            return True
        return lo >= hi or self.used == 0 or (self.strict and lo > int(self.pos.max()))

    def _roll_back(self, cell: int, p0: int) -> bool:
        if not self.strict:
            depth = int(self.pos[cell]) - (p0 - 1)
            if depth > self.n_rs_seq:
                return False
            self.rs_idx[cell], self.pos[cell] = depth, p0 - 1
            self.touch()
            return True
        if self.is_shared(cell):
            return False
        planes = self.rs_pos[cell, self.rs_idx[cell] :]
        fit = np.flatnonzero((planes >= 0) & (planes < p0))
        if not len(fit):
            return False
        self.pos[cell] = planes[fit[0]]
        self.rs_idx[cell] += int(fit[0]) + 1
        self.touch()
        return True

    def seq_cp(self, src: int, dst: int, p0: OptPos = None, p1: OptPos = None) -> None:
        """Lets `dst` share the state of `src`, whatever `dst` held before is dropped. No tensor is copied.

        Raises: SequenceError: an id out of range, or a range that covers only a part of the source.
        Upstream: seq_cp. Differs: upstream copies the whole state for any range.
        """
        lo, hi = range_of(p0, p1)
        cell, old = int(self.tail[self._checked(src)]), int(self.tail[self._checked(dst)])
        if src == dst:
            return
        if cell >= 0 and self.strict:
            last = int(self.pos[cell])
            if lo >= hi or lo > last:
                return
            if lo > 0 or hi <= last:
                raise SequenceError(
                    f"seq_cp: [{p0}, {p1}) given for sequence {src}, whose state has seen all up to {last}; "
                    "it cannot be copied in part: leave the range open",
                    src=src,
                    pos=last,
                )
        if old >= 0:
            self.release(dst)
        if cell >= 0:
            self.seq[cell] |= self.bits[dst]
            self.tail[dst] = cell
        self.touch()

    def seq_keep(self, seq_id: int) -> None:
        """Removes every sequence but one.  Raises: SequenceError.  Upstream: seq_keep."""
        cell = int(self.tail[self._checked(seq_id)])
        self._free_cells(np.flatnonzero(np.arange(self.size) != cell))
        self.tail[:] = -1
        self.used = 0
        if cell >= 0:
            self.tail[seq_id], self.used = cell, 1
            self.seq[cell] = self.bits[seq_id]

    def seq_add(self, seq_id: int, p0: OptPos, p1: OptPos, delta: int) -> None:
        """Moves the sequence's position by `delta` if it lies in [p0, p1). A state pushed below 0 is freed.

        A shared state moves for all its sequences.  Raises: SequenceError.
        Upstream: seq_add. Differs: upstream keeps a cell in use at a negative position.
        """
        cell = self._cell_in(seq_id, p0, p1)
        if cell < 0 or delta == 0:
            return
        moved = int(self.pos[cell]) + delta
        if moved > POS_END:
            raise SequenceError(
                f"seq_add: position {moved} of sequence {seq_id} exceeds {POS_END}",
                seq_id=seq_id,
                delta=delta,
            )
        if moved < 0:
            self._free_cells(np.array([cell]))
            return
        self.pos[cell] = moved
        planes = self.rs_pos[cell]
        self.rs_pos[cell] = np.where(planes < 0, -1, np.maximum(planes + delta, -1))
        self.touch()

    def seq_div(self, seq_id: int, p0: OptPos, p1: OptPos, d: int) -> None:
        """Divides the sequence's position by `d` if it lies in [p0, p1).

        Raises: SequenceError.  Upstream: seq_div.
        """
        if d < 1:
            raise SequenceError(f"seq_div: divisor {d}; it must be at least 1", d=d)
        cell = self._cell_in(seq_id, p0, p1)
        if cell < 0 or d == 1:
            return
        self.pos[cell] //= d
        planes = self.rs_pos[cell]
        self.rs_pos[cell] = np.where(planes < 0, -1, planes // d)
        self.touch()

    def seq_pos_max(self, seq_id: int) -> int | None:
        """Position of the last token that the sequence's state has seen."""
        cell = int(self.tail[self._checked(seq_id)])
        return int(self.pos[cell]) if cell >= 0 else None

    def seq_pos_min(self, seq_id: int) -> int | None:
        """The same as `seq_pos_max`: a state stands for one position only.  Upstream: seq_pos_min."""
        return self.seq_pos_max(seq_id)

    def seq_ids(self, cell: int) -> list[int]:
        """Sequences that share a cell, ascending."""
        words = self.seq[cell]
        return [64 * int(w) + b for w in np.flatnonzero(words) for b in range(64) if int(words[w]) >> b & 1]

    # saved states

    def state_rows(self, seq_id: int | None = None) -> tuple[I32, I32]:
        """What a save writes: the cells, ascending, and the tensor row that holds each one's current state.

        Upstream: state_write.
        """
        used = self.seq.any(axis=1)
        if seq_id is not None:
            used &= (self.seq & self.bits[self._checked(seq_id)]).any(axis=1)
        cells = np.flatnonzero(used).astype(np.int32)
        src = self.src[cells]
        return cells, self.rs_idx[cells] * np.int32(self.size) + np.where(src >= 0, src, cells)

    def restore_all(self, pos: I32, seq_id_flat: I32, seq_id_offset: I32) -> None:
        """Refills the cells from a whole saved state: cell i gets position i of `pos`, the others are freed.

        The caller has checked the values and writes the tensor rows 0 .. len(pos)-1.
        Raises: SequenceError; the cells are then unchanged.  Upstream: state_read_meta.
        """
        n = len(pos)
        if n > self.size:
            raise SequenceError(
                f"recurrent memory: {n} saved cells, but {self.size} here", n=n, size=self.size
            )
        ids = np.asarray(seq_id_flat, np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.n_seq_max or len(np.unique(ids)) < len(ids)):
            raise SequenceError(
                f"recurrent memory: saved sequence ids {ids.tolist()}: once each, in [0, {self.n_seq_max})",
                seq_id=ids.tolist(),
            )
        owner = np.repeat(np.arange(n), np.diff(seq_id_offset))
        self.clear()
        self.pos[:n] = pos
        np.bitwise_or.at(self.seq, owner, self.bits[ids])
        self.tail[ids] = owner
        self.src[:n] = np.arange(n)
        self.used = n

    def restore_seq(self, seq_id: int, pos: int | None) -> int | None:
        """Replaces a sequence by a saved one that stands at `pos` (None: empty); returns the cell to fill.

        Raises: SequenceError, NoSlotError; the cells are then unchanged.  Upstream: state_read_meta.
        """
        before = self.snapshot()
        self.seq_rm(seq_id)
        if pos is None:
            return None
        ids = np.array([seq_id], np.int32)
        try:
            request = SlotRequest(ids, ids, np.array([0, 1], np.int32), np.array([[pos]], np.int32), 1)
            cell = self._place(request).head
        except BaseException:
            self.restore(before)
            raise
        return cell

    # cells

    def is_shared(self, cell: int) -> bool:
        """True when more than one sequence has this cell."""
        words = self.seq[cell]
        return int(np.count_nonzero(words)) > 1 or bool((words & (words - np.uint64(1)))[words > 0].any())

    def release(self, seq_id: int) -> None:
        """Takes a sequence out of its cell, which is freed when nobody else has it."""
        cell = int(self.tail[seq_id])
        self.tail[seq_id] = -1
        self.seq[cell] &= ~self.bits[seq_id]
        if not self.seq[cell].any():
            self.free(cell)

    def free(self, cell: int) -> None:
        self.pos[cell] = self.src[cell] = -1
        self.rs_idx[cell] = 0
        self.rs_pos[cell] = -1
        self.used -= 1

    def _free_cells(self, cells: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
        self.tail[np.isin(self.tail, cells)] = -1
        self.seq[cells] = 0
        self.pos[cells] = self.src[cells] = self.rs_pos[cells] = -1
        self.rs_idx[cells] = 0
        self.used -= len(cells)
        if len(cells):
            self.head = min(self.head, int(cells[0]))
        self.touch()

    def _checked(self, seq_id: int) -> int:
        if not 0 <= seq_id < self.n_seq_max:
            raise SequenceError(
                f"sequence id {seq_id} given, 0 to {self.n_seq_max - 1} expected; seq_rm takes None too",
                seq_id=seq_id,
            )
        return seq_id

    def _cell_in(self, seq_id: int, p0: OptPos, p1: OptPos) -> int:
        lo, hi = range_of(p0, p1)
        cell = int(self.tail[self._checked(seq_id)])
        return cell if cell >= 0 and lo <= int(self.pos[cell]) < hi else -1
