"""Cell records of a saved state: position, number of sequence ids, M-RoPE extension, ids.

A record's length depends on its number of ids; equal lengths, the usual case, are read and written without a loop.
Upstream: llama-kv-cache.cpp and llama-memory-recurrent.cpp, state_write_meta.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import numpy as np

from pyggmlkv.state.blocks import CellMeta
from pyggmlkv.state.cursor import Cursor
from pyggmlkv.types import I32, I64

IdRule: TypeAlias = Literal["set", "one", "none"]


@dataclasses.dataclass(frozen=True, slots=True)
class CellRule:
    """What cells may say: a set of ids below `n_seq_max` ("set"), one id, the same for all ("one"), or none."""

    ids: IdRule
    n_seq_max: int
    has_ext: bool = False


def read_cells(c: Cursor, n: int, rule: CellRule) -> CellMeta:
    """Reads and checks `n` cell records; `n` has been checked against the bytes left.  Raises: StateError."""
    base, n_ext = c.offset, 2 if rule.has_ext else 0
    starts = _uniform_starts(c, n, rule, n_ext) if n else np.empty(0, np.int64)
    if starts is None:
        starts = _walk_starts(c, n, rule, n_ext)
    words = np.frombuffer(c.data[base : c.offset], np.int32)
    pos, counts = words[starts], words[starts + 1]
    if n and (low := int(pos.argmin())) >= 0 and pos[low] < 0:
        c.fail(f"cell {low} position", "0 or more", int(pos[low]), at=base + 4 * int(starts[low]))
    offset = np.zeros(n + 1, np.int32)
    np.cumsum(counts, out=offset[1:])
    ext = words[starts[:, None] + np.array([2, 3])] if rule.has_ext else None
    ids_at = np.repeat(starts + 2 + n_ext - offset[:-1], counts) + np.arange(offset[-1])
    flat = words[ids_at]
    _check_ids(c, rule, flat, offset, base + 4 * ids_at)
    return CellMeta(pos, flat, offset, ext)


def _uniform_starts(c: Cursor, n: int, rule: CellRule, n_ext: int) -> I64 | None:
    """Word offsets of the records when all have as many ids as the first; else None, and nothing is read."""
    if rule.ids == "set":
        c.need(8, "cell 0")
        n_ids = int(np.frombuffer(c.data, np.uint32, 1, c.offset + 4)[0])
        if not 1 <= n_ids <= rule.n_seq_max or n * (2 + n_ext + n_ids) * 4 > c.left:
            return None
    else:
        n_ids = 1 if rule.ids == "one" else 0
    stride = 2 + n_ext + n_ids
    c.need(n * stride * 4, f"{n} cells")
    words = np.frombuffer(c.data, np.int32, n * stride, c.offset)
    wrong = words[1::stride] != n_ids
    if wrong.any():
        if rule.ids == "set":
            return None
        i = int(wrong.argmax())
        c.fail(f"cell {i} n_seq_id", n_ids, int(words[i * stride + 1]), at=c.offset + 4 * (i * stride + 1))
    c.offset += n * stride * 4
    return np.arange(n, dtype=np.int64) * stride


def _walk_starts(c: Cursor, n: int, rule: CellRule, n_ext: int) -> I64:
    """Word offsets of records of different lengths."""
    words = c.data[c.offset : c.offset + c.left // 4 * 4].cast("I")
    starts, at, end, most = [0] * n, 0, len(words), rule.n_seq_max
    for i in range(n):
        n_ids = words[at + 1] if at + 2 <= end else 1
        if not 1 <= n_ids <= most:
            c.fail(f"cell {i} n_seq_id", f"1 to {most}", n_ids, at=c.offset + 4 * (at + 1))
        starts[i] = at
        at += 2 + n_ext + n_ids
        if at > end:
            c.fail(f"cell {i}", "a whole record", "the end of the data", at=c.offset + 4 * starts[i])
    c.offset += 4 * at
    return np.array(starts, np.int64)


def _check_ids(c: Cursor, rule: CellRule, flat: I32, offset: I32, at: I64) -> None:
    most = rule.n_seq_max if rule.ids == "set" else 2**31
    bad = (flat < 0) | (flat >= most)
    if bad.any():
        i = int(bad.argmax())
        c.fail("sequence id", f"0 to {most - 1}", int(flat[i]), at=int(at[i]))
    if rule.ids == "one" and len(flat) and (flat != flat[0]).any():
        i = int((flat != flat[0]).argmax())
        c.fail("sequence id", f"{flat[0]} as in the first cell", int(flat[i]), at=int(at[i]))
    if rule.ids == "set" and len(flat) > 1:
        falls = flat[1:] <= flat[:-1]
        falls[offset[1:-1] - 1] = False
        if falls.any():
            i = int(falls.argmax()) + 1
            c.fail("sequence ids of a cell", "ascending", f"{flat[i]} after {flat[i - 1]}", at=int(at[i]))


def cell_bytes(cells: CellMeta) -> memoryview:
    """The records of `cells`, ready to write."""
    n, n_ext, n_ids = len(cells), 0 if cells.ext is None else 2, len(cells.seq_flat)
    counts = np.diff(cells.seq_offset)
    words = np.empty(n * (2 + n_ext) + n_ids, np.int32)
    if n and (counts == counts[0]).all():
        table = words.reshape(n, -1)
        table[:, 0], table[:, 1] = cells.pos, counts
        if cells.ext is not None:
            table[:, 2:4] = cells.ext
        table[:, 2 + n_ext :] = cells.seq_flat.reshape(n, -1)
        return words.data.cast("B")
    starts = np.arange(n, dtype=np.int64) * (2 + n_ext) + cells.seq_offset[:-1]
    words[starts], words[starts + 1] = cells.pos, counts
    if cells.ext is not None:
        words[starts + 2], words[starts + 3] = cells.ext[:, 0], cells.ext[:, 1]
    ids_at = np.repeat(starts + 2 + n_ext - cells.seq_offset[:-1], counts) + np.arange(n_ids)
    words[ids_at] = cells.seq_flat
    return words.data.cast("B")
