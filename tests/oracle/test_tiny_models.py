"""Tiny models: the reference takes every recipe, and their logits are worth comparing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.oracle.libllama import ContextParams, Library, RefModel
from tests.oracle.tiny_models import TinyModel, write
from tests.oracle.tiny_recipes import ENCODE_ONLY, RECIPES

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 128, 32)]


@pytest.mark.parametrize("recipe", [name for name in RECIPES if RECIPES[name].arch not in ENCODE_ONLY])
def test_logits_are_finite_and_depend_on_tokens_and_history(
    recipe: str, reference: Library, tiny_model: Callable[[str], Path]
) -> None:
    with RefModel(reference, tiny_model(recipe)) as model, model.context(ContextParams(n_ctx=256)) as ctx:
        if model.has_encoder:
            ctx.encode(TOKENS)
        ctx.decode(TOKENS, logits="all")
        rows = ctx.logits
        ctx.memory.clear()
        ctx.decode([TOKENS[1], TOKENS[0], *TOKENS[2:]], logits="all")
        other = ctx.logits
    assert np.isfinite(rows).all()
    assert 0.5 < rows.std() < 20
    assert len(set(rows.argmax(axis=1).tolist())) > 8
    assert np.abs(rows[-1] - other[-1]).max() > 1e-4


@pytest.mark.parametrize("weight_type", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_weight_types_are_taken(
    weight_type: str, reference: Library, tiny_model: Callable[[TinyModel], Path]
) -> None:
    path = tiny_model(TinyModel("llama", weight_type=weight_type))
    with RefModel(reference, path) as model, model.context(ContextParams(n_ctx=256)) as ctx:
        ctx.decode(TOKENS)
        assert np.isfinite(ctx.logits).all()


def test_the_same_choice_gives_the_same_bytes(reference: Library, tmp_path: Path) -> None:
    a, b = (write(reference, TinyModel("llama-moe"), tmp_path / name) for name in "ab")
    assert a.name == b.name
    assert a.read_bytes() == b.read_bytes()


def test_another_seed_gives_other_weights(tiny_model: Callable[[TinyModel], Path]) -> None:
    a, b = (tiny_model(TinyModel("llama", seed=seed)) for seed in (1, 2))
    assert a != b
    assert a.read_bytes() != b.read_bytes()


def test_metadata_can_be_changed(reference: Library, tiny_model: Callable[[TinyModel], Path]) -> None:
    path = tiny_model(TinyModel("gemma2", keys={"attention.sliding_window": 24}))
    with RefModel(reference, path) as model:
        assert model.n_swa == 24
