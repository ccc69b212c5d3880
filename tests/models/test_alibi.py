"""ALiBi through a whole model: biases go by position, whatever the split, the cells' order and the holes.

Public report 08. Against NumPy, and bit for bit against the reference; 4 heads, and 6, which have two series
of slopes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pyggmlkv.memory.kv import KVCache
from tests.oracle.libllama import Library
from tests.oracle.numpy_bloom import Cache, NumpyBloom
from tests.oracle.tiny_models import TinyModel
from tests.side_by_side import Models, Pair, Setup

TOKENS = [int(t) for t in np.random.default_rng(8).integers(0, 128, 40)]
SIX = {"attention.head_count": 6, "attention.head_count_kv": 6, "embedding_length": 384}
HEADS = {"4-heads": TinyModel("bloom"), "6-heads": TinyModel("bloom", keys=SIX)}
SPLITS = {"20": [20], "12+8": [12, 8], "20x1": [1] * 20}
LIMITS = {"off": 1e-3, "on": 2e-2}
"""By flash attention, which works in half precision on the CPU; slopes 5% off move a logit by 0.2."""


@pytest.fixture(scope="module", params=HEADS)
def path(request: pytest.FixtureRequest, tiny_model: Callable[[TinyModel], Path]) -> Path:
    return tiny_model(HEADS[request.param])


@pytest.fixture(scope="module")
def models(reference: Library, path: Path) -> Iterator[Models]:
    with Models(reference, path) as opened:
        yield opened


@pytest.fixture(scope="module")
def bloom(path: Path) -> NumpyBloom:
    return NumpyBloom(path)


@pytest.fixture(params=["off", "on"], ids=["plain", "flash"])
def flash_attn(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(models: Models, flash_attn: str, n_seq_max: int = 1) -> Pair:
    setup = Setup(flash_attn=flash_attn, n_seq_max=n_seq_max, kv_unified=True, type_k="f32", type_v="f32")
    return Pair(models, setup)


def check(pair: Pair, bloom: NumpyBloom, cache: Cache, tokens: list[int], first: int) -> None:
    """Decodes `tokens` at positions from `first` on; all three agree."""
    pair.decode(tokens, pos=range(first, first + len(tokens)))
    assert pair.comparison.bits_equal, pair.comparison.first_difference
    limit = LIMITS["on" if pair.ours.cparams.flash_attn else "off"]
    np.testing.assert_allclose(pair.ours.logits, bloom.forward(tokens, first, cache), atol=limit)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_logits_are_the_same_for_every_split(
    models: Models, bloom: NumpyBloom, flash_attn: str, split: list[int]
) -> None:
    cache = bloom.new_cache()
    with opened(models, flash_attn) as pair:
        for n, first in zip(split, np.cumsum([0, *split]).tolist(), strict=False):
            check(pair, bloom, cache, TOKENS[first : first + n], first)


def test_a_hole_in_the_middle_leaves_the_distances_of_the_rest(
    models: Models, bloom: NumpyBloom, flash_attn: str
) -> None:
    cache = bloom.new_cache()
    with opened(models, flash_attn) as pair:
        check(pair, bloom, cache, TOKENS[:20], 0)
        pair.memory("seq_rm", 0, 6, 13)
        cache.remove(6, 13)
        check(pair, bloom, cache, TOKENS[20:26], 20)


def test_cells_out_of_order_change_nothing(models: Models, bloom: NumpyBloom, flash_attn: str) -> None:
    cache = bloom.new_cache()
    with opened(models, flash_attn, n_seq_max=2) as pair:
        pair.decode(TOKENS[30:38], seq_id=1)
        check(pair, bloom, cache, TOKENS[:12], 0)
        pair.memory("seq_rm", 1, None, None)
        check(pair, bloom, cache, TOKENS[12:18], 12)
        assert isinstance(pair.ours.memory, KVCache)
        assert pair.ours.memory.cells[0].pos[0] == 12, "the later tokens went to the freed cells"
        check(pair, bloom, cache, TOKENS[18:20], 18)


def test_a_context_shift_moves_the_distances(models: Models, bloom: NumpyBloom, flash_attn: str) -> None:
    """Without RoPE a shift only renames positions; the keys stay as they are."""
    cache = bloom.new_cache()
    with opened(models, flash_attn) as pair:
        check(pair, bloom, cache, TOKENS[:20], 0)
        pair.memory("seq_rm", 0, 2, 9)
        pair.memory("seq_add", 0, 9, None, -7)
        cache.remove(2, 9)
        cache.positions[cache.positions >= 9] -= 7
        check(pair, bloom, cache, TOKENS[20:24], 13)
