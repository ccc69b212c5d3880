"""No update allocates: shifts of every type and defrags run in the compute memory reserved at construction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch, KVCache, KVSpec, LayerSpec
from pyggmlkv.memory.kv import k_shift
from pyggmlkv.memory.kv.k_shift import MIN_CHUNK, chunk_size
from tests.memory.live import stored, write
from tests.oracle.rope_naive import turned

TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]


@pytest.mark.parametrize("recipe", ["llama", "gemma2", "deepseek2"])
@pytest.mark.parametrize("type_k", ["f16", "bf16", "q8_0"])
def test_compute_memory_does_not_grow_with_shifts_and_defrags(
    tiny_model: Callable[[str], Path], recipe: str, type_k: str
) -> None:
    with (
        pyggmlkv.Model.load(tiny_model(recipe)) as model,
        pyggmlkv.Context(
            model, n_ctx=2048, n_ubatch=32, n_seq_max=2, kv_unified=True, n_threads=1, type_k=type_k
        ) as ctx,
    ):
        before = ctx.memory_breakdown()
        ctx.decode(Batch(np.arange(60) % 100, pos=np.repeat(np.arange(30), 2), seq_id=[0, 1] * 30))
        memory = ctx.memory
        memory.seq_rm(0, 4, 12)
        memory.seq_add(0, 12, None, -8)
        assert memory.update()
        assert memory.defrag().n_cells > 0
        memory.seq_div(1, 10, None, 2)
        ctx.decode(Batch([1]))
        assert ctx.memory_breakdown() == before


@pytest.mark.parametrize("attn_rot", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize("type_k", TYPES)
def test_keys_turned_in_chunks_are_those_turned_at_once(
    monkeypatch: pytest.MonkeyPatch, type_k: str, attn_rot: bool
) -> None:
    spec = KVSpec(
        LayerSpec.uniform(n_layer=2, n_head_kv=2, head_dim=64), kv_size=200, type_k=type_k, attn_rot=attn_rot,
        n_seq_max=2,
    )  # fmt: skip
    found = []
    for unreserved in (1 << 30, 0, 100_000):
        with KVCache(spec) as cache, monkeypatch.context() as patch:
            for s in (0, 1):
                write(cache, Batch([0] * 150, seq_id=s))
            cache.seq_add(0, 40, None, 5)
            cache.seq_add(1, 0, 70, 9)
            # what the writes reserved is not counted: as if the runner had reserved only so much
            patch.setattr(cache.runner, "buffer_sizes", dict)
            patch.setattr(k_shift, "UNRESERVED", unreserved)
            n = chunk_size(cache.storage, cache.runner, 64 if attn_rot else 0)
            assert (n == 400) == (
                unreserved == 1 << 30 or (unreserved == 100_000 and type_k in ("f32", "f16"))
            )
            assert n % MIN_CHUNK == 0 or n == 400
            cache.update()
            # empty cells aside: iq4_nl leaves the codes of a block of zeros undefined
            found.append([cache.k(il, False)[:, :150].tobytes() for il in (0, 1)])
            assert not cache.k(0)[:, 150:].any()
    assert found[0] == found[1] == found[2]


def test_what_was_turned_before_a_failure_is_not_turned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KVSpec(LayerSpec.uniform(n_layer=1, n_head_kv=1, head_dim=32), kv_size=96, type_k="f32")
    with KVCache(spec) as cache:
        write(cache, Batch([0] * 96))
        rows = cache.k(0)[0].reshape(96, 1, 32)
        cache.seq_add(0, 0, None, 3)
        compute, calls = cache.runner.compute, []

        def once(*args: object, **settings: object) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            compute(*args, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(k_shift, "UNRESERVED", 0)
            patch.setattr(cache.runner, "buffer_sizes", dict)
            patch.setattr(cache.runner, "compute", once)
            with pytest.raises(KeyboardInterrupt):
                cache.update()
        assert (cache.cells[0].shift != 0).tolist() == [False] * 32 + [True] * 64
        assert cache.has_update
        cache.update()
        np.testing.assert_allclose(cache.k(0)[0].reshape(96, 1, 32), turned(rows, np.full(96, 3)), atol=1e-5)


# case 25


@pytest.mark.parametrize("type_k", ["f32", "f16"])
def test_several_cuts_and_moves_before_one_update_turn_each_key_by_its_total(type_k: str) -> None:
    spec = KVSpec(LayerSpec.uniform(n_layer=1, n_head_kv=2, head_dim=64), kv_size=32, type_k=type_k)
    with KVCache(dataclasses.replace(spec)) as cache:
        write(cache, Batch([0] * 9))  # a b c d e f g h j
        rows = dict(zip("abcdefghj", cache.k(0)[0].astype(np.float32), strict=False))
        cache.seq_rm(0, 2, 4)
        cache.seq_add(0, 4, None, -2)
        cache.seq_rm(0, 4, 5)
        cache.seq_add(0, 5, None, -1)
        shift = {pos: row[2] for (_, pos), row in stored(cache, 0).items()}
        assert shift == {0: 0, 1: 0, 2: -2, 3: -2, 4: -3, 5: -3}
        cache.update()
        cells, keys = cache.streams.cells[0], cache.k(0)[0]
        for pos, token in enumerate("abefhj"):
            cell = int(cells.find(0, pos, pos + 1)[0])
            want = turned(rows[token].reshape(1, 2, 64), np.array([shift[pos]])).reshape(-1)
            np.testing.assert_allclose(
                keys[cell].astype(np.float32), want, atol=1e-5 if type_k == "f32" else 4e-3
            )
