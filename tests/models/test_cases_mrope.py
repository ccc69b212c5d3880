"""M-RoPE: images whose tokens share a time position (09), no K-shift (10), drafts cut by position, not by count (18)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.errors import BatchError, ShiftError
from pyggmlkv.memory.config import KVSpec, LayerSpec, RopeSpec
from pyggmlkv.memory.hybrid import HybridMemory
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.recurrent.memory import RecurrentMemory, RecurrentSpec
from tests.oracle.libllama import Library
from tests.oracle.tiny_models import TinyModel
from tests.side_by_side import Models, Pair, Setup

TinyModels = Callable[[str | TinyModel], Path]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
N_EMBD = 256
SETTINGS: dict[str, Any] = {
    "n_ctx": 256,
    "n_threads": 1,
    "flash_attn": "off",
    "type_k": "f32",
    "type_v": "f32",
}


@pytest.fixture(scope="module")
def models(reference: Library, tiny_model: TinyModels) -> Iterator[Models]:
    with Models(reference, tiny_model("qwen2vl")) as opened:
        yield opened


def image(time: int, side: int, seed: int = 3) -> tuple[Floats, Ints]:
    """Rows (side * side, n_embd) and positions (4, side * side): one time, then row and column, in reading order."""
    n = side * side
    row, column = np.divmod(np.arange(n, dtype=np.int32), side)
    pos = np.stack([np.full(n, time, np.int32), time + row, time + column, np.zeros(n, np.int32)])
    return np.random.default_rng(seed).standard_normal((n, N_EMBD), np.float32), pos


def kv(ctx: pyggmlkv.Context) -> KVCache:
    assert isinstance(ctx.memory, KVCache)
    return ctx.memory


# Case 09


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("size", [16, 8, 4, 3], ids=["1x16", "2x8", "4x4", "uneven"])
def test_image_in_parts_is_equal_to_the_reference(models: Models, size: int, flash_attn: str) -> None:
    with Pair(models, Setup(flash_attn=flash_attn)) as pair:
        pair.decode(list(range(8)))
        embd, pos = image(8, 4)
        for begin in range(0, 16, size):
            part = slice(begin, begin + size)
            pair.reference.decode(embd=embd[part], pos=pos[:, part], logits="all")
            pair.ours.decode(Batch(embd=embd[part], pos=pos[:, part], logits="all"))
            pair.comparison.add(pair.ours.logits, pair.reference.logits, f"image from {begin}")
        pair.decode([1, 2, 3], pos=[12, 13, 14])
        pair.decode([4])
        pair.compare_positions(1)
        pair.compare_state()
        found = pair.comparison
        assert found.bits_equal, found.first_difference
        assert found.state_bytes_equal is not False, found.first_difference
        assert kv(pair.ours).seq_pos_max(0) == 15


def test_every_split_of_an_image_gives_the_same_next_logits(models: Models) -> None:
    out = []
    for size in (16, 8, 4, 1):
        with pyggmlkv.Context(models.ours, **SETTINGS) as ctx:
            ctx.decode(Batch(list(range(8))))
            embd, pos = image(8, 4)
            for begin in range(0, 16, size):
                ctx.decode(Batch(embd=embd[begin : begin + size], pos=pos[:, begin : begin + size]))
            ctx.decode(Batch([5], pos=[12]))
            out.append(ctx.logits.copy())
    for logits in out[1:]:
        np.testing.assert_allclose(logits, out[0], atol=1e-4)


def test_going_back_in_time_is_refused_and_changes_nothing(models: Models) -> None:
    with pyggmlkv.Context(models.ours, **SETTINGS) as ctx:
        embd, pos = image(0, 4)
        ctx.decode(Batch(embd=embd, pos=pos + 8))
        before = ctx.state_get()
        with pytest.raises(BatchError):
            ctx.decode(Batch([5], pos=[7]))
        assert ctx.state_get() == before


def test_plain_models_refuse_a_second_token_at_one_position(tiny_model: TinyModels) -> None:
    with pyggmlkv.Model.load(tiny_model("llama")) as model, pyggmlkv.Context(model, **SETTINGS) as ctx:
        ctx.decode(Batch([1, 2, 3]))
        with pytest.raises(BatchError):
            ctx.decode(Batch([4], pos=[2]))
        ctx.decode(Batch([4], pos=[3]))


# Case 10


@pytest.mark.parametrize("verb", ["seq_add", "seq_div"])
def test_positions_cannot_be_shifted_and_nothing_changes(models: Models, verb: str) -> None:
    with pyggmlkv.Context(models.ours, **SETTINGS) as ctx:
        ctx.decode(Batch(list(range(10))))
        before = ctx.state_get()
        assert not kv(ctx).can_shift
        with pytest.raises(ShiftError, match="M-RoPE"):
            getattr(kv(ctx), verb)(0, 0, None, 2)
        assert ctx.state_get() == before


def test_removing_copying_and_keeping_still_work(models: Models) -> None:
    with Pair(models, Setup(n_seq_max=2, kv_unified=True)) as pair:
        pair.decode(list(range(10)))
        pair.memory("seq_cp", 0, 1, None, None)
        pair.memory("seq_rm", 0, 6, None)
        pair.decode([7, 8, 9, 10], pos=[6, 7, 10, 11], seq_id=[0, 0, 1, 1])
        pair.memory("seq_keep", 1)
        pair.decode([3], seq_id=1)
        pair.compare_positions(2)
        assert pair.comparison.bits_equal, pair.comparison.first_difference


def test_hybrid_memory_with_mrope_attention_refuses_shifts_in_both_parts() -> None:
    spec = KVSpec(
        layers=(LayerSpec(0, 2, 32, 32, n_rot=32),),
        kv_size=16,
        n_pos_per_embd=4,
        rope=RopeSpec(mode="mrope"),
        unified=True,
    )
    recr = RecurrentMemory(RecurrentSpec((1,), 8, 8))
    with HybridMemory(KVCache(spec), recr) as memory:
        recr.states.restore_all(np.array([5], np.int32), np.array([0], np.int32), np.array([0, 1], np.int32))
        assert not memory.can_shift
        for verb in (memory.seq_add, memory.seq_div):
            with pytest.raises(ShiftError):
                verb(0, 0, None, 2)
        assert recr.seq_pos_max(0) == 5


# Case 18


@pytest.mark.parametrize("accepted", [0, 1, 2, 4], ids=["none", "one", "end-mark-in-the-middle", "all"])
@pytest.mark.parametrize("recipe", ["qwen2vl", "llama"])
def test_draft_is_cut_by_position(tiny_model: TinyModels, recipe: str, accepted: int) -> None:
    draft = [50, 51, 52, 53]
    with pyggmlkv.Model.load(tiny_model(recipe)) as model:
        out = []
        for drafts in (True, False):
            with pyggmlkv.Context(model, **SETTINGS) as ctx:
                last = prompt(ctx, recipe)
                if drafts:
                    ctx.decode(Batch(draft, logits="all"))
                    assert kv(ctx).seq_rm(0, last + 1 + accepted, None)
                elif accepted:
                    ctx.decode(Batch(draft[:accepted]))
                assert kv(ctx).seq_pos_max(0) == last + accepted
                ctx.decode(Batch([60]))
                cells = kv(ctx).cells[0]
                out.append((ctx.logits.copy(), cells.pos.copy(), cells.n_used))
    np.testing.assert_array_equal(out[0][1], out[1][1])
    assert out[0][2] == out[1][2]
    np.testing.assert_allclose(out[0][0], out[1][0], atol=1e-4)


def prompt(ctx: pyggmlkv.Context, recipe: str) -> int:
    """Text 0 .. 4, with M-RoPE an image at 5, text 8 .. 10; the last position."""
    ctx.decode(Batch(list(range(5))))
    if recipe == "qwen2vl":
        embd, pos = image(5, 3)
        ctx.decode(Batch(embd=embd, pos=pos))
    else:
        ctx.decode(Batch([20, 21, 22]))
    ctx.decode(Batch([30, 31, 32], pos=[8, 9, 10]))
    return 10
