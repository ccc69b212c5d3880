"""Case 01 beyond layer 0: a shifted key of any layer is the stored key, turned by NumPy; all that did not move stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import pyggmlkv
from pyggmlkv import Batch
from tests.oracle.rope_naive import turned

TOKENS = np.random.default_rng(1).integers(0, 128, 32)
LIMIT = {"f32": 1e-11, "f16": 1e-6, "bf16": 1e-4, "q8_0": 2e-4, "q5_0": 4e-3, "q4_0": 2e-2, "iq4_nl": 2e-2}
"""Normalised mean squared error of one turn and one rounding to the type."""


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Iterator[pyggmlkv.Model]:
    with pyggmlkv.Model.load(tiny_model("llama")) as model:
        yield model


def keys(ctx: pyggmlkv.Context, il: int) -> npt.NDArray[np.float32]:
    """Keys (n_cells, n_head_kv, head_dim) f32 as the model made them, without the attention rotation."""
    k = ctx.memory.k(il)[0].astype(np.float32)
    rot = ctx.memory.k_rot
    return k.reshape(len(k), 2, 64) if rot is None else (k.reshape(-1, len(rot)) @ rot).reshape(len(k), 2, 64)


@pytest.mark.parametrize("attn_rot", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize("type_k", LIMIT)
def test_keys_of_every_layer_turn_by_the_change_of_position(
    model: pyggmlkv.Model, type_k: str, attn_rot: bool
) -> None:
    settings = {"type_k": type_k, "flash_attn": "on", "attn_rot": attn_rot}
    with pyggmlkv.Context(model, n_ctx=32, n_threads=1, **settings) as ctx:
        m = ctx.memory
        ctx.decode(Batch(TOKENS))
        before = [(keys(ctx, il), m.k(il, dequantize=False), m.v(il, dequantize=False)) for il in (0, 1)]
        m.seq_rm(0, 4, 12)
        m.seq_add(0, 12, None, -8)
        assert m.update()
        assert m.cells[0].pos.tolist() == [0, 1, 2, 3, *[-1] * 8, *range(4, 24)]
        for il, (k, raw_k, raw_v) in enumerate(before):
            wanted = turned(k[12:], np.full(20, -8))
            gap = np.square(keys(ctx, il)[12:] - wanted).sum() / np.square(wanted).sum()
            assert gap < LIMIT[type_k], f"layer {il}"
            np.testing.assert_array_equal(m.v(il, dequantize=False), raw_v)
            if m.k_rot is None:
                np.testing.assert_array_equal(m.k(il, dequantize=False)[0, :4], raw_k[0, :4])
        ctx.decode(Batch([1]))
        assert m.seq_pos_max(0) == 24
        assert np.isfinite(ctx.logits).all()
