"""Case 03 with per-dimension factors: long and short ones (phi3), and those that all contexts use (rope_freqs)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch
from tests.oracle.tiny_models import TinyModel

TOKENS = np.random.default_rng(3).integers(0, 128, 24)
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
MODELS = {
    "short factors": (TinyModel("phi3"), 128),
    "long factors": (TinyModel("phi3", keys={"rope.scaling.original_context_length": 32}), 512),
    "rope_freqs": (TinyModel("llama-bias"), 128),
    "rope_freqs and yarn": (TinyModel("llama-bias", keys=YARN), 128),
    "partial": (TinyModel("llama", keys={"rope.dimension_count": 64}), 128),
}


@pytest.mark.parametrize("case", MODELS)
def test_moved_keys_stand_where_a_fresh_run_puts_them(
    tiny_model: Callable[[TinyModel], Path], case: str
) -> None:
    recipe, n_ctx = MODELS[case]
    settings = {"n_ctx": n_ctx, "n_threads": 1, "type_k": "f32", "flash_attn": "on", "shift": "pure"}
    with pyggmlkv.Model.load(tiny_model(recipe)) as model, pyggmlkv.Context(model, **settings) as ctx:
        assert ("factors" in case or "freqs" in case) is bool(model.rope_factors(ctx.cparams))
        m = ctx.memory
        ctx.decode(Batch(TOKENS))
        original = m.k(0)[0, :24].copy()
        m.seq_rm(0, 4, 8)
        m.seq_add(0, 8, None, -4)
        m.update()
        moved = m.k(0)[0, 8:24].copy()
        m.clear()
        ctx.decode(Batch(TOKENS[8:], pos=range(4, 20)))
        fresh = m.k(0)[0, :16]
        assert np.abs(moved - fresh).max() < 1e-5 * np.abs(fresh).max() * 10
        assert np.abs(moved - original[8:]).max() > 0.05 * np.abs(fresh).max()
        np.testing.assert_allclose(
            np.linalg.norm(moved, axis=1), np.linalg.norm(original[8:], axis=1), rtol=1e-4
        )


@pytest.mark.parametrize("case", MODELS)
def test_ten_shifts_there_and_back_return_the_keys(
    tiny_model: Callable[[TinyModel], Path], case: str
) -> None:
    recipe, n_ctx = MODELS[case]
    settings = {"n_ctx": n_ctx, "n_threads": 1, "type_k": "f32", "flash_attn": "on", "shift": "pure"}
    with pyggmlkv.Model.load(tiny_model(recipe)) as model, pyggmlkv.Context(model, **settings) as ctx:
        ctx.decode(Batch(TOKENS))
        original = ctx.memory.k(1)[0, :24].copy()
        for delta in [5, -5] * 5:
            ctx.memory.seq_add(0, 0, None, delta)
            ctx.memory.update()
        assert np.abs(ctx.memory.k(1)[0, :24] - original).max() < 1e-4 * np.abs(original).max()
