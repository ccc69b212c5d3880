"""phi3's two sets of RoPE factors: which one a context uses, by its size against the trained one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pyggmlkv import Batch, Context, Model
from tests.oracle.tiny_models import TinyModel

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 128, 40)]


def logits(path: Path, n_ctx: int) -> npt.NDArray[np.float32]:
    settings = {"flash_attn": "off", "type_k": "f32", "type_v": "f32"}
    with Model.load(path) as model, Context(model, n_ctx=n_ctx, n_threads=1, **settings) as ctx:  # type: ignore[arg-type]
        ctx.decode(Batch(TOKENS, logits="all"))
        return ctx.logits.copy()


@pytest.fixture
def path(tiny_model: Callable[[TinyModel], Path]) -> Path:
    return tiny_model(TinyModel("phi3", keys={"rope.scaling.original_context_length": 256}))


def test_contexts_up_to_the_original_size_use_the_short_factors(path: Path) -> None:
    assert np.abs(logits(path, 256) - logits(path, 512)).max() > 0.1
    np.testing.assert_allclose(logits(path, 512), logits(path, 768), atol=1e-4)


def test_a_context_below_256_counts_as_256_as_upstream_rounds_it(
    tiny_model: Callable[[TinyModel], Path],
) -> None:
    path = tiny_model(TinyModel("phi3", keys={"rope.scaling.original_context_length": 200}))
    np.testing.assert_allclose(logits(path, 64), logits(path, 256), atol=1e-4)
