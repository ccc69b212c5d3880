"""Slot search of recurrent memory: gather the cells of a ubatch's sequences into one run, in batch order.

Works on the arrays of `RecurrentCells`; knows no tensor. A step whose sequences already lie in order takes no
Python loop.  Upstream: llama-memory-recurrent.cpp, find_slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.errors import BatchError, NoSlotError, SequenceError
from pyggmlkv.logs import logger
from pyggmlkv.types import I32, U64

if TYPE_CHECKING:
    from pyggmlkv.memory.recurrent.cells import RecurrentCells

POS_END = 2**31 - 1
"""Highest position."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RecurrentSnapshot:
    """A copy of the cells; `numbers` is head, n, used, rs_z."""

    table: I32
    rs_pos: I32
    seq: U64
    s_copy: I32
    numbers: tuple[int, int, int, int | None]
    version: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RecurrentSlot:
    """Where a ubatch's states go: cells [head, head + n_rs), its `n_seqs` sequences first and in order.

    `s_copy` (n_rs,): the tensor row each cell is read from; `rs_z`: the row that is zeroed first, None: none.
    """

    head: int
    n_rs: int
    rs_z: int | None
    s_copy: I32
    n_seqs: int
    before: RecurrentSnapshot
    after: RecurrentSnapshot

    def overwritten(self) -> I32:
        """Cells whose newest row the graph changes: the batch's, and those that are copied from another row."""
        cells = np.arange(self.head, self.head + self.n_rs, dtype=np.int32)
        hit: I32 = cells[(np.arange(self.n_rs) < self.n_seqs) | (self.s_copy != cells)]
        return hit

    @property
    def key(self) -> Hashable:
        """What a graph's shape depends on: equal keys may share a graph; `s_copy` is an input."""
        return (self.head, self.n_rs, self.rs_z, self.n_seqs)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SlotRequest:
    """Sequence sets to place, one cell each. `owner` is the first id of each set: its state goes on.

    `flat`, `offset`: the ids of all sets, (n_ids,) and (n_seqs + 1,). `tail_pos` (n_seqs, 1 + n_kept): the
    newest tokens' positions, newest first; the older ones are the rollback snapshots that this ubatch writes.
    """

    owner: I32
    flat: I32
    offset: I32
    tail_pos: I32
    n_seq_tokens: int
    warn: bool = False


def request_from_ubatch(ubatch: UBatch, n_seq_max: int, n_rs_seq: int) -> SlotRequest:
    """Checks a ubatch and takes from it what the search needs.  Raises: SequenceError, BatchError."""
    flat, offset, n = ubatch.seq_id_flat, ubatch.seq_id_offset, ubatch.n_seq_tokens
    if not ubatch.equal_seqs:
        raise BatchError(
            "recurrent memory: a ubatch needs equally many tokens of each sequence; use split_equal"
        )
    if flat.min() < 0 or flat.max() >= n_seq_max:
        bad = int(flat.max()) if flat.max() >= n_seq_max else int(flat.min())
        raise SequenceError(
            f"recurrent memory: sequence id {bad} given, 0 to {n_seq_max - 1} expected; raise n_seq_max",
            seq_id=bad,
            n_seq_max=n_seq_max,
        )
    first = np.arange(0, ubatch.n_tokens, n)
    owner = flat[offset[first]]
    if len(flat) == ubatch.n_tokens:
        sets, set_offset = owner, np.arange(len(first) + 1, dtype=np.int32)
    else:
        parts = [flat[offset[i] : offset[i + 1]] for i in first]
        sets = np.concatenate(parts)
        set_offset = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    if len(sets) > 1 and len(np.unique(sets)) < len(sets):
        raise BatchError(
            "recurrent memory: a sequence occurs twice in one ubatch; one state cannot follow both",
            seq_id=sets.tolist(),
        )
    pos = ubatch.pos[0].reshape(len(first), n)
    tail_pos = pos[:, ::-1][:, : 1 + n_rs_seq]
    return SlotRequest(owner, sets, set_offset, tail_pos, n, warn=ubatch.n_pos == 1)


def place(cells: RecurrentCells, request: SlotRequest) -> None:
    """Moves the request's sequences into a contiguous run and stages their copies. May raise halfway.

    Raises: NoSlotError.
    """
    n_seqs = len(request.owner)
    if cells.head > cells.used + 2 * n_seqs:
        cells.head = 0
    if len(request.flat) > n_seqs:
        _release_coupled(cells, request)
    tails = cells.tail[request.owner]
    if tails.min() < 0 or (cells.seq[tails] != cells.bits[request.owner]).any():
        tails = _take_cells(cells, request)
    lo, hi = int(tails.min()), int(tails.max())
    if not np.array_equal(tails, np.arange(lo, lo + n_seqs)):
        _gather(cells, request.owner, lo)
    _occupy(cells, request, lo)
    _stage_copies(cells, request, lo, hi)
    cells.used = int(np.count_nonzero(cells.seq.any(axis=1)))


