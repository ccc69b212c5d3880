"""Encoder and decoder: nothing is decoded before something is encoded, and a new text replaces the old (case 26)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.errors import BatchError, GGUFKeyError, ParameterError
from pyggmlkv.types import FlashAttn
from tests.oracle.libllama import ContextParams, Library
from tests.oracle.tiny_models import TinyModel, metadata, write_file
from tests.oracle.tiny_recipes import RECIPES
from tests.side_by_side import Models, Pair, Setup

TinyModels = Callable[[str | TinyModel], Path]
SETTINGS: dict[str, Any] = {
    "n_ctx": 256,
    "n_threads": 1,
    "flash_attn": "off",
    "type_k": "f32",
    "type_v": "f32",
}
LONG, SHORT = list(range(20, 40)), list(range(60, 67))


@pytest.fixture(scope="module")
def models(reference: Library, tiny_model: TinyModels) -> Iterator[Models]:
    with Models(reference, tiny_model("t5")) as opened:
        yield opened


@pytest.fixture
def ctx(models: Models) -> Iterator[pyggmlkv.Context]:
    with pyggmlkv.Context(models.ours, **SETTINGS) as opened:
        yield opened


def start(ctx: pyggmlkv.Context) -> list[int]:
    token = ctx.model.hparams.dec_start_token_id
    assert token is not None
    return [token]


def test_decoding_before_encoding_is_refused(ctx: pyggmlkv.Context) -> None:
    with pytest.raises(BatchError, match="encode"):
        ctx.decode(Batch(start(ctx)))
    assert ctx.memory is not None
    assert ctx.memory.seq_pos_max(0) is None


def test_a_text_longer_than_a_ubatch_is_refused(models: Models) -> None:
    with pyggmlkv.Context(models.ours, n_ubatch=16, **SETTINGS) as ctx, pytest.raises(BatchError, match="16"):
        ctx.encode(Batch(LONG))


@pytest.mark.parametrize("second", [SHORT, LONG[::-1]], ids=["shorter", "as-long"])
def test_a_second_text_replaces_the_first(models: Models, second: list[int]) -> None:
    with pyggmlkv.Context(models.ours, **SETTINGS) as ctx, pyggmlkv.Context(models.ours, **SETTINGS) as fresh:
        ctx.encode(Batch(LONG))
        ctx.decode(Batch(start(ctx)))
        first = ctx.logits.copy()
        assert ctx.memory is not None
        ctx.memory.clear()
        for each in (ctx, fresh):
            each.encode(Batch(second))
            each.decode(Batch(start(ctx)))
        np.testing.assert_array_equal(ctx.logits, fresh.logits)
        assert not np.array_equal(ctx.logits, first)


@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_encoded_rows_are_equal_to_the_reference(models: Models, flash_attn: str) -> None:
    with Pair(models, Setup(flash_attn=flash_attn)) as pair:
        for text in (LONG, SHORT, LONG):
            pair.encode(text)
            pair.comparison.add(
                pair.ours.embeddings, reference_rows(pair, len(text)), f"{len(text)} encoded tokens"
            )
        assert pair.comparison.bits_equal, pair.comparison.first_difference


@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_encoder_alone_is_equal_to_the_reference(
    reference: Library, tiny_model: TinyModels, flash_attn: FlashAttn
) -> None:
    setup: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "flash_attn": flash_attn, "embeddings": True}
    with Models(reference, tiny_model("t5encoder")) as models:
        theirs = models.reference.context(ContextParams(pooling="none", **setup))
        with theirs, pyggmlkv.Context(models.ours, pooling="none", **setup) as ours:
            assert ours.memory is None
            for text in (LONG, SHORT):
                theirs.encode(text)
                ours.encode(Batch(text))
                np.testing.assert_array_equal(ours.embeddings, theirs.embeddings)
                ours.decode(Batch(text))
                np.testing.assert_array_equal(ours.embeddings, theirs.embeddings)


def reference_rows(pair: Pair, n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    pair.reference.n_outputs = n
    return pair.reference.embeddings


def test_texts_of_two_sequences_are_seen_by_their_own_only(
    reference: Library, tiny_model: TinyModels
) -> None:
    """With ReLU: GELU's table of f16 makes another order of sums show."""
    with Models(reference, tiny_model(TinyModel("t5", drop=("ffn_gate",)))) as models:
        check_two_texts(models)


def check_two_texts(models: Models) -> None:
    ids = [i % 2 for i in range(20)]
    setup: dict[str, Any] = {**SETTINGS, "n_seq_max": 2, "kv_unified": True}
    with (
        models.reference.context(ContextParams(**setup)) as reference,
        pyggmlkv.Context(models.ours, **setup) as ctx,
    ):
        pos = [i // 2 for i in range(20)]
        reference.encode(LONG, pos=pos, seq_id=ids)
        reference.decode([0, 0, 1, 1], pos=[0, 0, 1, 1], seq_id=[0, 1, 0, 1], logits="all")
        ctx.encode(Batch(LONG, pos=pos, seq_id=ids))
        ctx.decode(Batch([0, 0, 1, 1], pos=[0, 0, 1, 1], seq_id=[0, 1, 0, 1], logits="all"))
        np.testing.assert_array_equal(ctx.logits, reference.logits)
        both = ctx.logits.copy()
    with pyggmlkv.Context(models.ours, **SETTINGS) as alone:
        alone.encode(Batch(LONG[1::2]))
        alone.decode(Batch([0, 1], logits="all"))
        np.testing.assert_allclose(alone.logits, both[1::2], atol=1e-4)


def test_streams_are_refused_with_the_way_out(models: Models) -> None:
    with pytest.raises(ParameterError, match="kv_unified=True"):
        pyggmlkv.Context(models.ours, n_seq_max=2, **SETTINGS)


def test_more_decoder_than_encoder_layers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t5.gguf"
    write_file(path, "t5", metadata(RECIPES["t5"], {"decoder_block_count": 4}), {}, "f32")
    with pytest.raises(GGUFKeyError, match="decoder_block_count"):
        pyggmlkv.Model.load(path)
