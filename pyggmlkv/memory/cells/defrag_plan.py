"""Which cells a defrag moves where: holes among the first n_used cells are filled with cells from the end.

Pure: plans from positions alone. Sources lie behind all targets, so a plan's copies can run in any order.
Upstream: older llama-kv-cache.cpp, defrag_prepare and defrag_sched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggmlkv.memory.cells import Cells
from pyggmlkv.types import I64

MIN_CELLS = 2048
"""Memories that read fewer cells than this are never defragmented by themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class DefragPlan:
    """Cell `src[i]` moves to `dst[i]`, both (n_cells,); `blocks` are the same moves as (src, dst, n) runs.

    `done`: no hole is left after this plan. `head`: where the next slot search starts, None without a move.
    """

    src: I64
    dst: I64
    blocks: tuple[tuple[int, int, int], ...]
    done: bool
    head: int | None

    @property
    def n_moves(self) -> int:
        """Blocks moved, each a view and a copy per tensor."""
        return len(self.blocks)


def plan_defrag(cells: Cells, max_moves: int | None = None) -> DefragPlan:
    """At most `max_moves` block moves (None: all) towards used cells 0 .. n_used - 1.

    Apply it with `cells.move(plan.src, plan.dst)`, then plan again until `done`.
    """
    n_used = cells.n_used
    holes = np.flatnonzero(cells.pos[:n_used] < 0)
    tail = np.flatnonzero(cells.pos[n_used : cells.used_max_p1] >= 0) + n_used
    if holes.size == 0:
        return DefragPlan(holes, holes, (), True, None)
    # each run of holes takes the last cells that are left, in ascending order
    is_start = np.r_[True, np.diff(holes) != 1]
    starts = np.flatnonzero(is_start)
    length = np.diff(np.r_[starts, holes.size])
    first = np.repeat(tail.size - starts - length, length)
    src = tail[first + np.arange(holes.size) - np.repeat(starts, length)]
    cuts = np.flatnonzero(is_start | np.r_[True, np.diff(src) != 1])
    n = holes.size if max_moves is None or len(cuts) <= max_moves else int(cuts[max_moves])
    cuts = cuts[cuts < n]
    sizes = np.diff(np.r_[cuts, n])
    blocks = tuple(zip(src[cuts].tolist(), holes[cuts].tolist(), sizes.tolist(), strict=True))
    return DefragPlan(src[:n], holes[:n], blocks, n == holes.size, n_used if n else None)


def fragmentation(n_used: int, n_kv: int, n_pad: int = 0) -> float:
    """Share of the `n_kv` cells read that hold nothing, the padding not counted; 0 for small memories.

    Compare it with `defrag_threshold`.  Upstream: defrag_sched.
    """
    return max(0.0, 1.0 - (n_used + n_pad) / n_kv) if n_kv >= MIN_CELLS else 0.0
