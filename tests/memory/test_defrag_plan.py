"""The defrag plan: used cells end up in front, in blocks, a few at a time, with all that belongs to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggmlkv.memory.cells import Cells
from pyggmlkv.memory.cells.defrag_plan import fragmentation, plan_defrag


def cells_of(pattern: str) -> Cells:
    """x is a used cell, . a free one; the position is the cell's index."""
    cells = Cells(len(pattern), 2)
    used = np.array([i for i, c in enumerate(pattern) if c == "x"])
    cells.put(used, used.astype(np.int32), np.ones((1, len(used)), np.uint64))
    return cells


def draw(cells: Cells) -> str:
    return "".join("x" if p >= 0 else "." for p in cells.pos)


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("xxx...", ()),
        ("......", ()),
        ("x..xx.", ((3, 1, 2),)),
        ("..x.x.xx", ((6, 0, 2), (4, 3, 1))),
        (".x.x.x.x", ((7, 0, 1), (5, 2, 1))),
        ("..xxx...xx..x", ((9, 0, 1), (12, 1, 1), (8, 5, 1))),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_holes_take_the_last_cells_in_ascending_order(pattern: str, blocks: tuple) -> None:
    plan = plan_defrag(cells_of(pattern))
    assert plan.blocks == blocks
    assert plan.done
    assert plan.head == (pattern.count("x") if blocks else None)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pattern=st.text("x.", min_size=1, max_size=60), max_moves=st.none() | st.integers(1, 4))
def test_repeated_plans_fill_the_front_and_then_move_nothing(pattern: str, max_moves: int | None) -> None:
    cells = cells_of(pattern)
    n_used, rounds = cells.n_used, 0
    while True:
        plan = plan_defrag(cells, max_moves)
        assert max_moves is None or plan.n_moves <= max_moves
        assert sum(n for _, _, n in plan.blocks) == len(plan.src) == len(plan.dst)
        assert [s + k for s, _, n in plan.blocks for k in range(n)] == plan.src.tolist()
        assert [d + k for _, d, n in plan.blocks for k in range(n)] == plan.dst.tolist()
        assert not set(plan.src.tolist()) & set(plan.dst.tolist())
        cells.move(plan.src, plan.dst)
        rounds += 1
        if plan.done:
            break
        assert rounds < 100
    assert draw(cells) == "x" * n_used + "." * (cells.size - n_used)
    assert sorted(cells.pos[:n_used].tolist()) == [i for i, c in enumerate(pattern) if c == "x"]
    assert plan_defrag(cells, max_moves).n_moves == 0
    assert cells.used_max_p1 == n_used


def test_limit_of_zero_moves_plans_nothing_and_is_not_done() -> None:
    plan = plan_defrag(cells_of("x..x"), 0)
    assert (plan.n_moves, plan.done, plan.head) == (0, False, None)


def test_move_takes_shift_sequences_and_place_along() -> None:
    cells = Cells(6, 80, 4)
    sets = np.array([[1, 3, 0], [0, 0, 1 << 15]], np.uint64)
    cells.put(
        np.array([0, 3, 5]), np.array([4, 7, 9], np.int32), sets, np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    )
    cells.seq_add(79, None, None, -2)
    plan = plan_defrag(cells)
    cells.move(plan.src, plan.dst)
    assert cells.pos.tolist() == [4, 7, 7, -1, -1, -1]
    assert cells.shift.tolist() == [0, 0, -2, 0, 0, 0]
    assert [cells.seq_ids(i) for i in range(6)] == [[0], [0, 1], [79], [], [], []]
    assert (cells.ext_x.tolist(), cells.ext_y.tolist()) == ([1, 2, 3, 0, 0, 0], [4, 5, 6, 0, 0, 0])
    assert (cells.seq_pos_min(79), cells.seq_pos_max(0)) == (7, 7)


@pytest.mark.parametrize(
    ("n_used", "n_kv", "n_pad", "want"),
    [(1024, 2048, 0, 0.5), (1024, 2048, 512, 0.25), (2048, 2048, 256, 0.0), (1, 2047, 0, 0.0)],
)
def test_fragmentation_counts_padding_as_used_and_spares_small_memories(
    n_used: int, n_kv: int, n_pad: int, want: float
) -> None:
    assert fragmentation(n_used, n_kv, n_pad) == want
