"""Defrag on live memories moves rows bit by bit with everything that belongs to them, and can be spread over updates.

Case 36 of the public reports: garbage right after a defrag.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch, KVCache, KVSpec, LayerSpec, RecurrentMemory, RecurrentSpec, SlidingKVCache
from pyggmlkv.backend.runner import Runner
from pyggmlkv.errors import ComputeError
from tests.memory.live import alternating, stored, write

LAYERS = LayerSpec.uniform(n_layer=2, n_head_kv=2, head_dim=64)
SPEC = KVSpec(LAYERS, kv_size=64, n_seq_max=3, unified=True)
KINDS = {
    "f16": {},
    "f16-transposed": {"v_trans": True},
    "q8_0-q4_0": {"type_k": "q8_0", "type_v": "q4_0"},
    "q4_0-q8_0": {"type_k": "q4_0", "type_v": "q8_0"},
    "f32-bf16-transposed": {"type_k": "f32", "type_v": "bf16", "v_trans": True},
    "iq4_nl-q5_1": {"type_k": "iq4_nl", "type_v": "q5_1"},
    "mla": {"layers": (LayerSpec(0, 1, 96, 64, n_rot=32, n_embd_nope=64, has_v=False),)},
    "uneven-v-transposed": {"layers": (*LAYERS, LayerSpec(2, 1, 64, 32, 64)), "v_trans": True},
}


def holed(cache: KVCache) -> None:
    """Sequences 0 and 1 alternate; of 0 every second block of four is removed, 2 shares cells with 1."""
    write(cache, alternating(16))
    for p in range(0, 16, 8):
        cache.seq_rm(0, p, p + 4)
    cache.seq_cp(1, 2, 6, 12)


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
def test_rows_positions_owners_and_pending_shifts_are_where_they_were(settings: dict) -> None:
    with KVCache(dataclasses.replace(SPEC, **settings)) as cache:
        holed(cache)
        cache.seq_add(0, 12, None, -2)
        before = {il: stored(cache, il) for il in cache.storage.layers}
        assert any(row[2] for row in before[0].values())
        report = cache.defrag()
        assert {il: stored(cache, il) for il in cache.storage.layers} == before
        assert (cache.streams.cells[0].pos[: cache.view().used_cells] >= 0).all()
        assert cache.streams.cells[0].used_max_p1 == cache.view().used_cells == 24
        assert report.done and report.n_cells == 8 and report.fragmentation_before == 0.25
        row = sum(layer.k.nb[1] + (0 if layer.v is None else layer.v.nb[1]) for layer in cache.storage.owners)
        assert report.bytes_moved == report.n_cells * row
        assert cache.defrag() == dataclasses.replace(report, n_moves=0, n_cells=0, n_graphs=0, bytes_moved=0,
                                                     fragmentation_before=0.0)  # fmt: skip


def test_rows_really_move() -> None:
    with KVCache(SPEC) as cache:
        holed(cache)
        cells = cache.streams.cells[0]
        last = int(np.flatnonzero(cells.pos >= 0)[-1])
        row, pos = cache.k(1, dequantize=False)[0, last].tobytes(), int(cells.pos[last])
        assert cache.defrag().n_moves > 0
        assert cells.pos[last] == -1
        at = np.flatnonzero(cells.pos == pos)
        assert row in [cache.k(1, dequantize=False)[0, i].tobytes() for i in at]


def test_two_dimensional_places_move_along() -> None:
    with KVCache(dataclasses.replace(SPEC, n_pos_per_embd=4, unified=False, n_seq_max=1)) as cache:
        pos = np.stack([np.arange(12), np.arange(12) + 100, np.arange(12) + 200, np.zeros(12, int)])
        write(cache, Batch(embd=np.zeros((12, 1), np.float32), pos=pos.astype(np.int32)))
        cache.seq_rm(0, 2, 6)
        before = stored(cache, 0)
        assert before[0, 7][3] == (207, 107)
        assert cache.defrag().n_cells == 4
        assert stored(cache, 0) == before


def test_source_and_target_of_a_move_never_overlap() -> None:
    """A hole of one cell before a run of three: the last cell goes there, the run does not slide down."""
    with KVCache(SPEC) as cache:
        write(cache, Batch([0] * 4))
        cache.seq_rm(0, 0, 1)
        before = stored(cache, 1)
        report = cache.defrag()
        assert (report.n_moves, report.n_cells) == (1, 1)
        assert cache.streams.cells[0].pos[:4].tolist() == [3, 1, 2, -1]
        assert stored(cache, 1) == before


def test_every_stream_is_defragmented_and_waiting_copies_come_first() -> None:
    with KVCache(dataclasses.replace(SPEC, unified=False, v_trans=True)) as cache:
        for s in (0, 1):
            write(cache, Batch([0] * 12, seq_id=s))
            cache.seq_rm(s, 2, 5)
        cache.seq_cp(1, 2)
        want = {s: {p: row for (q, p), row in stored(cache, 0).items() if q == s} for s in (0, 1)}
        assert cache.defrag().n_cells == 9
        got = stored(cache, 0)
        for s, source in ((0, 0), (1, 1), (2, 1)):
            assert {p: row for (q, p), row in got.items() if q == s} == want[source]
        assert [c.used_max_p1 for c in cache.streams.cells] == [9, 9, 9]
        assert cache.streams.heads == [9, 9, 9]
        assert not cache.has_update


def test_a_limit_is_kept_and_further_updates_finish() -> None:
    with KVCache(SPEC) as cache:
        write(cache, alternating(16))
        cache.seq_rm(0)
        before = stored(cache, 0)
        report = cache.defrag(max_moves=3)
        assert (report.n_moves, report.done) == (3, False)
        rounds = 0
        while cache.has_update:
            assert cache.update()
            rounds += 1
            assert stored(cache, 0) == before
            assert rounds < 10
        assert rounds == 2
        assert cache.streams.cells[0].used_max_p1 == 16


def test_graphs_hold_no_more_nodes_than_the_runner_takes() -> None:
    with Runner(max_nodes=64) as runner, KVCache(SPEC, runner) as cache:
        write(cache, alternating(16))
        cache.seq_rm(0)
        before = stored(cache, 1)
        report = cache.defrag()
        assert (
            report.done and report.n_moves == 8 and report.n_graphs == 2
        )  # (64 - 8) // (4 tensors * 3 nodes) = 4
        assert stored(cache, 1) == before


def test_layers_that_fit_no_graph_are_split_over_several() -> None:
    layers = LayerSpec.uniform(n_layer=20, n_head_kv=1, head_dim=32)
    spec = KVSpec(layers, 64)
    with KVCache(spec) as cache, Runner(max_nodes=64) as small:
        write(cache, Batch([0] * 12))
        cache.seq_rm(0, 1, 3)
        before = {il: stored(cache, il) for il in range(20)}
        cache._runner = small  # built with room for the writes above, moved with less
        assert cache.defrag().done
        assert {il: stored(cache, il) for il in range(20)} == before


@pytest.mark.parametrize("threshold", [None, 0.9, 0.3])
def test_a_threshold_defragments_by_itself(threshold: float | None) -> None:
    spec = dataclasses.replace(SPEC, kv_size=4096, n_seq_max=2)
    with KVCache(spec) as cache:
        cache.defrag_threshold = threshold
        n = 2048
        write(cache, Batch([0] * (2 * n), pos=np.repeat(np.arange(n), 2), seq_id=[0, 1] * n), n_ubatch=4096)
        cache.seq_rm(0, 0, 2000)
        before = stored(cache, 1)
        assert cache.has_update == (threshold == 0.3)
        rounds = 0
        while cache.update():
            rounds += 1
        assert stored(cache, 1) == before
        assert rounds == (
            13 if threshold == 0.3 else 0
        )  # 1048 single holes, (1024 - 8) // 12 = 84 moves a graph
        assert cache.streams.cells[0].used_max_p1 == (2096 if rounds else 4096)


def test_a_stopped_run_moves_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    with KVCache(SPEC) as cache:
        holed(cache)
        before, pos = stored(cache, 0), cache.streams.cells[0].pos.copy()

        def stop(*_: object, **__: object) -> None:
            raise ComputeError("stopped")

        with monkeypatch.context() as patch:
            patch.setattr(cache.runner.scheduler, "graph_compute", stop)
            with pytest.raises(ComputeError):
                cache.defrag()
        assert (cache.streams.cells[0].pos == pos).all()
        assert stored(cache, 0) == before
        assert cache.defrag().done
        assert stored(cache, 0) == before


def test_both_parts_of_a_sliding_cache_are_defragmented() -> None:
    spec = dataclasses.replace(SPEC, n_swa=8, swa_type="standard")
    with SlidingKVCache(spec, is_swa=lambda il: il == 1, n_ubatch=32) as cache:
        write(cache, alternating(16), n_ubatch=8)
        cache.seq_rm(0, 9, 14)
        before = stored(cache.base, 0), stored(cache.swa, 1)
        report = cache.defrag()
        assert report.done and report.n_cells > 5
        assert (stored(cache.base, 0), stored(cache.swa, 1)) == before
        assert cache.base.view().used_cells == cache.base.streams.cells[0].used_max_p1
        assert cache.swa.view().used_cells == cache.swa.streams.cells[0].used_max_p1


def test_a_recurrent_memory_has_nothing_to_defragment() -> None:
    with RecurrentMemory(RecurrentSpec((0,), 4, 4)) as memory:
        assert (memory.defrag().n_moves, memory.defrag().done) == (0, True)


# through a whole model


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> pyggmlkv.Model:
    return pyggmlkv.Model.load(tiny_model("llama"))


def decoded(ctx: pyggmlkv.Context) -> None:
    """Two sequences turn by turn, every second block of sequence 0 removed."""
    tokens = np.random.default_rng(2).integers(0, 100, 64)
    ctx.decode(Batch(tokens, pos=np.repeat(np.arange(32), 2), seq_id=[0, 1] * 32))
    for p in range(0, 28, 8):
        ctx.memory.seq_rm(0, p, p + 4)


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q4_0")], ids="-".join)
@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_next_logits_equal_a_run_without_defrag(
    model: pyggmlkv.Model, flash_attn: str, types: tuple[str, str]
) -> None:
    """Within f32 rounding: the same rows are summed in another order. The bits are equal where order is."""
    if flash_attn == "off":
        types = (types[0], "f16")
    settings = {"n_ctx": 256, "n_seq_max": 2, "kv_unified": True, "n_threads": 1, "flash_attn": flash_attn}
    settings |= {"type_k": types[0], "type_v": types[1]}
    with pyggmlkv.Context(model, **settings) as moved, pyggmlkv.Context(model, **settings) as still:
        for ctx in (moved, still):
            decoded(ctx)
        assert moved.memory.defrag().n_cells > 0
        for _ in range(3):
            for ctx in (moved, still):
                ctx.decode(Batch([5, 6], seq_id=[0, 1], logits="all"))
            assert np.abs(moved.logits - still.logits).max() < 2e-3 * np.abs(still.logits).max()
            assert (moved.logits.argmax(1) == still.logits.argmax(1)).all()


def test_a_step_planned_before_a_threshold_defrag_is_planned_again(model: pyggmlkv.Model) -> None:
    settings = {"n_ctx": 3072, "n_seq_max": 2, "kv_unified": True, "n_threads": 2, "n_batch": 2400}
    tokens = np.random.default_rng(2).integers(0, 100, 2400)
    with pyggmlkv.Context(model, **settings) as ctx:
        ctx.decode(Batch(tokens, pos=np.r_[np.arange(1400), np.arange(1000)], seq_id=[0] * 1400 + [1] * 1000))
        ctx.memory.seq_rm(0)
        before = stored(ctx.memory, 0)
        ctx.memory.defrag_threshold = 0.1
        ctx.decode(Batch([5], seq_id=1))
        after = stored(ctx.memory, 0)
        assert {place: after[place] for place in before} == before
        assert ctx.memory.streams.cells[0].used_max_p1 == 1001
        assert not ctx.memory.has_update
