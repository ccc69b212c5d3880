"""K-shift against the layer-0 oracle: a turned key equals the key of a fresh run with its token at the new position.

K of layer 0 depends only on token and position, whatever the model went through before (cases 01, 03, 11, 25).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.errors import ShiftError

TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
EXACT = ("f32", "f16", "bf16")
# Normalised mean squared error of one dequantise, turn, requantise; floats: a few roundings of the type.
LIMIT = {
    "f32": 1e-12, "f16": 1e-6, "bf16": 1e-4, "q8_0": 2e-4, "q5_0": 4e-3, "q5_1": 4e-3,
    "q4_0": 2e-2, "q4_1": 2e-2, "iq4_nl": 2e-2,
}  # fmt: skip
TOKENS = np.random.default_rng(5).integers(0, 100, 32)


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.square(a - b).sum() / np.square(b).sum())


def layer_0_keys(
    model: pyggmlkv.Model, tokens: np.ndarray, pos: np.ndarray, type_k: str = "f32"
) -> np.ndarray:
    """Keys (n, n_embd_k_gqa) f32 of a fresh run in which each token stands alone at its position."""
    with pyggmlkv.Context(model, n_ctx=1024, n_threads=1, type_k=type_k, flash_attn="on") as ctx:
        rows = []
        for token, p in zip(tokens, pos, strict=True):
            ctx.memory.clear()
            ctx.decode(Batch([int(token)], pos=[int(p)]))
            rows.append(turned_back(ctx)[0])
    return np.stack(rows)


def turned_back(ctx: pyggmlkv.Context) -> np.ndarray:
    """Keys of layer 0 as f32 without the attention rotation."""
    keys = ctx.memory.k(0)[0]
    if keys.dtype == np.uint16:
        keys = (keys.astype(np.uint32) << 16).view(np.float32)
    keys = keys.astype(np.float32)
    rot = ctx.memory.k_rot
    return keys if rot is None else (keys.reshape(-1, len(rot)) @ rot).reshape(keys.shape)


def shifted(model: pyggmlkv.Model, **settings: object) -> pyggmlkv.Context:
    """32 tokens, positions 4 to 11 removed, the rest moved down by 8, applied."""
    ctx = pyggmlkv.Context(model, **{"n_ctx": 64, "n_threads": 1, "flash_attn": "on", **settings})
    ctx.decode(Batch(TOKENS))
    ctx.memory.seq_rm(0, 4, 12)
    ctx.memory.seq_add(0, 12, None, -8)
    return ctx


@pytest.fixture(scope="module", params=["llama", "llama-linear", "llama-yarn", "qwen3"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> pyggmlkv.Model:
    return pyggmlkv.Model.load(tiny_model(request.param))


@pytest.mark.parametrize("attn_rot", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize("type_k", TYPES)
def test_moved_keys_stand_where_a_fresh_run_puts_them(
    model: pyggmlkv.Model, type_k: str, attn_rot: bool
) -> None:
    ctx = shifted(model, type_k=type_k, attn_rot=attn_rot, shift="pure")
    before = ctx.memory.k(0, dequantize=False).copy(), ctx.memory.v(0, dequantize=False).copy()
    assert ctx.memory.update()
    assert not ctx.memory.update()
    cells = ctx.memory.streams.cells[0]
    kept = np.flatnonzero(cells.pos >= 0)
    assert sorted(cells.pos[kept]) == list(range(24))
    wanted = layer_0_keys(model, TOKENS[kept], cells.pos[kept])
    assert nmse(turned_back(ctx)[kept], wanted) < LIMIT[type_k]
    assert nmse(turned_back(ctx)[kept[12:]], layer_0_keys(model, TOKENS[kept[12:]], kept[12:])) > 0.05
    assert (ctx.memory.v(0, dequantize=False) == before[1]).all()
    if type_k in EXACT or ctx.memory.k_rot is None:
        assert (ctx.memory.k(0, dequantize=False)[0][:4] == before[0][0][:4]).all()
    ctx.decode(Batch([1]))
    assert np.isfinite(ctx.logits).all()


def test_there_and_back_returns_the_keys_and_many_shifts_keep_their_size(model: pyggmlkv.Model) -> None:
    ctx = pyggmlkv.Context(model, n_ctx=64, n_threads=1, type_k="f32", shift="pure")
    ctx.decode(Batch(TOKENS))
    original = ctx.memory.k(0)[0, :32].copy()
    for delta in [5, -5] * 5:
        ctx.memory.seq_add(0, 0, None, delta)
        ctx.memory.update()
        if delta < 0:
            assert np.abs(ctx.memory.k(0)[0, :32] - original).max() < 1e-5 * np.abs(original).max() * 10
    sizes = np.linalg.norm(ctx.memory.k(0)[0, :32], axis=1) / np.linalg.norm(original, axis=1)
    assert np.abs(sizes - 1).max() < 1e-4


def test_upstream_s_way_scales_keys_at_every_shift_of_a_yarn_model(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = pyggmlkv.Model.load(tiny_model("llama-yarn"))
    ctx = pyggmlkv.Context(model, n_ctx=64, n_threads=1, type_k="f32")
    ctx.decode(Batch(TOKENS))
    before = np.linalg.norm(ctx.memory.k(0)[0, :32], axis=1)
    ctx.memory.seq_add(0, 0, None, 3)
    ctx.memory.update()
    growth = np.linalg.norm(ctx.memory.k(0)[0, :32], axis=1) / before
    assert (growth > 1.05).all()
    ctx.memory.seq_add(0, 0, None, 3)
    ctx.memory.update()
    assert caplog.text.count("YaRN") == 1


def test_several_cut_and_move_steps_before_one_update(model: pyggmlkv.Model) -> None:
    ctx = pyggmlkv.Context(model, n_ctx=64, n_threads=1, type_k="f32", shift="pure")
    ctx.decode(Batch(TOKENS[:9]))
    m = ctx.memory
    m.seq_rm(0, 2, 4)
    m.seq_add(0, 4, None, -2)
    m.seq_rm(0, 4, 5)
    m.seq_add(0, 5, None, -1)
    cells = m.streams.cells[0]
    kept = np.flatnonzero(cells.pos >= 0)
    assert kept.tolist() == [0, 1, 4, 5, 7, 8]
    assert cells.pos[kept].tolist() == [0, 1, 2, 3, 4, 5]
    assert cells.shift[kept].tolist() == [0, 0, -2, -2, -3, -3]
    m.update()
    assert cells.shift[kept].tolist() == [0] * 6
    assert nmse(m.k(0)[0, kept], layer_0_keys(model, TOKENS[kept], cells.pos[kept])) < LIMIT["f32"]


def test_a_copy_between_streams_carries_a_pending_shift(model: pyggmlkv.Model) -> None:
    ctx = pyggmlkv.Context(model, n_ctx=256, n_seq_max=4, n_threads=1, type_k="f32", shift="pure")
    m = ctx.memory
    ctx.decode(Batch(TOKENS[:16]))
    ctx.decode(Batch(TOKENS[:3], seq_id=2))
    m.seq_add(0, 0, None, 7)
    m.seq_cp(0, 1)
    m.seq_cp(1, 2)
    m.update()
    wanted = layer_0_keys(model, TOKENS[:16], np.arange(7, 23))
    for stream in range(3):
        assert m.streams.cells[stream].pos[:16].tolist() == list(range(7, 23))
        assert nmse(m.k(0)[stream, :16], wanted) < LIMIT["f32"]
    copied = m.k(0)[1].copy()
    ctx.decode(Batch([3], seq_id=0))
    assert (m.k(0)[1] == copied).all()
    assert m.seq_pos_max(1) == 22


def test_what_cannot_shift_says_why_and_stays(tiny_model: Callable[[str], Path]) -> None:
    model = pyggmlkv.Model.load(tiny_model("llama"))
    spec = pyggmlkv.Context(model, n_ctx=64).memory.spec
    import dataclasses

    from pyggmlkv.backend.runner import Runner

    with Runner() as runner:
        cache = pyggmlkv.KVCache(dataclasses.replace(spec, can_shift_reason="a test forbids it"), runner)
        assert not cache.can_shift
        for refused in (lambda: cache.seq_add(0, 0, None, 1), lambda: cache.seq_div(0, 0, None, 2)):
            with pytest.raises(ShiftError, match="a test forbids it"):
                refused()
        cache.close()
