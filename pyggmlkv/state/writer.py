"""From a live memory to a saved state, whole or one sequence, without copying rows that host memory can show.

What is pending (K-shift, stream copies) is applied first: a saved state is what decoding would read.
Upstream: llama-kv-cache.cpp and llama-memory-recurrent.cpp, state_write. Differs: upstream saves unshifted keys.
"""

from __future__ import annotations

import numpy as np

from pyggmlkv.binding import Tensor
from pyggmlkv.memory.cells import Cells
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.recurrent import RecurrentMemory
from pyggmlkv.memory.recurrent_cells import RecurrentCells
from pyggmlkv.state.blocks import CellMeta, KVBlock, KVStream, Part, RecurrentBlock, SavedState, TensorData
from pyggmlkv.state.format import write_state
from pyggmlkv.state.live import Live, kv_layer, tensor_spec
from pyggmlkv.state.rows import RowSet, read_columns, read_rows
from pyggmlkv.types import I32, I64, U64


def save_bytes(live: Live, seq_id: int | None = None, partial: bool = False) -> bytes:
    """The whole state, or one sequence's, as llama.cpp writes it to memory.

    `partial`: of a sequence, only what a window or recurrent part holds.
    Raises: SequenceError, StateError.  Upstream: llama_state_get_data, llama_state_seq_get_data_ext.
    """
    return b"".join(write_state(take(live, seq_id, partial), "context" if seq_id is None else "sequence"))


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
    runs = cache.streams.state_ranges(stream, seq_id)
    if not runs:
        return None
    rows = RowSet(indices(runs), runs)
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
    cells = cell_meta(cache.streams.cells[stream], rows.idxs, seq_id)
    return KVStream(cells, cache.spec.v_trans, tuple(k), tuple(v))


def indices(runs: list[tuple[int, int]]) -> I64:
    """The numbers in runs [begin, end), in order."""
    table = np.array(runs, np.int64).reshape(-1, 2)
    n = table[:, 1] - table[:, 0]
    before = np.cumsum(n) - n
    out: I64 = np.arange(int(n.sum()), dtype=np.int64) + np.repeat(table[:, 0] - before, n)
    return out


def cell_meta(cells: Cells, idxs: I64, seq_id: int | None) -> CellMeta:
    """Positions and sequence ids of the given cells; `seq_id`: only that one is named."""
    pos = cells.pos[idxs]
    ext: I32 | None = None
    if cells.ext_x is not None and cells.ext_y is not None:
        ext = np.stack([cells.ext_x[idxs], cells.ext_y[idxs]], axis=1)
    if seq_id is not None:
        return CellMeta.of_sequence(pos, seq_id, ext)
    flat, offset = id_lists(cells.seq_words()[:, idxs])
    return CellMeta(pos, flat, offset, ext)


def id_lists(words: U64) -> tuple[I32, I32]:
    """Bitsets (n_words, n) as lists of ids, ascending: all ids (n_ids,), and where each cell's begin (n + 1,)."""
    count = np.bitwise_count(words).sum(axis=0, dtype=np.int64)
    offset = np.zeros(words.shape[1] + 1, np.int32)
    np.cumsum(count, out=offset[1:])
    flat = np.empty(int(offset[-1]), np.int32)
    cursor = offset[:-1].copy()
    for w, row in enumerate(words):
        at = np.flatnonzero(row)
        rest = row[at]
        while at.size:
            low = rest & (~rest + np.uint64(1))
            flat[cursor[at]] = np.bitwise_count(low - np.uint64(1)) + 64 * w
            cursor[at] += 1
            rest = rest ^ low
            more = rest != 0
            at, rest = at[more], rest[more]
    return flat, offset


def _take_recurrent(memory: RecurrentMemory, seq_id: int | None, n_layer: int) -> RecurrentBlock:
    cells, where = memory.cells.state_rows(seq_id)
    rows = RowSet.of(where)
    layers = [memory.tensors[il] for il in sorted(memory.tensors)]
    r = tuple(_recurrent_rows(layer[0], rows) for layer in layers)
    s = tuple(_recurrent_rows(layer[1], rows) for layer in layers)
    return RecurrentBlock(_recurrent_meta(memory.cells, cells, seq_id), n_layer, r, s)


def _recurrent_rows(t: Tensor, rows: RowSet) -> TensorData:
    spec = tensor_spec(t)
    return TensorData(spec, read_rows(t, rows, spec.row_size))


def _recurrent_meta(cells: RecurrentCells, idxs: I32, seq_id: int | None) -> CellMeta:
    if seq_id is not None:
        return CellMeta.of_sequence(cells.pos[idxs], None)
    flat, offset = id_lists(cells.seq[idxs].T)
    return CellMeta(cells.pos[idxs], flat, offset)
