"""Layers that borrow another layer's rows, and caches on another cache's cells (case 37 of the public reports)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pyggmlkv import (
    Batch,
    KVCache,
    KVSpec,
    LayerSpec,
    SharedKVCache,
    SharedSlidingKVCache,
    SlidingKVCache,
    plan,
)
from pyggmlkv.binding import ComputeGraph, TensorArena, ops
from pyggmlkv.errors import CacheError
from pyggmlkv.memory.kv.step import KVStep
from pyggmlkv.memory.protocol import AttentionStep
from pyggmlkv.state.live import Live
from pyggmlkv.state.writer import save_bytes
from tests.memory.live import stored, write
from tests.oracle.rope_naive import turned

OWNERS = LayerSpec.uniform(n_layer=2, n_head_kv=2, head_dim=64)
SPEC = KVSpec(OWNERS, kv_size=64, type_k="f32", type_v="f32", n_swa=8, swa_type="standard")
BORROWED = {2: 1, 3: 0}
"""Layer 2 slides and reads layer 1; layer 3 is full and reads layer 0."""


def is_swa(il: int) -> bool:
    return il in (1, 2)


def sliding(reuse: dict[int, int]) -> SlidingKVCache:
    return SlidingKVCache(dataclasses.replace(SPEC, reuse=reuse), is_swa=is_swa, n_ubatch=16)


def read_rows(cache: KVCache, step: AttentionStep, il: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V as a graph of layer `il` reads them."""
    with TensorArena(16, graph_nodes=16) as ctx:
        graph = ComputeGraph(ctx, 16)
        k, v = ops.cont(ctx, step.get_k(ctx, il)), ops.cont(ctx, step.get_v(ctx, il))
        for t in (k, v):
            t.set_output()
            graph.build_forward_expand(t)
        cache.runner.alloc(graph)
        cache.runner.compute(graph)
        found = k.to_numpy(), v.to_numpy()
        cache.runner.forget()
    return found


def test_only_owners_have_storage_and_donors_hold_what_they_would_alone() -> None:
    with sliding(BORROWED) as borrowed, sliding({}) as alone:
        for cache in (borrowed, alone):
            write(cache, Batch([0] * 20), n_ubatch=8)
        assert borrowed.memory_breakdown() == alone.memory_breakdown()
        assert borrowed.size_k_bytes == alone.size_k_bytes
        for il in (0, 1):
            assert (borrowed.k(il) == alone.k(il)).all() and (borrowed.v(il) == alone.v(il)).all()
            assert stored(borrowed.part_of(il), il) == stored(alone.part_of(il), il)


@pytest.mark.parametrize(("il", "owner"), BORROWED.items())
def test_borrowing_layers_read_exactly_the_donors_rows(il: int, owner: int) -> None:
    with sliding(BORROWED) as cache:
        write(cache, Batch([0] * 12))
        [step] = plan(cache, Batch([0]))
        step.apply()
        part, half = (cache.swa, step.swa) if is_swa(il) else (cache.base, step.base)
        for mine, donors in zip(read_rows(part, half, il), read_rows(part, half, owner), strict=True):
            assert np.abs(mine).max() > 0
            assert (mine == donors).all()
        assert (cache.k(il) == cache.k(owner)).all()


@pytest.mark.parametrize("side", ["cpy_k", "cpy_v"])
def test_a_borrowing_layer_cannot_write(side: str) -> None:
    with sliding(BORROWED) as cache, TensorArena(16) as ctx:
        [step] = plan(cache, Batch([0] * 4))
        cur, idxs = ctx.new_tensor("f32", 64, 2, 4), ctx.new_tensor("i64", 4)
        with pytest.raises(CacheError, match="layer 3 reads the rows of layer 0 and must not write them"):
            getattr(step.base, side)(ctx, cur, idxs, 3)


def test_a_shift_turns_each_row_once() -> None:
    with sliding(BORROWED) as cache:
        write(cache, Batch([0] * 12))
        before = {il: cache.k(il)[0, :12].reshape(12, 2, 64) for il in (0, 1)}
        cache.seq_rm(0, 0, 3)
        cache.seq_add(0, 3, None, -3)
        cache.update()
        for il, owner in (*BORROWED.items(), (0, 0), (1, 1)):
            want = turned(before[owner], np.where(np.arange(12) < 3, 0, -3))
            np.testing.assert_allclose(cache.k(il)[0, :12].reshape(12, 2, 64), want, atol=1e-5)


def test_state_holds_each_owner_once() -> None:
    with sliding(BORROWED) as borrowed, sliding({}) as alone:
        for cache in (borrowed, alone):
            write(cache, Batch([0] * 12))
        assert save_bytes(Live("llama", borrowed, 4)) == save_bytes(Live("llama", alone, 4))


