"""Embeddings: per token or pooled, one row a sequence, equal to the reference bit for bit; public report 19."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.errors import BatchError, NoSlotError, ParameterError
from tests.oracle.libllama import ContextParams, Library
from tests.side_by_side import Models

N_EMBD = 256
RNG = np.random.default_rng(19)
LENGTHS = {2: 5, 0: 12, 1: 13}
TOKENS = [int(t) for t in RNG.integers(0, 128, sum(LENGTHS.values()))]
SEQ_ID = [s for s, n in LENGTHS.items() for _ in range(n)]
EXACT: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "flash_attn": "off", "type_k": "f32", "type_v": "f32"}
Rows = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=["llama", "gemma3", "jamba", "t5encoder"])
def models(
    request: pytest.FixtureRequest, reference: Library, tiny_model: Callable[[str], Path]
) -> Iterator[Models]:
    with Models(reference, tiny_model(request.param)) as opened:
        yield opened


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Iterator[pyggmlkv.Model]:
    with pyggmlkv.Model.load(tiny_model("llama")) as model:
        yield model


@pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("pooling", ["none", "mean", "cls", "last"])
def test_rows_are_equal_to_the_references(models: Models, pooling: str, kv_unified: bool) -> None:
    settings: dict[str, Any] = {
        "n_ctx": 768,
        "n_seq_max": 3,
        "n_ubatch": 36,
        "n_threads": 1,
        "flash_attn": "off",
    }
    settings |= {"embeddings": True, "pooling": pooling, "kv_unified": kv_unified}
    verb = "encode" if models.ours.arch == "t5encoder" else "decode"
    with (
        models.reference.context(ContextParams(**settings)) as reference,
        pyggmlkv.Context(models.ours, **settings) as ctx,
    ):
        for part in ([0, 1, 2], [2, 1]):
            at = [i for i, s in enumerate(SEQ_ID) if s in part]
            tokens, seq_id = [TOKENS[i] for i in at], [SEQ_ID[i] for i in at]
            getattr(reference, verb)(tokens, seq_id=seq_id, logits="all")
            getattr(ctx, verb)(Batch(tokens, seq_id=seq_id, logits="all"))
            if pooling == "none":
                wanted = reference.embeddings
            else:
                wanted = np.stack([reference.embeddings_seq(s) for s in sorted(part)])
            assert ctx.embeddings.shape == wanted.shape
            assert ctx.embeddings.dtype == np.float32
            assert ctx.embeddings.tobytes() == wanted.tobytes()


def alone(model: pyggmlkv.Model, tokens: Any, pooling: Any) -> Rows:
    with pyggmlkv.Context(model, embeddings=True, pooling=pooling, **EXACT) as ctx:
        ctx.decode(Batch(tokens))
        return ctx.embeddings


def test_pooling_is_what_its_name_says(llama: pyggmlkv.Model) -> None:
    rows = alone(llama, TOKENS, "none")
    assert rows.shape == (len(TOKENS), N_EMBD)
    np.testing.assert_allclose(alone(llama, TOKENS, "mean")[0], rows.mean(axis=0), atol=1e-5)
    np.testing.assert_array_equal(alone(llama, TOKENS, "cls")[0], rows[0])
    np.testing.assert_array_equal(alone(llama, TOKENS, "last")[0], rows[-1])


def test_a_context_without_embeddings_keeps_none(llama: pyggmlkv.Model) -> None:
    with pyggmlkv.Context(llama, n_ctx=64, n_threads=1, pooling="mean") as ctx:
        ctx.decode(Batch([1, 2, 3]))
        assert ctx.embeddings.shape == (0, N_EMBD)
        assert ctx.logits.shape == (1, 128)


def test_rank_pooling_needs_a_head(llama: pyggmlkv.Model) -> None:
    with pytest.raises(ParameterError, match="rank"):
        pyggmlkv.Context(llama, n_ctx=64, embeddings=True, pooling="rank")


# Case 19: several inputs in one embedding call

INPUTS = [
    [int(t) for t in np.random.default_rng([19, i]).integers(0, 128, n)]
    for i, n in enumerate([3, 17, 60, 8, 33])
]


@pytest.mark.parametrize("n_seq_max", [4, 256], ids=["limit-4", "limit-256"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_case_19_each_vector_equals_the_solo_run(llama: pyggmlkv.Model, pooling: Any, n_seq_max: int) -> None:
    settings = {"n_seq_max": n_seq_max, "kv_unified": True, "embeddings": True, "pooling": pooling}
    with pyggmlkv.Context(llama, **EXACT, **settings) as ctx:
        found: list[Rows] = []
        for begin in range(0, len(INPUTS), 4):
            group = INPUTS[begin : begin + 4]
            ctx.memory.clear()
            seq_id = [s for s, tokens in enumerate(group) for _ in tokens]
            ctx.decode(Batch(sum(group, []), seq_id=seq_id))
            assert ctx.embeddings.shape == (len(group), N_EMBD)
            found += list(ctx.embeddings)
    for row, tokens in zip(found, INPUTS, strict=True):
        np.testing.assert_allclose(row, alone(llama, tokens, pooling)[0], atol=1e-4)


@pytest.mark.parametrize("unified", [True, False])
def test_case_19_the_room_of_one_sequence_is_visible_and_named(llama: pyggmlkv.Model, unified: bool) -> None:
    with pyggmlkv.Context(
        llama, n_ctx=240, n_seq_max=4, kv_unified=unified, n_threads=1, embeddings=True, pooling="mean"
    ) as ctx:
        assert ctx.n_ctx_seq == (240 if unified else 60)
        too_long = list(range(ctx.n_ctx_seq + 1))
        with pytest.raises((NoSlotError, BatchError), match=str(ctx.n_ctx_seq)):
            ctx.decode(Batch([t % 128 for t in too_long]))
        ctx.decode(Batch([t % 128 for t in too_long[1:]]))
        assert ctx.embeddings.shape == (1, N_EMBD)


def test_case_19_more_inputs_than_the_limit_and_empty_ones_are_refused(llama: pyggmlkv.Model) -> None:
    with pyggmlkv.Context(llama, n_ctx=256, n_seq_max=4, n_threads=1, embeddings=True, pooling="mean") as ctx:
        before = ctx.state_get()
        for batch, said in ((Batch([1, 2], seq_id=[0, 4]), "4"), (Batch([]), "token")):
            with pytest.raises(BatchError, match=said):
                ctx.decode(batch)
        assert ctx.state_get() == before
