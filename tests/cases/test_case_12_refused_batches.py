"""Cases 12 and 14 on every kind of memory: one sequence of a batch is wrong, or has no room; nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.errors import BatchError, NoSlotError

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "kv": ("llama", {"kv_unified": True}),
    "streams": ("llama", {}),
    "iswa": ("gemma3", {"kv_unified": True}),
    "iswa-streams": ("gemma3", {}),
    "recurrent": ("mamba", {}),
    "hybrid": ("jamba", {"kv_unified": True}),
}


@pytest.fixture(params=KINDS)
def make(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]
) -> Callable[..., pyggmlkv.Context]:
    recipe, kind = KINDS[request.param]

    def opened(**settings: Any) -> pyggmlkv.Context:
        """Sequences 0, 1 and 2 hold positions 0 to 5."""
        model = pyggmlkv.Model.load(tiny_model(recipe))
        ctx = pyggmlkv.Context(
            model, n_seq_max=3, n_threads=1, **{"n_ctx": 96, "n_ubatch": 8, **kind, **settings}
        )
        ctx.decode(Batch(np.arange(18), seq_id=np.repeat([0, 1, 2], 6), logits="none"))
        return ctx

    return opened


def held(ctx: pyggmlkv.Context) -> tuple[Any, ...]:
    m = ctx.memory
    return (ctx.state_get(), m.render(), [(m.seq_pos_min(s), m.seq_pos_max(s)) for s in range(3)])


def test_one_wrong_sequence_is_named_and_the_corrected_batch_works(
    make: Callable[..., pyggmlkv.Context],
) -> None:
    ctx = make()
    before = held(ctx)
    with pytest.raises(BatchError, match=r"sequence 2.*\b5\b.*\b9\b") as refused:
        ctx.decode(Batch([1, 2, 3], pos=[6, 6, 9], seq_id=[0, 1, 2]))
    assert isinstance(refused.value, ValueError)
    assert held(ctx) == before
    ctx.decode(Batch([1, 2, 3], pos=[6, 6, 6], seq_id=[0, 1, 2]))
    assert [ctx.memory.seq_pos_max(s) for s in range(3)] == [6, 6, 6]


def test_no_room_says_where_and_how_much_and_changes_nothing(make: Callable[..., pyggmlkv.Context]) -> None:
    ctx = make()
    if type(ctx.memory).__name__ == "RecurrentMemory":
        return  # states do not fill up
    before = held(ctx)
    with pytest.raises(NoSlotError, match=r"\d+ cells") as refused:
        ctx.decode(Batch(np.arange(90) % 100))
    assert isinstance(refused.value, MemoryError)
    assert "kv" in str(refused.value)
    assert held(ctx) == before
    ctx.decode(Batch([4]))
    assert ctx.memory.seq_pos_max(0) == 6


@pytest.mark.parametrize("op", ["seq_cp", "seq_keep", "seq_add", "seq_div", "seq_pos_max"])
@pytest.mark.parametrize("seq_id", [-1, 256])
def test_case_27_an_id_that_is_no_sequence_is_refused(
    make: Callable[..., pyggmlkv.Context], op: str, seq_id: int
) -> None:
    ctx = make()
    before = held(ctx)
    args = {"seq_cp": (seq_id, 0), "seq_add": (seq_id, 0, None, 1), "seq_div": (seq_id, 0, None, 2)}.get(
        op, (seq_id,)
    )
    with pytest.raises(pyggmlkv.errors.SequenceError, match=str(seq_id)):
        getattr(ctx.memory, op)(*args)
    assert held(ctx) == before


@pytest.mark.parametrize("every", [None, -1])
def test_case_27_minus_one_removes_from_all_sequences(
    make: Callable[..., pyggmlkv.Context], every: int | None
) -> None:
    ctx = make()
    before = held(ctx)
    has_states = type(ctx.memory).__name__ in ("RecurrentMemory", "HybridMemory")
    assert ctx.memory.seq_rm(every, 2, 4) is not has_states
    if has_states:
        assert held(ctx) == before
    else:
        assert [ctx.memory.seq_pos_max(s) for s in range(3)] == [5] * 3
        assert ctx.memory.view().used_cells == 12
    assert ctx.memory.seq_rm(every, -1, -1) is True
    assert [ctx.memory.seq_pos_max(s) for s in range(3)] == [None] * 3
