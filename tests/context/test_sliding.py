"""A live sliding-window memory: positions after deep cuts, slots for many sequences, what can be resumed (05, 14)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.memory.sliding import SlidingKVCache, swa_size

WINDOW = 8


@pytest.fixture(scope="module")
def gemma(tiny_model: Callable[[str], Path]) -> Iterator[pyggmlkv.Model]:
    with pyggmlkv.Model.load(tiny_model("gemma3")) as model:
        assert (model.hparams.n_swa, model.hparams.swa_type) == (WINDOW, "standard")
        yield model


def test_a_deep_cut_leaves_the_range_of_the_full_part(
    gemma: pyggmlkv.Model, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = pyggmlkv.Context(gemma, n_ctx=64, n_ubatch=8, n_threads=1)
    m = ctx.memory
    ctx.decode(Batch(np.arange(40)))
    for _ in range(50):
        assert m.seq_rm(0, 10, None)
        assert m.seq_pos_max(0) == 9
        assert m.seq_pos_min(0) is not None
        ok, why = m.can_resume(0, 10)
        assert not ok
        assert "forgotten" in why
        with caplog.at_level(logging.WARNING, "pyggmlkv"):
            ctx.decode(Batch([1, 2, 3, 4]))
        assert "forgotten" in caplog.text
        assert m.seq_pos_max(0) == 13
        for part in m.parts:
            pos = part.streams.cells[0].pos
            used = pos[pos >= 0]
            assert len(np.unique(used)) == len(used)
    assert m.base.streams.cells[0].n_used == 14
    m.seq_rm(0)
    assert (m.seq_pos_min(0), m.seq_pos_max(0)) == (None, None)


def test_going_on_at_the_end_or_a_little_before_it_is_told_apart(gemma: pyggmlkv.Model) -> None:
    ctx = pyggmlkv.Context(gemma, n_ctx=64, n_ubatch=8, n_threads=1)
    ctx.decode(Batch(np.arange(30)))
    assert ctx.memory.can_resume(0, 30) == (True, "")
    assert not ctx.memory.can_resume(0, 29)[0]
    assert not ctx.memory.can_resume(0, 31)[0]


@pytest.mark.parametrize("seed", range(6))
def test_two_interleaved_sequences_always_find_slots(gemma: pyggmlkv.Model, seed: int) -> None:
    ctx = pyggmlkv.Context(
        gemma, n_ctx=128, n_ubatch=8, n_batch=32, n_seq_max=2, kv_unified=True, n_threads=1
    )
    rng = np.random.default_rng(seed)
    left = [60, 60]
    while any(left):
        seq = int(rng.integers(0, 2))
        n = int(min(left[seq], rng.integers(1, 33)))
        if n:
            ctx.decode(Batch(rng.integers(0, 100, n), seq_id=seq))
            left[seq] -= n
    assert [ctx.memory.seq_pos_max(s) for s in range(2)] == [59, 59]


@pytest.mark.parametrize("kv_size", [16, 64, 255, 256, 4096])
@pytest.mark.parametrize("n_seq_max", [1, 2, 8])
@pytest.mark.parametrize("unified", [True, False])
def test_the_sliding_part_holds_every_window_and_one_ubatch(
    gemma: pyggmlkv.Model, kv_size: int, n_seq_max: int, unified: bool
) -> None:
    import dataclasses

    ctx = pyggmlkv.Context(gemma, n_ctx=64, n_threads=1)
    assert isinstance(ctx.memory, SlidingKVCache)
    spec = dataclasses.replace(ctx.memory.swa.spec, kv_size=kv_size, n_seq_max=n_seq_max, unified=unified)
    wanted = min(kv_size, WINDOW * (n_seq_max if unified else 1) + 32)
    size = swa_size(spec, 32)
    assert wanted <= size
    assert size <= kv_size or size == 256


def test_no_slot_names_the_part(gemma: pyggmlkv.Model) -> None:
    ctx = pyggmlkv.Context(gemma, n_ctx=16, n_ubatch=8, n_threads=1)
    ctx.decode(Batch(np.arange(10)))
    with pytest.raises(pyggmlkv.errors.NoSlotError, match="base"):
        ctx.decode(Batch(np.arange(10)))
    assert ctx.memory.seq_pos_max(0) == 9


def test_pruning_keeps_only_what_a_later_query_can_see_and_changes_no_answer(gemma: pyggmlkv.Model) -> None:
    def run(forget: str) -> tuple[list[np.ndarray], pyggmlkv.Context]:
        ctx = pyggmlkv.Context(gemma, n_ctx=256, n_ubatch=8, n_threads=1, swa_forget=forget, flash_attn="off")
        rows = []
        for first in range(0, 48, 12):
            ctx.decode(Batch(np.arange(first, first + 12), logits="all"))
            rows.append(ctx.logits)
        return rows, ctx

    reused, keeping = run("reuse")
    pruned, pruning = run("prune")
    used = [ctx.memory.swa.streams.cells[0].n_used for ctx in (keeping, pruning)]
    assert used[1] == WINDOW < used[0]
    assert pruning.memory.base.streams.cells[0].n_used == 48
    for a, b in zip(reused, pruned, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)  # a key that is missed moves a logit by a tenth
    with pytest.raises(pyggmlkv.errors.ParameterError, match="swa_forget"):
        pyggmlkv.Context(gemma, swa_forget="never")
