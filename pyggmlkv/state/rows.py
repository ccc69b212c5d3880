"""Rows of K, V, r and s out of tensors and back, on any backend: which cells, in which order, at what cost.

Host memory is looked at in place. Other memory, and element types that NumPy has no equal of, go through the backend in
pieces or as one span, whichever moves less.  Upstream: llama-io.h, write_tensor, read_tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from pyggmlkv.binding import Tensor
from pyggmlkv.memory.seq_ops import index_runs
from pyggmlkv.types import I32, I64

Bytes: TypeAlias = npt.NDArray[np.uint8]
TRANSFER_COST = 1 << 16
"""Bytes that could be moved in the time that one more transfer takes."""
VIEW_COST = 1 << 12
"""Bytes of host memory that could be copied in the time that one more view takes."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowSet:
    """Rows of a tensor in saving order: `idxs` (n,), which consist of `n_runs` runs of consecutive ones in [lo, hi)."""

    idxs: I32 | I64
    n_runs: int
    lo: int
    hi: int

    @classmethod
    def of(cls, idxs: I32 | I64) -> Self:
        if not len(idxs):
            return cls(idxs, 0, 0, 0)
        n_runs = 1 + int(np.count_nonzero(idxs[1:] - idxs[:-1] != 1))
        return cls(idxs, n_runs, int(idxs.min()), int(idxs.max()) + 1)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The runs [begin, end), in order; made when asked for, there may be many."""
        return [(self.lo, self.hi)] if self.n_runs == 1 else index_runs(self.idxs)

    @property
    def at(self) -> slice | I32 | I64:
        """The rows as an index into an array: a slice where they are one run."""
        return slice(self.lo, self.hi) if self.n_runs == 1 else self.idxs


def host_bytes(t: Tensor) -> Bytes | None:
    """The bytes of a contiguous tensor in place (nbytes,), None where only its backend can read them."""
    buffer = t.buffer
    return t.raw() if buffer is not None and buffer.is_host else None


def _fetched(t: Tensor, begin: int, end: int) -> Bytes:
    """Bytes begin .. end, copied through the backend; the whole tensor, in one copy, where most of it is wanted."""
    if 3 * (end - begin) >= t.nbytes:
        return t.to_numpy(dequantize=False).reshape(-1).view(np.uint8)[begin:end]
    return np.frombuffer(bytearray(t.get_bytes(begin, end - begin)), np.uint8)


def _pays_in_pieces(n_pieces: int, cost: int, whole: int) -> bool:
    """Whether taking pieces one by one costs no more than moving `whole` bytes at once."""
    return n_pieces == 1 or n_pieces * cost <= whole


def read_rows(t: Tensor, rows: RowSet, row_size: int) -> tuple[memoryview, ...]:
    """The rows' bytes, one after the other, in one or several buffers; views of the tensor where that is possible."""
    if row_size == 0:
        return ()
    host = host_bytes(t)
    lo, hi = rows.lo, rows.hi
    whole = (len(rows.idxs) if host is not None else hi - lo) * row_size
    if _pays_in_pieces(rows.n_runs, TRANSFER_COST if host is None else VIEW_COST, whole):
        if host is not None:
            return tuple(host[b * row_size : e * row_size].data for b, e in rows.runs)
        return tuple(_fetched(t, b * row_size, e * row_size).data for b, e in rows.runs)
    span = _fetched(t, lo * row_size, hi * row_size) if host is None else host[lo * row_size : hi * row_size]
    picked = _items(span, row_size)[rows.idxs - lo]
    return (picked.view(np.uint8).reshape(-1).data,) if len(picked) else ()


def write_rows(t: Tensor, rows: RowSet, data: Bytes) -> None:
    """Puts `data` (n, row_size) into the rows."""
    row_size = data.shape[1]
    host = host_bytes(t)
    lo, hi = rows.lo, rows.hi
    whole = data.nbytes if host is not None else 2 * (hi - lo) * row_size
    if _pays_in_pieces(rows.n_runs, TRANSFER_COST if host is None else VIEW_COST, whole):
        at = 0
        for b, e in rows.runs:
            t.set_bytes(data[at : at + e - b], b * row_size)
            at += e - b
        return
    span = _fetched(t, lo * row_size, hi * row_size) if host is None else host[lo * row_size : hi * row_size]
    _items(span, row_size)[rows.idxs - lo] = _items(data.reshape(-1), row_size)
    if host is None:
        t.set_bytes(span, lo * row_size)


def read_columns(t: Tensor, rows: RowSet, n_embd: int, element_size: int) -> tuple[memoryview, ...]:
    """Cells of a transposed tensor, [kv_size, n_embd] elements: for each of `n_embd` lines the elements of the cells."""
    host = host_bytes(t)
    width = t.ne[1] * element_size
    n_pieces, n_row = n_embd * rows.n_runs, len(rows.idxs) * element_size
    if host is None and _pays_in_pieces(n_pieces, TRANSFER_COST, n_embd * width):
        runs = [(b * element_size, (e - b) * element_size) for b, e in rows.runs]
        return tuple(memoryview(t.get_bytes(j * width + b, n)) for j in range(n_embd) for b, n in runs)
    grid = (_fetched(t, 0, n_embd * width) if host is None else host[: n_embd * width]).reshape(n_embd, width)
    if rows.n_runs == 1:
        begin = rows.lo * element_size
        lines = grid[:, begin : begin + n_row]
        if n_row >= VIEW_COST and n_row < width:
            return tuple(line.data for line in lines)
        return (np.ascontiguousarray(lines).reshape(-1).data,)
    picked = np.take(grid.view(f"u{element_size}"), rows.idxs, axis=1)
    return (picked.view(np.uint8).reshape(-1).data,) if picked.size else ()


def write_columns(t: Tensor, rows: RowSet, data: Bytes, element_size: int) -> None:
    """Puts `data` (n_embd, n_cells * element_size) into the cells of a transposed tensor."""
    n_embd = len(data)
    host = host_bytes(t)
    width = t.ne[1] * element_size
    if host is None and _pays_in_pieces(n_embd * rows.n_runs, TRANSFER_COST, 2 * n_embd * width):
        at = 0
        for b, e in rows.runs:
            n = (e - b) * element_size
            for j in range(n_embd):
                t.set_bytes(np.ascontiguousarray(data[j, at : at + n]), j * width + b * element_size)
            at += n
        return
    grid = (_fetched(t, 0, n_embd * width) if host is None else host[: n_embd * width]).reshape(n_embd, width)
    if rows.n_runs == 1:
        begin = rows.lo * element_size
        grid[:, begin : begin + data.shape[1]] = data
    else:
        grid.view(f"u{element_size}")[:, rows.idxs] = data.view(f"u{element_size}")
    if host is None:
        t.set_bytes(grid, 0)


def _items(flat: Bytes, row_size: int) -> npt.NDArray[np.void]:
    """Whole rows as items (n,), so that picking one is one copy."""
    return flat.view(np.dtype((np.void, row_size)))
