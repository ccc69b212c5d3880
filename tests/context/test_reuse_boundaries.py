"""Steps of one shape that must not share a graph: more cells in reach, another state cell, another stream.

Each row is the reference's, bit for bit, and a graph is reused in between.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.oracle.libllama import Library
from tests.oracle.tiny_models import TinyModel
from tests.side_by_side import Models, Pair, Setup

TinyModels = Callable[[str | TinyModel], Path]


def assert_equal(pair: Pair) -> None:
    assert pair.comparison.bits_equal, pair.comparison.first_difference
    assert pair.ours.n_graphs_reused > 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_single_tokens_across_256_cells(
    reference: Library, tiny_model: TinyModels, name: str, flash_attn: str
) -> None:
    setup = Setup(n_ctx=512, flash_attn=flash_attn)
    with Models(reference, tiny_model(name)) as models, Pair(models, setup) as pair:
        pair.decode(list(range(100)) + list(range(100)) + list(range(52)), logits="last")
        for token in range(9):
            pair.decode([token])
        assert_equal(pair)


@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_a_sequence_that_leaves_a_shared_state_cell(
    reference: Library, tiny_model: TinyModels, name: str
) -> None:
    """Its next token goes to another cell; the state that it shared stays the other sequence's."""
    with (
        Models(reference, tiny_model(name)) as models,
        Pair(models, Setup(n_seq_max=3, kv_unified=True)) as pair,
    ):
        pair.decode([1, 2, 3, 4])
        for token in range(3):
            pair.decode([token])
        pair.memory("seq_cp", 0, 1, None, None)
        for token in range(3):
            pair.decode([5 + token])
        pair.decode([9], seq_id=1)
        assert_equal(pair)


def test_single_tokens_of_one_stream_after_another(reference: Library, tiny_model: TinyModels) -> None:
    with (
        Models(reference, tiny_model("llama")) as models,
        Pair(models, Setup(n_ctx=768, n_seq_max=3)) as pair,
    ):
        pair.decode([1, 2, 3, 4, 5, 6], pos=[0, 1] * 3, seq_id=[0, 0, 1, 1, 2, 2])
        for seq_id in (0, 0, 1, 2, 2, 0):
            pair.decode([7], seq_id=seq_id)
        assert_equal(pair)
