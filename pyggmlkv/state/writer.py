"""From a live memory to a saved state, whole or one sequence, without copying rows that host memory can show.

What is pending (K-shift, stream copies) is applied first: a saved state is what decoding would read.
Upstream: llama-kv-cache.cpp and llama-memory-recurrent.cpp, state_write. Differs: upstream saves unshifted keys.
"""

from __future__ import annotations

import numpy as np

from pyggmlkv.binding import Tensor
from pyggmlkv.memory.cells import Cells
from pyggmlkv.memory.cells.extents import ids_of
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.recurrent.cells import RecurrentCells
from pyggmlkv.memory.recurrent.memory import RecurrentMemory
from pyggmlkv.state.blocks import CellMeta, KVBlock, KVStream, Part, RecurrentBlock, SavedState, TensorData
from pyggmlkv.state.format import write_state
from pyggmlkv.state.joined import joined
from pyggmlkv.state.live import Live, kv_layer, tensor_spec
from pyggmlkv.state.rows import RowSet, read_columns, read_rows
from pyggmlkv.types import I32, U64


def save_bytes(live: Live, seq_id: int | None = None, partial: bool = False) -> bytes:
    """The whole state, or one sequence's, as llama.cpp writes it to memory.

    `partial`: of a sequence, only what a window or recurrent part holds.
    Raises: SequenceError, StateError.  Upstream: llama_state_get_data, llama_state_seq_get_data_ext.
    """
    return joined(list(write_state(take(live, seq_id, partial), "context" if seq_id is None else "sequence")))


def take(live: Live, seq_id: int | None = None, partial: bool = False) -> SavedState:
    """The state as blocks. Rows may be views of the memory: write them before anything changes it.

    Raises: SequenceError, StateError.
    """
    live.check_seq(seq_id, partial)
    if live.memory is not None:
        live.memory.update()
    parts = tuple(_take(part, seq_id, live.n_layer) for part in live.parts(partial))
    return SavedState(parts, live.arch, seq_id)


def _take(part: KVCache | RecurrentMemory, seq_id: int | None, n_layer: int) -> Part:
    if isinstance(part, RecurrentMemory):
        return _take_recurrent(part, seq_id, n_layer)
    return KVBlock(tuple(_take_stream(part, s, seq_id) for s in range(part.spec.n_stream)))


def _take_stream(cache: KVCache, stream: int, seq_id: int | None) -> KVStream | None:
    rows = RowSet.of(cache.streams.state_cells(stream, seq_id))
    if rows.n_runs == 0:
        return None
    k: list[TensorData] = []
    v: list[TensorData] = []
    for layer in cache.storage.owners:
        spec = kv_layer(layer, cache.spec.v_trans)
        k.append(TensorData(spec.k, read_rows(layer.k_streams[stream], rows, spec.k.row_size)))
        if spec.v is None:
            continue
        t = layer.v_streams[stream]
        if cache.spec.v_trans:
            v.append(TensorData(spec.v, read_columns(t, rows, spec.v.n_embd, spec.v.element_size), True))
        else:
            v.append(TensorData(spec.v, read_rows(t, rows, spec.v.row_size)))
    cells = cell_meta(cache.streams.cells[stream], rows, seq_id)
    return KVStream(cells, cache.spec.v_trans, tuple(k), tuple(v))


def cell_meta(cells: Cells, rows: RowSet, seq_id: int | None) -> CellMeta:
    """Positions and sequence ids of the given cells; `seq_id`: only that one is named."""
    at = rows.at
    pos = cells.pos[at].copy()
    ext: I32 | None = None
    if cells.ext_x is not None and cells.ext_y is not None:
        ext = np.stack([cells.ext_x[at], cells.ext_y[at]], axis=1)
    if seq_id is not None:
        return CellMeta.of_sequence(pos, seq_id, ext)
    flat, offset = id_lists(cells.seq_words()[:, at])
    return CellMeta(pos, flat, offset, ext)


def id_lists(words: U64) -> tuple[I32, I32]:
    """Bitsets (n_words, n) as lists of ids, ascending: all ids (n_ids,), and where each cell's begin (n + 1,)."""
    n = words.shape[1]
    used = [w for w, row in enumerate(words) if row.any()]
    if len(used) == 1 and n and (words[used[0]] == words[used[0], 0]).all():
        ids = np.array(ids_of(words[:, 0]), np.int32)
        return np.tile(ids, n), np.arange(n + 1, dtype=np.int32) * np.int32(len(ids))
    count = np.zeros(n, np.int32)
    for w in used:
        count += np.bitwise_count(words[w])
    offset = np.zeros(n + 1, np.int32)
    np.cumsum(count, out=offset[1:])
    flat = np.empty(int(offset[-1]), np.int32)
    cursor = offset[:-1].copy()
    for w in used:
        at = np.flatnonzero(words[w])
        rest = words[w][at]
        while at.size:
            low = rest & (~rest + np.uint64(1))
            flat[cursor[at]] = np.bitwise_count(low - np.uint64(1)).astype(np.int32) + 64 * w
            cursor[at] += 1
            rest ^= low
            more = rest != 0
            at, rest = at[more], rest[more]
    return flat, offset


def _take_recurrent(memory: RecurrentMemory, seq_id: int | None, n_layer: int) -> RecurrentBlock:
    cells, where = memory.states.state_rows(seq_id)
    rows = RowSet.of(where)
    layers = [memory.tensors[il] for il in sorted(memory.tensors)]
    r = tuple(_recurrent_rows(layer[0], rows) for layer in layers)
    s = tuple(_recurrent_rows(layer[1], rows) for layer in layers)
    return RecurrentBlock(_recurrent_meta(memory.states, cells, seq_id), n_layer, r, s)


def _recurrent_rows(t: Tensor, rows: RowSet) -> TensorData:
    spec = tensor_spec(t)
    return TensorData(spec, read_rows(t, rows, spec.row_size))


def _recurrent_meta(cells: RecurrentCells, idxs: I32, seq_id: int | None) -> CellMeta:
    if seq_id is not None:
        return CellMeta.of_sequence(cells.pos[idxs], None)
    flat, offset = id_lists(cells.seq[idxs].T)
    return CellMeta(cells.pos[idxs], flat, offset)