@pytest.mark.parametrize(
    ("reuse", "why"),
    [({2: 5}, "layer 5, which has no storage here"), ({1: 0}, "layer 0 but has storage of its own")],
)
def test_what_cannot_be_borrowed_is_refused(reuse: dict[int, int], why: str) -> None:
    with pytest.raises(CacheError, match=why):
        KVCache(dataclasses.replace(SPEC, n_swa=0, swa_type="none", reuse=reuse))


def test_a_layer_cannot_borrow_across_the_parts_of_a_sliding_cache() -> None:
    with pytest.raises(CacheError, match="layer 2 is to reuse layer 0"):
        sliding({2: 0})


# cells shared with another cache


def test_a_shared_cache_reads_the_others_rows_and_owns_nothing() -> None:
    with KVCache(dataclasses.replace(SPEC, n_swa=0, swa_type="none")) as cache:
        shared = SharedKVCache(cache, {0: 1, 7: 1})
        write(cache, Batch([0] * 12))
        assert (shared.memory_breakdown(), shared.size_k_bytes, shared.size_v_bytes) == ({}, 0, 0)
        assert (shared.k(7) == cache.k(1)).all() and (shared.v(0) == cache.v(1)).all()
        [step] = plan(shared, Batch([0]))
        assert isinstance(step, KVStep)
        step.apply()
        assert (read_rows(shared, step, 7)[0] == read_rows(cache, step_of(cache), 1)[0]).all()
        mask = np.zeros((1, step.n_kv), np.float32)
        step.fill_mask(mask, True)
        assert (np.flatnonzero(mask[0] == 0) == np.arange(12)).all()
        step.undo()
        step.commit()
        assert cache.view().used_cells == 12


def step_of(cache: KVCache) -> KVStep:
    [step] = plan(cache, Batch([0]))
    assert isinstance(step, KVStep)
    step.apply()
    step.undo()
    return step


def test_sequence_operations_of_a_shared_cache_do_nothing_and_positions_are_the_others() -> None:
    spec = dataclasses.replace(SPEC, n_swa=0, swa_type="none", n_seq_max=2, unified=True)
    with KVCache(spec) as cache:
        write(cache, Batch([0] * 12))
        shared, before = SharedKVCache(cache, {0: 0}), stored(cache, 0)
        assert shared.seq_rm(0, 2, 4)
        shared.seq_cp(0, 1)
        shared.seq_keep(1)
        shared.seq_add(0, 0, None, 3)
        shared.seq_div(0, 0, None, 2)
        shared.clear()
        assert shared.defrag().n_moves == 0
        assert stored(cache, 0) == before
        assert (shared.seq_pos_min(0), shared.seq_pos_max(0), shared.seq_pos_max(1)) == (0, 11, None)
        assert save_bytes(Live("llama", cache, 4)) != save_bytes(Live("llama", shared, 4))


def test_pending_turns_of_the_other_cache_are_done_before_it_is_read() -> None:
    with KVCache(dataclasses.replace(SPEC, n_swa=0, swa_type="none")) as cache:
        write(cache, Batch([0] * 12))
        before = cache.k(0)
        shared = SharedKVCache(cache, {0: 0})
        cache.seq_add(0, 0, None, 2)
        assert shared.has_update
        plan(shared, Batch([0]))
        assert not cache.has_update
        assert np.abs(shared.k(0) - before).max() > 0.1


def test_a_full_cache_still_serves_the_shared_one() -> None:
    with KVCache(dataclasses.replace(SPEC, n_swa=0, swa_type="none", kv_size=16)) as cache:
        write(cache, Batch([0] * 16))
        [step] = plan(SharedKVCache(cache, {0: 0}), Batch([0]))
        step.apply()
        assert step.n_kv == 16


def test_a_shared_layer_cannot_write_or_name_a_layer_that_is_not_there() -> None:
    with KVCache(dataclasses.replace(SPEC, n_swa=0, swa_type="none")) as cache, TensorArena(16) as ctx:
        [step] = plan(SharedKVCache(cache, {5: 1}), Batch([0] * 4))
        with pytest.raises(CacheError, match="layer 5 reads the rows of layer 1"):
            step.cpy_k(ctx, ctx.new_tensor("f32", 64, 2, 4), ctx.new_tensor("i64", 4), 5)
        with pytest.raises(CacheError, match=r"layer 0 is to share layer 9, .*it has \[0, 1\]"):
            SharedKVCache(cache, {0: 9})


def test_a_shared_sliding_cache_puts_each_layer_where_its_source_is() -> None:
    with sliding(BORROWED) as cache:
        write(cache, Batch([0] * 20), n_ubatch=8)
        shared = SharedSlidingKVCache(cache, {0: 1, 1: 3})
        assert (shared.part_of(0) is shared.swa, shared.part_of(1) is shared.base) == (True, True)
        assert (shared.k(0) == cache.k(1)).all() and (shared.k(1) == cache.k(0)).all()
        [step] = plan(shared, Batch([0]))
        step.apply()
        step.commit()
        assert (shared.seq_pos_max(0), shared.can_resume(0, 20)) == (19, (True, ""))
