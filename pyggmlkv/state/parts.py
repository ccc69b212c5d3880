"""The two kinds of memory in a saved state, attention and recurrent: bytes to blocks and back.

Everything is checked against a spec before a block exists; tensor rows stay views into the input.
Upstream: llama-kv-cache.cpp and llama-memory-recurrent.cpp, state_write / state_read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from pyggmlkv.errors import StateError
from pyggmlkv.state.blocks import (
    CellMeta,
    KVBlock,
    KVStateSpec,
    KVStream,
    Part,
    PartSpec,
    RecurrentBlock,
    RecurrentStateSpec,
    TensorData,
    TensorSpec,
)
from pyggmlkv.state.cell_meta import CellRule, IdRule, cell_bytes, read_cells
from pyggmlkv.state.cursor import Cursor
from pyggmlkv.state.layouts import Layout

Buffer: TypeAlias = bytes | memoryview
MIN_CELL_BYTES = 8


def read_part(c: Cursor, spec: PartSpec, layout: Layout, single: bool) -> Part:
    """One memory; `single`: it was saved for one sequence.  Raises: StateError."""
    if isinstance(spec, KVStateSpec):
        return _read_kv(c, spec, layout, single)
    return _read_recurrent(c, spec, single)


def _read_kv(c: Cursor, spec: KVStateSpec, layout: Layout, single: bool) -> KVBlock:
    c.where = spec.name
    if layout.streams:
        c.equal(c.u32("n_stream"), spec.n_stream, "n_stream")
    elif spec.n_stream != 1:
        c.fail(
            "n_stream", f"{spec.n_stream} as this memory has", f"1, as layout {layout.name} has no streams"
        )
    ids: IdRule = "set" if not single else "one" if layout.seq_ids else "none"
    rule = CellRule(ids, spec.n_seq_max, spec.n_pos_per_embd > 1 and layout.streams)
    streams: list[KVStream | None] = []
    for s in range(spec.n_stream):
        c.where = f"{spec.name}, stream {s}"
        at = c.offset
        n = c.count(spec.kv_size, MIN_CELL_BYTES, "cell count")
        if n and single and any(streams):
            c.fail("cell count", "0, as the sequence was in an earlier stream", n, at=at)
        streams.append(_read_stream(c, n, spec, rule) if n or not layout.streams else None)
    return KVBlock(tuple(streams))


def _read_stream(c: Cursor, n: int, spec: KVStateSpec, rule: CellRule) -> KVStream:
    cells, where = read_cells(c, n, rule), c.where
    c.equal(c.u32("v_trans"), int(spec.v_trans), "v_trans")
    c.equal(c.u32("n_layer"), len(spec.layers), "n_layer")
    k: list[TensorData] = []
    v: list[TensorData] = []
    for layer in spec.layers:
        c.where = f"{where}, layer {layer.il}"
        k.append(read_rows(c, n, layer.k, "K"))
    for layer in spec.layers:
        c.where = f"{where}, layer {layer.il}"
        if layer.v is not None:
            v.append(read_columns(c, n, layer.v, "V") if spec.v_trans else read_rows(c, n, layer.v, "V"))
    return KVStream(cells, spec.v_trans, tuple(k), tuple(v))


def _read_recurrent(c: Cursor, spec: RecurrentStateSpec, single: bool) -> RecurrentBlock:
    c.where = spec.name
    at = c.offset
    n = c.count(spec.size, MIN_CELL_BYTES, "cell count")
    if single and n > 1:
        c.fail("cell count", "at most 1, as a sequence has one state", n, at=at)
    cells = read_cells(c, n, CellRule("none" if single else "set", spec.n_seq_max))
    _check_one_cell_each(c, cells)
    c.equal(c.u32("s_trans"), 0, "s_trans")
    c.equal(c.u32("n_layer"), len(spec.layers), "n_layer")
    tensors: tuple[list[TensorData], list[TensorData]] = ([], [])
    for which, out in enumerate(tensors):
        for il, layer in enumerate(spec.layers):
            c.where = f"{spec.name}, layer {il}"
            if layer is not None:
                out.append(read_rows(c, n, layer[which], "rs"[which]))
    return RecurrentBlock(cells, len(spec.layers), tuple(tensors[0]), tuple(tensors[1]))


def _check_one_cell_each(c: Cursor, cells: CellMeta) -> None:
    ids, counts = np.unique(cells.seq_flat, return_counts=True)
    if (counts > 1).any():
        c.fail("sequence ids", "each in one cell", f"{ids[counts.argmax()]} in {counts.max()} cells")


def read_rows(c: Cursor, n: int, spec: TensorSpec, name: str) -> TensorData:
    """Type, row size and `n` rows of one tensor."""
    c.equal(c.i32(f"{name} type"), spec.type, f"{name} type")
    c.equal(c.u64(f"{name} row size"), spec.row_size, f"{name} row size", width=8)
    return TensorData(spec, (c.take(n * spec.row_size, f"{name} rows"),))


def read_columns(c: Cursor, n: int, spec: TensorSpec, name: str) -> TensorData:
    """Type, element size, row length and `n` cells of one transposed tensor."""
    c.equal(c.i32(f"{name} type"), spec.type, f"{name} type")
    c.equal(c.u32(f"{name} element size"), spec.element_size, f"{name} element size")
    c.equal(c.u32(f"{name} n_embd"), spec.n_embd, f"{name} n_embd")
    data = c.take(n * spec.n_embd * spec.element_size, f"{name} elements")
    return TensorData(spec, (data,), transposed=True)


def check_part(part: Part) -> None:
    """Checks that every tensor has the bytes that its spec and the number of cells ask for.  Raises: StateError."""
    records = [part] if isinstance(part, RecurrentBlock) else [s for s in part.streams if s is not None]
    for record in records:
        n = len(record.cells)
        tensors = record.r + record.s if isinstance(record, RecurrentBlock) else record.k + record.v
        for i, tensor in enumerate(tensors):
            spec = tensor.spec
            row = spec.n_embd * spec.element_size if tensor.transposed else spec.row_size
            if tensor.nbytes != n * row:
                raise StateError(
                    f"state: tensor {i} has {tensor.nbytes} bytes, {n} cells of {row} bytes expected",
                    expected=n * row,
                    found=tensor.nbytes,
                )


def write_part(part: Part) -> Iterator[Buffer]:
    """The bytes of one memory, in pieces; tensor rows are handed through as they are."""
    if isinstance(part, RecurrentBlock):
        yield struct.pack("=I", len(part.cells))
        yield cell_bytes(part.cells)
        yield struct.pack("=II", 0, part.n_layer)
        yield from _write_tensors(part.r)
        yield from _write_tensors(part.s)
        return
    yield struct.pack("=I", len(part.streams))
    for stream in part.streams:
        yield struct.pack("=I", 0 if stream is None else len(stream.cells))
        if stream is not None and len(stream.cells):
            yield cell_bytes(stream.cells)
            yield struct.pack("=II", int(stream.v_trans), len(stream.k))
            yield from _write_tensors(stream.k)
            yield from _write_tensors(stream.v)


def _write_tensors(tensors: tuple[TensorData, ...]) -> Iterator[Buffer]:
    for tensor in tensors:
        spec = tensor.spec
        if tensor.transposed:
            yield struct.pack("=iII", spec.type, spec.element_size, spec.n_embd)
        else:
            yield struct.pack("=iQ", spec.type, spec.row_size)
        yield from tensor.buffers
