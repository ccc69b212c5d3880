"""Sequence operations of an attention memory: every stream's cells and search head, kept together.

Adds to `Cells` what a sequence id means (its stream), how heads follow freed cells, and what is refused. K/V
data is elsewhere: copies between streams are queued in `stream_copies` for the next update.
Upstream: llama-kv-cache.cpp, seq_rm / seq_cp / seq_keep / seq_add / seq_div; older: prune_swa.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pyggmlkv.errors import SequenceError
from pyggmlkv.memory.cells import Cells
from pyggmlkv.memory.cells.extents import POS_MAX
from pyggmlkv.memory.config import Forget
from pyggmlkv.memory.mask import NO_WINDOW, SlidingWindow
from pyggmlkv.types import I64


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Size and rules of a memory's cells: `kv_size` cells per stream, sequence ids below `n_seq_max`.

    `forget`: whether new tokens take over cells behind the window, or `prune` empties those after each step.
    `shift`: what `seq_div` adds to the pending shift. "upstream" adds the change of position with its sign
    turned, as the pinned llama.cpp does; "pure" adds the change itself, so that keys turn to where they are.
    """

    kv_size: int
    n_seq_max: int = 1
    n_stream: int = 1
    n_pos_per_embd: int = 1
    window: SlidingWindow = NO_WINDOW
    shift: Literal["upstream", "pure"] = "upstream"
    name: str = "kv"
    forget: Forget = "reuse"


