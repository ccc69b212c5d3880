"""Both ways of forgetting behind a sliding window, commit and undo, and positions after deep cuts (case 05).

"reuse": new tokens take over cells that every later query is past. "prune": a committed step empties them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch, KVSpec, LayerSpec, SlidingKVCache, plan
from pyggmlkv.errors import NoSlotError
from pyggmlkv.memory.mask import SlidingWindow
from tests.memory.live import stored, write

W = 8
SPEC = KVSpec(
    LayerSpec.uniform(n_layer=2, n_head_kv=1, head_dim=32), kv_size=128, n_swa=W, swa_type="standard"
)
FORGET = ["reuse", "prune"]
Forget = Literal["reuse", "prune"]


def sliding(forget: Forget, n_ubatch: int = 8, **settings: object) -> SlidingKVCache:
    spec = dataclasses.replace(SPEC, forget=forget, **settings)
    return SlidingKVCache(spec, is_swa=lambda il: il == 1, n_ubatch=n_ubatch)


def positions(cache: SlidingKVCache, seq_id: int = 0) -> list[int]:
    cells = cache.swa.streams.of(seq_id)
    return sorted(cells.pos[cells.find(seq_id)].tolist())


@pytest.mark.parametrize("n_ubatch", [1, 3, 8])
@pytest.mark.parametrize("swa_type", ["standard", "chunked", "symmetric"])
def test_pruning_leaves_exactly_what_the_last_query_sees(swa_type: str, n_ubatch: int) -> None:
    with sliding("prune", swa_type=swa_type) as cache:
        for n in (1, 5, 9, 16, 2):
            write(cache, Batch([0] * n), n_ubatch)
            last = cache.seq_pos_max(0)
            window = SlidingWindow(swa_type, W)
            assert positions(cache) == [p for p in range(last + 1) if not window.is_masked(p, last)]
        assert cache.base.view().used_cells == 33


def test_reuse_keeps_cells_until_a_token_takes_them() -> None:
    with sliding("reuse") as cache:
        write(cache, Batch([0] * 12), 4)
        assert positions(cache) == list(range(12))


@pytest.mark.parametrize("forget", FORGET)
def test_a_window_and_one_ubatch_of_cells_are_enough_for_any_length(forget: Forget) -> None:
    with sliding(forget) as cache:
        assert cache.swa.spec.kv_size == W + 8
        for _ in range(4):
            write(cache, Batch([0] * 30), 8)
        assert positions(cache)[-W:] == list(range(120 - W, 120))
        assert cache.swa.view().used_cells <= W + 8


def test_one_ubatch_beyond_a_pruned_window_finds_no_slot_and_changes_nothing() -> None:
    with sliding("prune") as cache:
        write(cache, Batch([0] * 20), 8)
        before = stored(cache.swa, 1), stored(cache.base, 0), cache.swa.streams.heads[:]
        with pytest.raises(NoSlotError, match="kv swa"):
            plan(cache, Batch([0] * 20), 9)
        assert (stored(cache.swa, 1), stored(cache.base, 0), cache.swa.streams.heads) == before


def test_what_queries_see_is_the_same_both_ways() -> None:
    with sliding("reuse") as reuse, sliding("prune") as prune:
        for n in (5, 9, 16, 1, 1, 30):
            seen = []
            for cache in (reuse, prune):
                [*_, step] = plan(cache, Batch([0] * n), 8)
                write(cache, Batch([0] * (n - step.ubatch.n_tokens)), 8) if n > step.ubatch.n_tokens else None
                [step] = plan(cache, Batch([0] * step.ubatch.n_tokens), 8)
                step.apply()
                mask = np.zeros((step.ubatch.n_tokens, step.swa.n_kv), np.float32)
                step.swa.fill_mask(mask, True)
                pos = cache.swa.streams.cells[0].pos
                seen.append([sorted(pos[: mask.shape[1]][row == 0].tolist()) for row in mask])
                step.commit()
            assert seen[0] == seen[1]
            assert all(len(row) == W or row[0] == 0 for row in seen[0])


def test_sequences_are_pruned_each_by_its_own_window() -> None:
    with sliding("prune", n_seq_max=2, unified=True) as cache:
        write(cache, Batch([0] * 12, seq_id=0), 8)
        write(cache, Batch([0] * 3, seq_id=1), 8)
        assert (positions(cache, 0), positions(cache, 1)) == (list(range(4, 12)), [0, 1, 2])
        write(cache, Batch([0] * 14, seq_id=1), 8)
        assert (positions(cache, 0), positions(cache, 1)) == (list(range(4, 12)), list(range(9, 17)))


def test_cells_shared_by_two_sequences_stay_for_the_one_that_sees_them() -> None:
    with sliding("prune", n_seq_max=2, unified=True) as cache:
        write(cache, Batch([0] * 8, seq_id=0), 8)
        cache.seq_cp(0, 1)
        write(cache, Batch([0] * 6, seq_id=0), 8)
        assert (positions(cache, 0), positions(cache, 1)) == (list(range(6, 14)), list(range(8)))


# commit and undo: what the older caches called commit() and restore()


@pytest.mark.parametrize("forget", FORGET)
def test_undo_gives_back_what_apply_took_until_commit(forget: Forget) -> None:
    with sliding(forget) as cache:
        write(cache, Batch([0] * 14), 8)
        parts = (cache.base, cache.swa)

        def now() -> list[object]:
            return [(part.streams.cells[0].pos.tolist(), part.streams.heads[:]) for part in parts]

        before = now()
        steps = plan(cache, Batch([0] * 12), 8)
        assert now() == before
        for step in steps:
            step.apply()
            if step is steps[0]:
                step.commit()
                committed = now()
        assert now() != committed
        steps[1].undo()
        assert now() == committed
        steps[0].undo()
        assert now() == committed
        assert cache.seq_pos_max(0) == 21


# case 05


@pytest.mark.parametrize("forget", FORGET)
def test_positions_stay_true_over_rounds_of_deep_cuts(forget: Forget) -> None:
    with sliding(forget) as cache:
        write(cache, Batch([0] * 40), 8)
        for _ in range(50):
            assert cache.seq_rm(0, 10)
            assert (cache.seq_pos_max(0), cache.seq_pos_min(0)) == (9, 0)
            ok, why = cache.can_resume(0, 10)
            assert not ok
            assert "forgotten" in why
            write(cache, Batch([0] * 4), 8)
            assert cache.seq_pos_max(0) == 13
            assert sorted(pos for _, pos in stored(cache.base, 0)) == list(range(14))  # no position twice
            assert positions(cache) == [10, 11, 12, 13]
            assert cache.base.view().used_cells == 14
            assert cache.swa.view().used_cells == 4
        cache.seq_rm(0)
        assert (cache.seq_pos_min(0), cache.seq_pos_max(0)) == (None, None)


# through a whole model


@pytest.mark.parametrize("splits", [[64], [40, 1, 1, 1, 21]], ids=["prompt", "steps"])
def test_logits_are_the_same_both_ways(tiny_model: Callable[[str], Path], splits: list[int]) -> None:
    tokens = np.random.default_rng(1).integers(0, 100, 64)
    rows = []
    with pyggmlkv.Model.load(tiny_model("gemma2")) as model:
        for forget in FORGET:
            with pyggmlkv.Context(model, n_ctx=128, n_ubatch=16, n_threads=1) as ctx:
                swa = ctx.memory.swa
                streams = dataclasses.replace(swa.streams.spec, forget=forget)
                swa.streams.spec = streams
                at = 0
                for n in splits:
                    ctx.decode(Batch(tokens[at : at + n], logits="all"))
                    rows.append((forget, ctx.logits.copy()))
                    at += n
                window = swa.streams.window
                kept = sorted(swa.streams.cells[0].pos[swa.streams.cells[0].find(0)].tolist())
                if forget == "prune":
                    assert kept == [p for p in range(64) if not window.is_masked(p, 63)]
    reuse, prune = (np.concatenate([row for f, row in rows if f == forget]) for forget in FORGET)
    assert np.abs(reuse - prune).max() < 2e-3 * np.abs(reuse).max()
