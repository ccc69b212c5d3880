"""The NumPy llama agrees with the reference, so that either can judge the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.oracle.libllama import ContextParams, Library, RefModel
from tests.oracle.numpy_llama import NumpyLlama

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 128, 40)]
RECIPES = ["llama", "llama-tied", "llama-bias", "llama-linear"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_agrees_with_the_reference_in_f32(
    recipe: str, reference: Library, tiny_model: Callable[[str], Path]
) -> None:
    path = tiny_model(recipe)
    params = ContextParams(n_ctx=256, flash_attn="off", type_k="f32", type_v="f32")
    with RefModel(reference, path) as model, model.context(params) as ctx:
        ctx.decode(TOKENS, logits="all")
        np.testing.assert_allclose(ctx.logits, NumpyLlama(path).forward(TOKENS), atol=1e-4)


def test_cached_and_uncached_agree(tiny_model: Callable[[str], Path]) -> None:
    llama = NumpyLlama(tiny_model("llama"))
    cache = llama.new_cache()
    steps = [llama.forward(TOKENS[:9], cache), *(llama.forward([t], cache) for t in TOKENS[9:])]
    np.testing.assert_allclose(np.concatenate(steps), llama.forward(TOKENS), atol=1e-10)