class CellStreams:
    """`cells[s]` and `heads[s]` of each stream; with several streams, sequence s lives in stream s.

    `stream_copies` lists (source, target) streams whose K/V buffers the next update has to copy, in order.
    """

    __slots__ = ("cells", "heads", "n_stream", "seq_to_stream", "spec", "stream_copies", "window")

    def __init__(self, spec: StreamsSpec) -> None:
        self.spec = spec
        self.window = spec.window
        self.n_stream = spec.n_stream
        self.cells = [Cells(spec.kv_size, spec.n_seq_max, spec.n_pos_per_embd) for _ in range(spec.n_stream)]
        self.heads = [0] * spec.n_stream
        self.seq_to_stream = [s if spec.n_stream > 1 else 0 for s in range(spec.n_seq_max)]
        self.stream_copies: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        """Cells per stream."""
        return self.spec.kv_size

    @property
    def has_shift(self) -> bool:
        """Whether any stream waits for a K-shift."""
        return any(cells.has_shift for cells in self.cells)

    def reset_shift(self, turned: range | None = None) -> None:
        """Forgets pending shifts, of the cells `turned` if given, counted over all streams."""
        for s, cells in enumerate(self.cells):
            if turned is None:
                cells.reset_shift()
                continue
            begin, end = (min(max(0, i - s * self.size), self.size) for i in (turned.start, turned.stop))
            if begin < end:
                cells.reset_shift(begin, end)

    @property
    def reused_window(self) -> SlidingWindow:
        """The window whose masked cells new tokens may take; none where they are pruned."""
        return self.window if self.spec.forget == "reuse" else NO_WINDOW

    def clear(self) -> None:
        """Empties all cells; heads go to 0 and queued copies are dropped."""
        for cells in self.cells:
            cells.clear()
        self.heads = [0] * self.n_stream
        self.stream_copies.clear()

    def of(self, seq_id: int) -> Cells:
        """The cells of the sequence's stream.

        Raises: SequenceError for an id out of range.
        """
        return self.cells[self._stream(seq_id, "cells")]

    def seq_rm(self, seq_id: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        """Takes the sequence (None or -1: every one, in all streams) off positions [p0, p1). Always True.

        A head moves back to the first cell that this frees.  Raises: SequenceError for an id out of range.
        """
        p0, p1 = _range(p0, p1)
        if seq_id is None or seq_id == -1:
            for s, cells in enumerate(self.cells):
                self._pull_head(s, cells.seq_rm(None, p0, p1))
            return True
        s = self._stream(seq_id, "seq_rm")
        self._pull_head(s, self.cells[s].seq_rm(seq_id, p0, p1))
        return True

    def seq_cp(self, src: int, dst: int, p0: int | None = None, p1: int | None = None) -> None:
        """Gives sequence `dst` the cells of `src` in [p0, p1). Between streams all of `src` replaces `dst`.

        Raises: SequenceError for a wrong id, or a range between streams that leaves out cells of `src`.
        Differs: upstream compares such a range with the buffer size and aborts.
        """
        p0, p1 = _range(p0, p1)
        s0, s1 = self._stream(src, "seq_cp"), self._stream(dst, "seq_cp")
        if s0 == s1:
            self.cells[s0].seq_cp(src, dst, p0, p1)
        else:
            self._cp_stream(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """Empties all cells of the sequence's stream that are not its own.

        Raises: SequenceError for an id out of range.
        """
        s = self._stream(seq_id, "seq_keep")
        self._pull_head(s, self.cells[s].seq_keep(seq_id))

    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> None:
        """Moves positions in [p0, p1) by `delta`; cells pushed below 0 are freed, and the search restarts.

        Cells shared with other sequences move for all of them.
        Raises: SequenceError for an id out of range or a position beyond 2^31 - 1.
        """
        s = self._stream(seq_id, "seq_add")
        p0, p1 = _range(p0, p1)
        if delta == 0 or (p0 or 0) == (POS_MAX if p1 is None else p1):
            return
        cells = self.cells[s]
        if delta > 0 and (cells.seq_pos_max(seq_id) or 0) + delta > POS_MAX:
            moved = cells.pos[cells.find(seq_id, p0, p1)]
            if moved.size and int(moved.max()) + delta > POS_MAX:
                raise SequenceError(
                    f"seq_add: {delta} moves position {int(moved.max())} of sequence {seq_id} past {POS_MAX}",
                    seq_id=seq_id,
                    delta=delta,
                )
        freed = cells.seq_add(seq_id, p0, p1, delta)
        self.heads[s] = 0 if freed is None else freed

    def seq_div(self, seq_id: int, p0: int | None, p1: int | None, d: int) -> None:
        """Divides positions in [p0, p1) by `d`, rounding down; see `StreamsSpec.shift` for what is queued.

        Raises: SequenceError for an id out of range or `d` < 1.
        """
        s = self._stream(seq_id, "seq_div")
        if d < 1:
            raise SequenceError(f"seq_div: divisor {d} given, 1 or more expected", d=d)
        p0, p1 = _range(p0, p1)
        if d == 1 or (p0 or 0) == (POS_MAX if p1 is None else p1):
            return
        self.cells[s].seq_div(seq_id, p0, p1, d, turn=1 if self.spec.shift == "pure" else -1)

    def seq_pos_min(self, seq_id: int) -> int | None:
        """Lowest position of the sequence, None without cells.  Raises: SequenceError for a wrong id."""
        return self.cells[self._stream(seq_id, "seq_pos_min")].seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int | None:
        """Highest position of the sequence, None without cells.  Raises: SequenceError for a wrong id."""
        return self.cells[self._stream(seq_id, "seq_pos_max")].seq_pos_max(seq_id)

    def prune(self, seq_id: int, pos_min: int, pos_max: int) -> int:
        """Forgets what no query from `pos_max` on sees, after a batch at pos_min .. pos_max was committed.

        Returns the number of cells that the query at `pos_min` sees: less than the window means lost context.
        """
        cells, window = self.cells[self._stream(seq_id, "prune")], self.window
        pos = cells.pos[cells.find(seq_id, None, pos_min + 1)]
        attended = int(np.count_nonzero(pos >= window.first_visible(pos_min)))
        cells.seq_rm(seq_id, None, max(0, window.first_visible(pos_max)))
        return attended

    def state_cells(self, stream: int, seq_id: int | None = None) -> I64:
        """Cells that a saved state holds, ascending: all used ones, or those of one sequence.

        Of one sequence, cells that the window masks for its highest position are left out.
        Upstream: llama-kv-cache.cpp, state_write.
        """
        cells = self.cells[stream]
        last = None if seq_id is None else cells.seq_pos_max(seq_id)
        return cells.find(seq_id, None if last is None else self.window.first_visible(last))

    def state_ranges(self, stream: int, seq_id: int | None = None) -> list[tuple[int, int]]:
        """Runs [begin, end) of `state_cells`."""
        return index_runs(self.state_cells(stream, seq_id))

    def _stream(self, seq_id: int, op: str) -> int:
        if not 0 <= seq_id < self.spec.n_seq_max:
            raise SequenceError(
                f"{op}: sequence id {seq_id} given, 0 to {self.spec.n_seq_max - 1} expected (n_seq_max)",
                seq_id=seq_id,
                n_seq_max=self.spec.n_seq_max,
            )
        return self.seq_to_stream[seq_id]

    def _pull_head(self, stream: int, freed: int | None) -> None:
        if freed is not None and freed < self.heads[stream]:
            self.heads[stream] = freed

    def _cp_stream(self, src: int, dst: int, p0: int | None, p1: int | None) -> None:
        s0, s1 = self.seq_to_stream[src], self.seq_to_stream[dst]
        cells, target = self.cells[s0], self.cells[s1]
        lo, hi = cells.seq_pos_min(src), cells.seq_pos_max(src)
        if lo is not None and hi is not None and ((p0 or 0) > lo or (p1 is not None and p1 <= hi)):
            raise SequenceError(
                f"seq_cp: sequences {src} and {dst} are in different streams, so a copy takes the whole "
                f"buffer: [{p0}, {p1}) must cover positions {lo} .. {hi} of sequence {src}; use None, None",
                src=src,
                dst=dst,
                p0=p0,
                p1=p1,
            )
        self.stream_copies.append((s0, s1))
        target.clear()
        target.put_from(cells, cells.find(src), dst)
        self.heads[s1] = self.heads[s0]


def index_runs(idxs: np.ndarray) -> list[tuple[int, int]]:
    """Runs [begin, end) of consecutive numbers in an ascending index array."""
    if idxs.size == 0:
        return []
    cuts = np.flatnonzero(np.diff(idxs) != 1) + 1
    begins, ends = idxs[np.r_[0, cuts]], idxs[np.r_[cuts - 1, idxs.size - 1]] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


def _range(p0: int | None, p1: int | None) -> tuple[int | None, int | None]:
    """Negative bounds are open, as in llama.cpp."""
    return (None if p0 is None or p0 <= 0 else p0), (None if p1 is None or p1 < 0 else p1)
