"""Case 02 in whole models: quantised caches with heads that are no powers of two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch
from tests.oracle.libllama import Library
from tests.oracle.tiny_models import TinyModel
from tests.side_by_side import Models, Pair, Setup

TOKENS = [int(t) for t in np.random.default_rng(2).integers(0, 128, 24)]
HEADS = {32: 0, 64: 64, 96: 0, 128: 128, 192: 64, 320: 64}
"""Head size, and the rotation block that belongs to it."""


def model_of(head_dim: int) -> TinyModel:
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    return TinyModel("qwen3", keys=dict.fromkeys(names, head_dim))


@pytest.mark.parametrize("head_dim", HEADS)
def test_logits_with_rotation_are_the_references_and_close_to_those_without(
    reference: Library, tiny_model: Callable[[TinyModel], Path], head_dim: int
) -> None:
    setup = Setup(type_k="q8_0", flash_attn="off")
    with Models(reference, tiny_model(model_of(head_dim))) as models:
        with Pair(models, setup) as pair:
            pair.decode(TOKENS[:16])
            pair.memory("seq_rm", 0, 2, 6)
            pair.decode(TOKENS[16:])
            pair.compare_state()
            assert pair.comparison.bits_equal, pair.comparison.first_difference
            assert pair.comparison.state_bytes_equal, pair.comparison.first_difference
            assert pair.ours.memory.k_rot is None or len(pair.ours.memory.k_rot) == HEADS[head_dim]
            assert (pair.ours.memory.k_rot is None) == (HEADS[head_dim] == 0)
        rows = []
        for attn_rot in (None, False):
            settings = {"type_k": "q8_0", "flash_attn": "off", "attn_rot": attn_rot}
            with pyggmlkv.Context(models.ours, n_ctx=64, n_threads=1, **settings) as ctx:
                ctx.decode(Batch(TOKENS, logits="all"))
                rows.append(ctx.logits)
        gap = np.square(rows[0] - rows[1]).sum() / np.square(rows[1]).sum()
        assert gap < 1e-3


def test_v_is_rotated_by_its_own_block_and_undone(tiny_model: Callable[[TinyModel], Path]) -> None:
    with pyggmlkv.Model.load(tiny_model(TinyModel("llama"))) as model:
        rows = []
        for attn_rot in (True, False):
            settings = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on", "attn_rot": attn_rot}
            with pyggmlkv.Context(model, n_ctx=64, n_threads=1, **settings) as ctx:
                assert (ctx.memory.v_rot is None) is not attn_rot
                ctx.decode(Batch(TOKENS, logits="all"))
                rows.append(ctx.logits)
    assert not np.array_equal(*rows)
    assert np.square(rows[0] - rows[1]).sum() / np.square(rows[1]).sum() < 1e-3
