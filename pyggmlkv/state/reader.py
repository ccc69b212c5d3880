"""From a saved state back into a live memory: verify everything, find room for everything, and only then write.

A refused state leaves cells, heads and tensors of every part byte for byte as they were.
Upstream: llama-kv-cache.cpp and llama-memory-recurrent.cpp, state_read. Differs: upstream fails half-way; forgets all
streams but the last when it restores a whole context; keeps what was there where the saved part is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.binding import Tensor
from pyggmlkv.errors import NoSlotError
from pyggmlkv.memory import slots
from pyggmlkv.memory.cells import Cells
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.recurrent.memory import RecurrentMemory
from pyggmlkv.memory.slots import Journal
from pyggmlkv.state.blocks import CellMeta, KVBlock, KVStream, Part, RecurrentBlock, SavedState, TensorData
from pyggmlkv.state.format import read_state
from pyggmlkv.state.layouts import Container, LayoutName
from pyggmlkv.state.live import Live, LivePart
from pyggmlkv.state.rows import RowSet, write_columns, write_rows
from pyggmlkv.types import U64

Action: TypeAlias = Callable[[], None]


def load_bytes(
    live: Live,
    data: bytes | bytearray | memoryview,
    seq_id: int | None = None,
    partial: bool = False,
    layout: LayoutName = "current",
) -> None:
    """Replaces the whole memory by a saved one, or one sequence by a saved sequence, whatever id that had.

    Raises:
        StateError: the data does not fit this memory; `field`, `expected`, `found`, `offset` say where.
        NoSlotError: no room for it.
        SequenceError: an id that the memory cannot have.
    In all cases nothing has changed.  Upstream: llama_state_set_data, llama_state_seq_set_data_ext.
    """
    verified(live, data, "context" if seq_id is None else "sequence", seq_id, partial=partial, layout=layout)


def verified(
    live: Live,
    data: bytes | bytearray | memoryview,
    container: Container,
    seq_id: int | None,
    *,
    partial: bool = False,
    layout: LayoutName = "current",
) -> SavedState:
    """Reads a state in `container`, checks it against the memory, and puts it there."""
    live.check_seq(seq_id, partial)
    state = read_state(data, live.spec(), container, partial=partial, layout=layout)
    put(live, state, seq_id, partial)
    return state


def put(live: Live, state: SavedState, seq_id: int | None = None, partial: bool = False) -> None:
    """Puts a state that `read_state` has checked against `live.spec()` into the memory.

    Raises: NoSlotError; nothing has changed.
    """
    memory = live.memory
    if memory is None:
        return
    writing = False
    undo: list[Action] = []
    write: list[Action] = []
    try:
        for part, block in zip(live.parts(partial), state.parts, strict=True):
            if seq_id is None:
                write.append(_place_whole(part, block))
            else:
                back, rows = _place_sequence(part, block, seq_id)
                undo.append(back)
                write.append(rows)
        writing = True
        for rows in write:
            rows()
    except BaseException:
        # a device that fails in the middle, or Ctrl-C: some rows are new, so nobody may own them
        if seq_id is None:
            memory.clear()
        elif writing:
            memory.seq_rm(seq_id)
        else:
            for back in reversed(undo):
                back()
        raise


# the cells: each gives an action that writes the tensors, a sequence's also one that takes the cells back


def _place_whole(part: LivePart, block: Part) -> Action:
    """Saved cell i becomes cell i; the caller has checked everything."""
    if isinstance(part, RecurrentMemory):
        assert isinstance(block, RecurrentBlock)
        saved = block.cells
        part.states.restore_all(saved.pos, saved.seq_flat, saved.seq_offset)
        return lambda: _write_recurrent(part, block, 0, zeroed=True)
    assert isinstance(block, KVBlock)
    part.streams.clear()
    for cells, stream in zip(part.streams.cells, block.streams, strict=True):
        if stream is not None:
            _put_cells(cells, stream.cells)
    return lambda: _write_whole(part, block)


def _place_sequence(part: LivePart, block: Part, seq_id: int) -> tuple[Action, Action]:
    if isinstance(part, RecurrentMemory):
        assert isinstance(block, RecurrentBlock)
        before = part.states.snapshot()
        saved = block.cells
        cell = part.states.restore_seq(seq_id, int(saved.pos[0]) if len(saved) else None)
        head = 0 if cell is None else cell
        return (lambda: part.states.restore(before)), (lambda: _write_recurrent(part, block, head))
    assert isinstance(block, KVBlock)
    return _place_kv_sequence(part, block, seq_id)


def _place_kv_sequence(cache: KVCache, block: KVBlock, seq_id: int) -> tuple[Action, Action]:
    """The old cells of the sequence are freed, then its saved ones take a slot as decoded tokens would."""
    streams = cache.streams
    stream = streams.seq_to_stream[seq_id]
    saved = next((s for s in block.streams if s is not None), None)
    journal = Journal(streams)
    journal.note(stream, streams.cells[stream].find(seq_id))
    try:
        streams.seq_rm(seq_id)
        if saved is None:
            return journal.undo, lambda: None
        ubatch = _ubatch_of(saved.cells, seq_id, cache)
        slot = slots.find_slot(streams, ubatch)
        if slot is None:
            raise _no_slot(cache, stream, len(saved.cells))
        slots.apply_ubatch(streams, slot, ubatch, journal)
    except BaseException:
        journal.undo()
        raise
    rows = RowSet.of(slot.idxs[0])
    return journal.undo, lambda: _write_sequence(cache, stream, saved, rows)


def _no_slot(cache: KVCache, stream: int, needed: int) -> NoSlotError:
    size, used = cache.spec.kv_size, cache.streams.cells[stream].n_used
    return NoSlotError(
        f"{cache.name}: the saved sequence has {needed} cells, {size - used} of {size} are free; remove or shorten "
        "sequences, or make the cache larger",
        part=cache.name,
        needed=needed,
        free=size - used,
        size=size,
    )


def _put_cells(cells: Cells, saved: CellMeta) -> None:
    idxs = np.arange(len(saved), dtype=np.int64)
    cells.put(idxs, saved.pos, _bitsets(saved, cells.n_words), None if saved.ext is None else saved.ext.T)


def _bitsets(saved: CellMeta, n_words: int) -> U64:
    """The cells' ids as bitsets (n_words, n)."""
    words = np.zeros((n_words, len(saved)), np.uint64)
    flat, offset = saved.seq_flat.astype(np.int64), saved.seq_offset
    count = np.diff(offset)
    at, k = np.flatnonzero(count), 0
    while at.size:
        ids = flat[offset[at] + k]
        words[ids >> 6, at] |= np.uint64(1) << (ids & 63).astype(np.uint64)
        k += 1
        at = at[count[at] > k]
    return words