def _release_coupled(cells: RecurrentCells, request: SlotRequest) -> None:
    """Sequences that become shared drop the state they had: the set goes on with its first id's."""
    coupled = np.ones(len(request.flat), np.bool_)
    coupled[request.offset[:-1]] = False
    for seq_id in request.flat[coupled]:
        if cells.tail[seq_id] >= 0:
            cells.release(int(seq_id))


def _take_cells(cells: RecurrentCells, request: SlotRequest) -> I32:
    """Gives every owner a cell of its own: an empty one, with a reference to the state it shared before."""
    empty = _next_empty(cells, cells.head)
    tails = np.empty(len(request.owner), np.int32)
    for s, seq_id in enumerate(request.owner.tolist()):
        old = int(cells.tail[seq_id])
        if old < 0 or cells.is_shared(old):
            if empty < 0 or cells.seq[empty].any():
                raise NoSlotError(
                    f"recurrent memory: no cell for sequence {seq_id}: {cells.used} of {cells.size} in use",
                    part="recurrent",
                    needed=len(request.owner) - s,
                    free=cells.size - cells.used,
                )
            if old >= 0:
                for array in (cells.pos, cells.src, cells.rs_idx):
                    array[empty] = array[old]
                cells.seq[old] &= ~cells.bits[seq_id]
            cells.seq[empty] = cells.bits[seq_id]
            cells.tail[seq_id] = old = empty
            empty = _next_empty(cells, empty + 1)
        tails[s] = old
    return tails


def _next_empty(cells: RecurrentCells, start: int) -> int:
    """First empty cell from `start` on, around the end; -1: none."""
    free = np.flatnonzero(~cells.seq.any(axis=1))
    if not len(free):
        return -1
    at = int(np.searchsorted(free, start if start < cells.size else 0))
    return int(free[at] if at < len(free) else free[0])


def _gather(cells: RecurrentCells, owner: I32, lo: int) -> None:
    """Swaps cells until owner s sits in cell lo + s."""
    per_cell = (cells.pos, cells.src, cells.rs_idx, cells.rs_pos, cells.seq)
    for s, seq_id in enumerate(owner.tolist()):
        dst, src = lo + s, int(cells.tail[seq_id])
        if dst == src:
            continue
        for array in per_cell:
            array[[dst, src]] = array[[src, dst]]
        at_src, at_dst = cells.tail == src, cells.tail == dst
        cells.tail[at_src] = dst
        cells.tail[at_dst] = src


def _occupy(cells: RecurrentCells, request: SlotRequest, lo: int) -> None:
    """Writes positions, sequence sets and tails of the placed cells."""
    n_seqs = len(request.owner)
    run = slice(lo, lo + n_seqs)
    last = request.tail_pos[:, 0]
    if request.warn:
        jump = (cells.pos[run] >= 0) & (last != cells.pos[run] + request.n_seq_tokens)
        for s in np.flatnonzero(jump).tolist():
            logger.warning(
                "recurrent memory: sequence %d jumps from position %d to %d with %d tokens",
                int(request.owner[s]),
                int(cells.pos[lo + s]),
                int(last[s]),
                request.n_seq_tokens,
            )
    cells.pos[run] = last
    cell_of = np.repeat(np.arange(lo, lo + n_seqs), np.diff(request.offset))
    if len(cell_of) == n_seqs:
        cells.seq[run] = cells.bits[request.owner]
    else:
        cells.seq[run] = 0
        np.bitwise_or.at(cells.seq, cell_of, cells.bits[request.flat])
    cells.tail[request.flat] = cell_of


def _stage_copies(cells: RecurrentCells, request: SlotRequest, lo: int, hi: int) -> None:
    """Decides what each cell of [lo, hi] is read from, and which row is zeroed for states that start anew."""
    n_seqs, run = len(request.owner), slice(lo, hi + 1)
    here = np.arange(lo, hi + 1, dtype=np.int32)
    src = cells.src[run]
    unused = np.bincount(cells.src[cells.src >= 0], minlength=cells.size)[run] == 0
    cells.rs_z = lo + int(unused.argmax()) if unused.any() else None
    fresh = src < 0
    if fresh.any() and cells.rs_z is None:
        raise NoSlotError("recurrent memory: no cell to zero for a new sequence", part="recurrent")
    cells.src0[run] = np.where(fresh, -1 if cells.rs_z is None else cells.rs_z, src)
    cells.src[run] = here
    cells.s_copy = np.where(fresh, 0, cells.rs_idx[run]) * np.int32(cells.size) + cells.src0[run]
    if cells.n_rs_seq:
        cells.rs_pos[run][cells.s_copy != here] = -1
        kept = request.tail_pos[:, 1:]
        cells.rs_pos[lo : lo + n_seqs] = -1
        cells.rs_pos[lo : lo + n_seqs, : kept.shape[1]] = kept
        cells.rs_idx[run] = 0
    cells.head, cells.n = lo, hi - lo + 1


def range_of(p0: int | None, p1: int | None) -> tuple[int, int]:
    """A half-open range of positions, open ends filled in; a negative end is open, as in llama.cpp."""
    return max(p0 or 0, 0), (POS_END + 1 if p1 is None or p1 < 0 else p1)
