"""Case 11 on live memory: a copy between streams takes all of a sequence or is refused; K and V arrive bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.errors import SequenceError

Make = Callable[..., pyggmlkv.Context]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Iterator[pyggmlkv.Model]:
    with pyggmlkv.Model.load(tiny_model("llama")) as model:
        yield model


@pytest.fixture(params=["off", "on"], ids=["v-transposed", "v-plain"])
def ctx(model: pyggmlkv.Model, request: pytest.FixtureRequest) -> Iterator[pyggmlkv.Context]:
    """Four streams of 16 cells; sequence 0 has 16 tokens, sequence 3 has 5."""
    with pyggmlkv.Context(model, n_ctx=64, n_seq_max=4, n_threads=1, flash_attn=request.param) as ctx:
        ctx.decode(Batch(range(16)))
        ctx.decode(Batch(range(40, 45), seq_id=3))
        yield ctx


def stream(ctx: pyggmlkv.Context, s: int) -> list[Any]:
    """Everything of a stream: positions, sequence sets as counts, K and V of every layer."""
    m = ctx.memory
    cells = m.cells[s]
    counts = [len(cells.seq_ids(i)) for i in range(len(cells))]
    return [cells.pos.tolist(), counts, *(t(il)[s].tobytes() for il in (0, 1) for t in (m.k, m.v))]


@pytest.mark.parametrize(("p0", "p1"), [(0, 8), (0, 15), (1, None), (8, 16)], ids=str)
def test_a_range_that_leaves_out_a_cell_is_refused_and_changes_nothing(
    ctx: pyggmlkv.Context, p0: int, p1: int | None
) -> None:
    before, state = [stream(ctx, s) for s in range(4)], ctx.state_get()
    with pytest.raises(SequenceError, match="stream"):
        ctx.memory.seq_cp(0, 1, p0, p1)
    assert not ctx.memory.has_update
    assert [stream(ctx, s) for s in range(4)] == before
    assert ctx.state_get() == state


@pytest.mark.parametrize(("p0", "p1"), [(None, None), (0, 16), (0, None), (-1, -1)], ids=str)
def test_a_whole_copy_has_equal_bytes_and_a_life_of_its_own(
    ctx: pyggmlkv.Context, p0: int | None, p1: int | None
) -> None:
    m = ctx.memory
    m.seq_cp(0, 1, p0, p1)
    m.update()
    assert stream(ctx, 1) == stream(ctx, 0)
    copied = stream(ctx, 1)
    m.seq_rm(0, 10, None)
    ctx.decode(Batch([9, 8, 7]))
    assert stream(ctx, 1) == copied
    assert (m.seq_pos_max(0), m.seq_pos_max(1)) == (12, 15)


def test_a_chain_onto_used_sequences_before_any_update(ctx: pyggmlkv.Context) -> None:
    m = ctx.memory
    m.seq_cp(0, 3)
    m.seq_cp(3, 2)
    m.update()
    assert stream(ctx, 2) == stream(ctx, 3) == stream(ctx, 0)
    assert m.cells[3].seq_ids(0) == [3]
    assert m.seq_pos_max(3) == 15


def test_a_pending_shift_is_carried_over_and_applied_once(ctx: pyggmlkv.Context) -> None:
    m = ctx.memory
    m.seq_add(0, 0, None, 3)
    m.seq_cp(0, 1)
    assert m.cells[1].shift.tolist() == [3] * 16
    m.update()
    assert stream(ctx, 1) == stream(ctx, 0)
    assert m.seq_pos_max(1) == 18


def test_a_copy_to_itself_changes_nothing(ctx: pyggmlkv.Context) -> None:
    before = stream(ctx, 0)
    for p0, p1 in ((None, None), (2, 5)):
        ctx.memory.seq_cp(0, 0, p0, p1)
    assert not ctx.memory.has_update
    assert stream(ctx, 0) == before


def test_an_empty_source_empties_the_target(ctx: pyggmlkv.Context) -> None:
    ctx.memory.seq_cp(2, 3)
    ctx.memory.update()
    assert ctx.memory.seq_pos_max(3) is None


def test_in_a_unified_cache_a_part_is_shared_without_moving_a_byte(model: pyggmlkv.Model) -> None:
    with pyggmlkv.Context(model, n_ctx=64, n_seq_max=4, kv_unified=True, n_threads=1) as ctx:
        ctx.decode(Batch(range(16)))
        data = ctx.memory.k(0).tobytes()
        ctx.memory.seq_cp(0, 1, 0, 8)
        assert not ctx.memory.has_update
        assert ctx.memory.k(0).tobytes() == data
        assert [ctx.memory.seq_pos_max(s) for s in (0, 1)] == [15, 7]
        cells = ctx.memory.cells[0]
        assert [cells.seq_ids(i) for i in (0, 7, 8)] == [[0, 1], [0, 1], [0]]
        assert np.count_nonzero(cells.pos >= 0) == 16