def _ubatch_of(saved: CellMeta, seq_id: int, cache: KVCache) -> UBatch:
    """Saved cells as tokens of one sequence."""
    n, n_words = len(saved), cache.streams.cells[0].n_words
    pos = np.zeros((cache.spec.n_pos_per_embd, n), np.int32)
    pos[0] = saved.pos
    if saved.ext is not None:
        pos[2], pos[1] = saved.ext.T
    mask = np.zeros((n, n_words), np.uint64)
    mask[:, seq_id >> 6] = np.uint64(1 << (seq_id & 63))
    seq_idx = np.full(cache.spec.n_seq_ids, -1, np.int32)
    seq_idx[seq_id] = 0
    return UBatch(
        equal_seqs=True,
        n_tokens=n,
        n_seq_tokens=n,
        n_seqs=1,
        n_seqs_unq=1,
        n_pos=len(pos),
        token=None,
        embd=None,
        pos=pos,
        n_seq_id=np.ones(n, np.int32),
        seq_id_flat=np.full(n, seq_id, np.int32),
        seq_id_offset=np.arange(n + 1, dtype=np.int32),
        seq_mask=mask,
        seq_id_unq=np.array([seq_id], np.int32),
        seq_idx=seq_idx,
        output=np.zeros(n, np.bool_),
    )


# the tensors


def _write_whole(cache: KVCache, block: KVBlock) -> None:
    cache.storage.clear()
    for s, stream in enumerate(block.streams):
        if stream is not None:
            _write_stream(cache, s, stream, RowSet.of(np.arange(len(stream.cells), dtype=np.int64)))


def _write_sequence(cache: KVCache, stream: int, saved: KVStream, rows: RowSet) -> None:
    # a copy queued earlier would overwrite what is written now; shifts may wait, these cells have none
    cache.copy_streams()
    _write_stream(cache, stream, saved, rows)


def _write_stream(cache: KVCache, stream: int, saved: KVStream, rows: RowSet) -> None:
    owners = cache.storage.owners
    for layer, data in zip(owners, saved.k, strict=True):
        write_rows(layer.k_streams[stream], rows, data.rows())
    for layer, data in zip([x for x in owners if x.v is not None], saved.v, strict=True):
        if data.transposed:
            write_columns(layer.v_streams[stream], rows, data.rows(), data.spec.element_size)
        else:
            write_rows(layer.v_streams[stream], rows, data.rows())


def _write_recurrent(memory: RecurrentMemory, block: RecurrentBlock, head: int, zeroed: bool = False) -> None:
    if zeroed:
        for buffer in memory.buffers:
            buffer.clear(0)
    n = len(block.cells)
    if n == 0:
        return
    rows = RowSet.of(np.arange(head, head + n, dtype=np.int64))
    for il, r, s in zip(sorted(memory.tensors), block.r, block.s, strict=True):
        _write_state(memory.tensors[il][0], rows, r)
        _write_state(memory.tensors[il][1], rows, s)


def _write_state(t: Tensor, rows: RowSet, data: TensorData) -> None:
    if data.spec.row_size:
        write_rows(t, rows, data.rows())
