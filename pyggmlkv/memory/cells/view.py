"""What the cells of a memory hold, counted and drawn: for people, never for decisions.

Upstream: the older llama_kv_cache_view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from pyggmlkv.memory.cells import Cells
from pyggmlkv.memory.cells.extents import ids_of, single_ids
from pyggmlkv.memory.recurrent.cells import RecurrentCells
from pyggmlkv.memory.seq_ops import CellStreams
from pyggmlkv.types import I32, I64, U64

ROW = 64
"""Cells drawn in a row."""
IDS = "0123456789abcdefghijklmnopqrstuvwxyz"
MANY, OTHER, FREE = "*", "+", "."


@dataclass(frozen=True, slots=True, eq=False)
class CellsView:
    """Counts over all streams; arrays are (n_stream, n_cells).

    `token_count` counts a cell once for each of its sequences. `max_contiguous` is the longest run of free
    cells in any stream; `max_contiguous_stream` and `max_contiguous_idx` say where it begins, None if full.
    """

    n_cells: int
    token_count: int
    used_cells: int
    max_contiguous: int
    max_contiguous_idx: int | None
    max_contiguous_stream: int | None
    pos: I32
    shift: I32
    seq_count: I64


@dataclass(frozen=True, slots=True, eq=False)
class StreamCells:
    """The cells of one stream in read-only arrays (n_cells,).

    `pos` is -1 where a cell is free; `shift` counts the positions that its key has yet to be turned by; `seq` is the
    set of sequences (n_cells, n_words), bit s % 64 of word s // 64. `ext_x`, `ext_y` are the 2-D place of M-RoPE.
    """

    pos: I32
    shift: I32
    seq: U64
    ext_x: I32 | None = None
    ext_y: I32 | None = None

    def __len__(self) -> int:
        return len(self.pos)

    @property
    def n_used(self) -> int:
        return int(np.count_nonzero(self.pos >= 0))

    def seq_ids(self, cell: int) -> list[int]:
        """Ids of the sequences that share a cell, ascending."""
        return ids_of(self.seq[cell])


class CellsMap(Sequence[StreamCells]):
    """The cells of a memory: `cells[s]` is stream s; `pos`, `shift`, `seq` are all streams (n_stream, n_cells, ...).

    A stream's arrays of an attention memory follow what happens to it; all others are copies.
    """

    __slots__ = ("_streams",)

    def __init__(self, streams: tuple[StreamCells, ...]) -> None:
        self._streams = streams

    @overload
    def __getitem__(self, index: int) -> StreamCells: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[StreamCells, ...]: ...

    def __getitem__(self, index: int | slice) -> StreamCells | tuple[StreamCells, ...]:
        return self._streams[index]

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def pos(self) -> I32:
        return np.stack([s.pos for s in self._streams])

    @property
    def shift(self) -> I32:
        return np.stack([s.shift for s in self._streams])

    @property
    def seq(self) -> U64:
        return np.stack([s.seq for s in self._streams])

    def __repr__(self) -> str:
        return (
            f"<CellsMap: {len(self)} stream(s) of {len(self[0])} cells, {sum(s.n_used for s in self)} used>"
        )


def cells_of(streams: CellStreams) -> CellsMap:
    """The cells of an attention memory."""
    return CellsMap(tuple(StreamCells(c.pos, c.shift, c.seq, c.ext_x, c.ext_y) for c in streams.cells))


def cells_of_recurrent(states: RecurrentCells) -> CellsMap:
    """State cells as one stream; nothing is ever shifted."""
    seq = states.seq.copy()
    pos = np.where(seq.any(axis=1), states.pos, -1).astype(np.int32)
    shift = np.zeros_like(pos)
    for array in (pos, shift, seq):
        array.setflags(write=False)
    return CellsMap((StreamCells(pos, shift, seq),))


def view(streams: CellStreams) -> CellsView:
    """Copies and counts the cells of all streams."""
    pos = np.stack([cells.pos for cells in streams.cells])
    shift = np.stack([cells.shift for cells in streams.cells])
    return _counted(pos, shift, np.stack([cells.seq_count() for cells in streams.cells]))


def view_recurrent(cells: RecurrentCells) -> CellsView:
    """The state cells as one stream of cells; nothing is ever shifted."""
    counts: I64 = np.bitwise_count(cells.seq).sum(axis=1, dtype=np.int64)[None]
    pos = np.where(counts > 0, cells.pos, -1).astype(np.int32)
    return _counted(pos, np.zeros_like(pos), counts)


def _counted(pos: I32, shift: I32, seq_count: I64) -> CellsView:
    runs = [_longest_free_run(row) for row in pos]
    length, index, stream = max(((n, -i, -s) for s, (n, i) in enumerate(runs)), default=(0, 0, 0))
    return CellsView(
        n_cells=pos.size,
        token_count=int(seq_count.sum()),
        used_cells=int(np.count_nonzero(pos >= 0)),
        max_contiguous=length,
        max_contiguous_idx=-index if length else None,
        max_contiguous_stream=-stream if length else None,
        pos=pos,
        shift=shift,
        seq_count=seq_count,
    )


def render(streams: CellStreams, max_rows: int = 64) -> str:
    """The cells as text, 64 a row: a sequence's id (0-9a-z, + above), * for several sequences, . for free.

    A line of ^ below marks cells that wait for a K-shift. At most `max_rows` rows are drawn of each stream,
    and only the first of equal ones in a run.
    """
    legend = "0-9a-z sequence, + id above 35, * several, . free, ^ shift pending, > head"
    lines = [f"{streams.spec.name}: {streams.n_stream} x {streams.size} cells  ({legend})"]
    for s, cells in enumerate(streams.cells):
        seqs = ", ".join(f"{i}: {cells.seq_pos_min(i)}..{cells.seq_pos_max(i)}" for i in cells.seqs()[:8])
        more = ", ..." if len(cells.seqs()) > 8 else ""
        head = streams.heads[s]
        lines.append(f"stream {s}: {cells.n_used} used, head {head}, positions {{{seqs}{more}}}")
        lines += _rows(cells, head, max_rows)
    return "\n".join(lines)


def _rows(cells: Cells, head: int, max_rows: int) -> list[str]:
    text = "".join(_marks(cells).tolist())
    turns = "".join(np.where(cells.shift != 0, "^", " ").tolist()) if cells.has_shift else ""
    lines: list[str] = []
    last, n_same, drawn = "", 0, 0
    for begin in range(0, cells.size, ROW):
        row, turn = text[begin : begin + ROW], turns[begin : begin + ROW].rstrip()
        is_head = begin <= head < begin + ROW
        if row == last and not turn and not is_head and begin + ROW < cells.size:
            n_same += 1
            continue
        if n_same:
            lines.append(f"         ... {n_same} more like this")
        if drawn == max_rows:
            lines.append(f"         ... {cells.size - begin} more cells")
            return lines
        lines.append(f"{begin:>7}{'>' if is_head else ' '} {row}")
        if turn:
            lines.append(f"         {turn}")
        last, n_same, drawn = row if not turn else "", 0, drawn + 1
    return lines


def _marks(cells: Cells) -> np.ndarray:
    count = cells.seq_count()
    ids = single_ids(cells.seq_words())
    ids[count != 1] = 0
    table = np.array([*IDS, OTHER])
    one = table[np.minimum(ids, len(IDS))]
    marks: np.ndarray = np.where(count == 0, FREE, np.where(count == 1, one, MANY))
    return marks


def _longest_free_run(pos: I32) -> tuple[int, int]:
    """(length, begin) of the longest run of free cells, the first of equals; (0, 0) when full."""
    ends = np.r_[np.flatnonzero(pos >= 0), pos.size]
    starts = np.r_[0, ends[:-1] + 1]
    k = int((ends - starts).argmax())
    length = int(ends[k] - starts[k])
    return length, int(starts[k]) if length else 0
