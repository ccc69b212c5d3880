"""Predicted bytes equal allocated bytes, by device; every memory shows its cells and counts."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from pyggmlkv import (
    Batch,
    HybridMemory,
    KVCache,
    KVSpec,
    LayerSpec,
    RecurrentMemory,
    RecurrentSpec,
    SlidingKVCache,
)
from pyggmlkv.backend.runner import Runner
from pyggmlkv.binding import cpu_device
from pyggmlkv.errors import CacheError
from tests.memory.live import write

LAYERS = (*LayerSpec.uniform(n_layer=2, n_head_kv=2, head_dim=64), LayerSpec(2, 1, 32, 96))
SPEC = KVSpec(LAYERS, kv_size=100)
TYPES = ["f32", "f16", "bf16", "q8_0", "q4_1", "iq4_nl"]
PER_BLOCK = {"f32": 4 * 32, "f16": 64, "bf16": 64, "q8_0": 34, "q4_1": 20, "iq4_nl": 18}
"""Bytes of 32 elements."""


@pytest.mark.parametrize(
    ("n_seq_max", "unified"), [(1, False), (3, False), (3, True)], ids=["one", "streams", "unified"]
)
@pytest.mark.parametrize("v_trans", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize(("type_k", "type_v"), list(itertools.product(TYPES, ["f16", "q8_0"])), ids="-".join)
def test_predicted_bytes_are_allocated_bytes(
    type_k: str, type_v: str, v_trans: bool, n_seq_max: int, unified: bool
) -> None:
    if v_trans and type_v != "f16":
        with pytest.raises(CacheError, match="needs flash attention"):
            KVCache.predict(dataclasses.replace(SPEC, type_v=type_v, v_trans=True))
        return
    spec = dataclasses.replace(
        SPEC, type_k=type_k, type_v=type_v, v_trans=v_trans, n_seq_max=n_seq_max, unified=unified
    )
    predicted = KVCache.predict(spec)
    with KVCache(spec) as cache:
        assert cache.memory_breakdown() == predicted
        cells = 100 * (1 if unified else n_seq_max)
        k = (128 + 128 + 32) // 32 * PER_BLOCK[type_k] * cells
        v = (3 * 128 if v_trans else 128 + 128 + 96) // 32 * PER_BLOCK[type_v] * cells
        assert (cache.size_k_bytes, cache.size_v_bytes) == (k, v)
        assert k + v <= predicted["CPU"] <= k + v + 6 * 64  # tensors begin at aligned addresses


def test_predictions_of_sliding_and_recurrent_memories() -> None:
    spec = dataclasses.replace(SPEC, kv_size=1000, n_swa=8, swa_type="standard")
    for swa_full in (False, True):
        with SlidingKVCache(spec, is_swa=lambda il: il == 1, n_ubatch=32, swa_full=swa_full) as cache:
            want = SlidingKVCache.predict(spec, is_swa=lambda il: il == 1, n_ubatch=32, swa_full=swa_full)
            assert cache.memory_breakdown() == want
    recurrent = RecurrentSpec((0, 2), 24, 320, n_seq_max=3, size=3, n_rs_seq=1)
    with RecurrentMemory(recurrent) as memory:
        assert (
            memory.memory_breakdown() == RecurrentMemory.predict(recurrent) == {"CPU": 2 * (24 + 320) * 6 * 4}
        )


def test_a_hybrid_memory_adds_its_parts() -> None:
    recr = RecurrentMemory(RecurrentSpec((3,), 8, 8))
    with HybridMemory(KVCache(SPEC), recr) as memory:
        assert memory.memory_breakdown() == {"CPU": KVCache.predict(SPEC)["CPU"] + 64}


@pytest.mark.parametrize("kind", ["nothing", "device", "backend", "runner"])
def test_a_cache_lives_on_whatever_a_person_has(kind: str) -> None:
    device = cpu_device()
    with Runner() as runner, device.init() as backend:
        where = {"nothing": None, "device": device, "backend": backend, "runner": runner}[kind]
        with KVCache(SPEC, where) as cache:
            assert list(cache.memory_breakdown()) == [device.name]
            write(cache, Batch([0] * 5))
            assert cache.view().used_cells == 5
        assert not runner.cpu.closed
        assert cache.runner.cpu.closed == (kind != "runner")


def test_every_memory_shows_cells_and_counts() -> None:
    kv = dataclasses.replace(SPEC, kv_size=32, n_swa=4, swa_type="standard")
    with (
        KVCache(SPEC) as plain,
        SlidingKVCache(kv, is_swa=lambda il: il == 1, n_ubatch=8) as sliding,
        RecurrentMemory(RecurrentSpec((3,), 8, 8, n_seq_max=2, size=2)) as recr,
    ):
        for cache in (plain, sliding):
            write(cache, Batch([0] * 6))
            assert (cache.view().used_cells, cache.view().token_count) == (6, 6)
            assert cache.cells[0].pos[:6].tolist() == list(range(6))
        assert sliding.swa.view().n_cells == 12
        hybrid = HybridMemory(plain, recr)
        assert hybrid.view().used_cells == 6
        assert (recr.view().used_cells, recr.view().n_cells, recr.view().max_contiguous) == (0, 2, 2)
        assert (hybrid.k(0) == plain.k(0)).all() and np.abs(hybrid.v(1)).max() > 0
        assert (hybrid.size_k_bytes, hybrid.size_v_bytes) == (plain.size_k_bytes, plain.size_v_bytes)
