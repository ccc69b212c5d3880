"""Shifting a latent (MLA) cache: only the rotary slice behind the latent part turns (case 04), whatever the type.

Layer 0 is compared with fresh runs, the others with their own rows turned by NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.errors import CacheError
from pyggmlkv.memory.kv import KVCache
from tests.oracle.libllama import Library
from tests.oracle.tiny_models import TinyModel, add_key, draw, metadata
from tests.oracle.tiny_recipes import RECIPES
from tests.side_by_side import Models, Pair, Setup

TinyModels = Callable[[str | TinyModel], Path]
Floats = npt.NDArray[np.float32]
RANK, ROT, BASE = 96, 32, 10000.0
TOKENS = [int(t) for t in np.random.default_rng(4).integers(0, 128, 32)]
LIMIT = {
    "f32": 1e-11,
    "f16": 1e-6,
    "bf16": 1e-4,
    "q8_0": 2e-4,
    "q5_0": 4e-3,
    "q5_1": 4e-3,
    "q4_0": 2e-2,
    "q4_1": 2e-2,
}
PLAIN = TinyModel("deepseek2", keys={"rope.scaling.type": "none"})
SETTINGS: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "flash_attn": "on"}


@pytest.fixture(scope="module")
def model(tiny_model: TinyModels) -> Iterator[pyggmlkv.Model]:
    """Without YaRN, so that NumPy can turn its keys."""
    with pyggmlkv.Model.load(tiny_model(PLAIN)) as opened:
        yield opened


def cache(ctx: pyggmlkv.Context) -> KVCache:
    assert isinstance(ctx.memory, KVCache)
    return ctx.memory


def rows(ctx: pyggmlkv.Context, layer: int, n: int) -> Floats:
    """The first n cells' keys (n, RANK + ROT) as f32."""
    k = cache(ctx).k(layer)[0, :n]
    if k.dtype == np.uint16:
        k = (k.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(k, np.float32)


def turned(slices: Floats, delta: int) -> Floats:
    """Rotary slices (n, ROT) turned by delta positions: neighbouring elements are a pair."""
    angle = delta * BASE ** (-np.arange(0, ROT, 2) / ROT)
    pairs = slices.astype(np.float64).reshape(len(slices), -1, 2)
    x, y = pairs[..., 0], pairs[..., 1]
    out = np.stack([x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)], -1)
    return out.reshape(slices.shape).astype(np.float32)


def nmse(a: Floats, b: Floats) -> float:
    return float(np.square(a - b).sum(dtype=np.float64) / np.square(b).sum(dtype=np.float64))


def shift(ctx: pyggmlkv.Context) -> None:
    """Positions 4 to 11 go, the rest moves down by 8."""
    assert cache(ctx).can_shift
    assert cache(ctx).seq_rm(0, 4, 12)
    cache(ctx).seq_add(0, 12, None, -8)


@pytest.mark.parametrize("kind", LIMIT)
def test_only_the_rotary_slice_turns(model: pyggmlkv.Model, kind: str) -> None:
    with pyggmlkv.Context(model, type_k=kind, type_v=kind, **SETTINGS) as ctx:
        ctx.decode(Batch(TOKENS))
        before = [rows(ctx, il, 32) for il in range(3)]
        shift(ctx)
        assert cache(ctx).update()
        held = cache(ctx).cells[0].pos[:32]
        assert held.tolist() == [0, 1, 2, 3, *[-1] * 8, *range(4, 24)]
        for il in range(3):
            after = rows(ctx, il, 32)
            np.testing.assert_array_equal(after[:4], before[il][:4])
            if kind in ("f32", "f16", "bf16"):
                np.testing.assert_array_equal(after[12:, :RANK], before[il][12:, :RANK])
            assert nmse(after[12:, :RANK], before[il][12:, :RANK]) <= LIMIT[kind]
            assert nmse(after[12:, RANK:], turned(before[il][12:, RANK:], -8)) <= LIMIT[kind]
        ctx.decode(Batch([3]))
        assert cache(ctx).seq_pos_max(0) == 24
        assert np.isfinite(ctx.logits).all()


@pytest.mark.parametrize("recipe", ["deepseek2", "deepseek2-heads"])
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_layer_0_keys_equal_those_of_a_fresh_run_with_yarn(
    tiny_model: TinyModels, recipe: str, kind: str
) -> None:
    with pyggmlkv.Model.load(tiny_model(recipe)) as model:
        settings: dict[str, Any] = {**SETTINGS, "type_k": kind, "type_v": kind, "shift": "pure"}
        with pyggmlkv.Context(model, **settings) as ctx:
            ctx.decode(Batch(TOKENS))
            shift(ctx)
            ctx.memory.update()  # type: ignore[union-attr]
            moved = rotated_back(ctx)[12:32]
        with pyggmlkv.Context(model, **settings) as fresh:
            fresh.decode(Batch(TOKENS[12:], pos=range(4, 24)))
            assert nmse(moved, rotated_back(fresh)[:20]) <= LIMIT[kind]


def rotated_back(ctx: pyggmlkv.Context) -> Floats:
    k, rot = rows(ctx, 0, 32), cache(ctx).k_rot
    return k if rot is None else (k.reshape(-1, len(rot)) @ rot).reshape(k.shape)


def test_streams_turn_by_their_own_shifts(model: pyggmlkv.Model) -> None:
    with pyggmlkv.Context(model, type_k="f32", **{**SETTINGS, "n_ctx": 128, "n_seq_max": 2}) as ctx:
        ctx.decode(Batch(TOKENS + TOKENS, seq_id=[0] * 32 + [1] * 32))
        before = cache(ctx).k(1).copy()
        cache(ctx).seq_add(1, 0, None, 5)
        cache(ctx).update()
        after = cache(ctx).k(1)
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1, :, :RANK], before[1, :, :RANK])
    assert nmse(after[1, :32, RANK:], turned(before[1, :32, RANK:], 5)) <= LIMIT["f32"]


def test_there_is_no_v_and_reading_it_says_why(model: pyggmlkv.Model) -> None:
    with pyggmlkv.Context(model, **SETTINGS) as ctx:
        assert cache(ctx).size_v_bytes == 0
        with pytest.raises(CacheError, match="its K is read as V"):
            cache(ctx).v(0)


def test_quantised_latent_cache_without_flash_attention_agrees_with_it(model: pyggmlkv.Model) -> None:
    out = []
    for flash_attn in ("off", "on"):
        with pyggmlkv.Context(model, type_k="q8_0", **{**SETTINGS, "flash_attn": flash_attn}) as ctx:
            ctx.decode(Batch(TOKENS, logits="all"))
            out.append(ctx.logits)
    assert nmse(out[0], out[1]) < 1e-3


def test_layers_for_next_token_prediction_are_left_out(
    reference: Library, tiny_model: TinyModels, tmp_path: Path
) -> None:
    path = tmp_path / "nextn.gguf"
    keys = metadata(RECIPES["deepseek2"], {"nextn_predict_layers": 1})
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for key, value in keys.items():
        add_key(writer, key, value)
    for tensor in gguf.GGUFReader(tiny_model("deepseek2")).tensors:
        writer.add_tensor(tensor.name, draw(tensor.name, tuple(int(n) for n in tensor.shape), 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with Models(reference, path) as models, Pair(models, Setup()) as pair:
        assert models.ours.hparams.n_layer == 2
        pair.decode(TOKENS)
        pair.compare_state()
        assert pair.comparison.bits_equal, pair.comparison.first_difference
        assert pair.comparison.state_bytes_equal is not False, pair.comparison.first_difference
