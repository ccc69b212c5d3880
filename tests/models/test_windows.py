"""Sliding windows through a whole model: which tokens the logits of a position depend on.

Public reports 07 and 33. A token outside of the window must not change one bit, one inside must; so the window
is measured without knowing anything of masks. Then bit for bit against the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import pyggmlkv
from pyggmlkv import Batch, Context, Model
from pyggmlkv.cparams import ContextParams
from tests.oracle import libllama
from tests.oracle.libllama import Library, RefModel
from tests.oracle.tiny_models import TinyModel
from tests.side_by_side import Models, Pair, Setup

N = 12
TOKENS = [int(t) for t in np.random.default_rng(33).integers(0, 128, N)]
SPLITS = {"whole": [N], "7+5": [7, 5], "one-by-one": [1] * N}
CHUNK = 8192
TinyModels = Callable[[TinyModel], Path]


def gemma2(n_layer: int, n_swa: int) -> TinyModel:
    """Layers 0, 2, ... are sliding, the others full."""
    return TinyModel("gemma2", keys={"block_count": n_layer, "attention.sliding_window": n_swa})


def rows_of(ctx: Context, tokens: Sequence[int], split: Sequence[int], first: int = 0) -> list[bytes]:
    """The logits of every position, as bytes."""
    assert ctx.memory is not None
    ctx.memory.clear()
    rows: list[bytes] = []
    for n in split:
        done = len(rows)
        pos = range(first + done, first + done + n)
        ctx.decode(Batch(tokens[done : done + n], pos=pos, logits="all"))
        rows += [row.tobytes() for row in ctx.logits]
    return rows


def seen(
    path: Path, split: Sequence[int] = (N,), first: int = 0, **settings: str | bool
) -> npt.NDArray[np.bool_]:
    """[p, j]: whether another token at j changes what comes out at p."""
    out = np.zeros((N, N), np.bool_)
    with Model.load(path) as model, Context(model, n_ctx=256, n_threads=1, **settings) as ctx:  # type: ignore[arg-type]
        decoded = functools.partial(rows_of, ctx, split=split, first=first)
        as_it_is = decoded(TOKENS)
        for j in range(N):
            other = [*TOKENS[:j], (TOKENS[j] + 1) % 128, *TOKENS[j + 1 :]]
            out[:, j] = [a != b for a, b in zip(as_it_is, decoded(other), strict=True)]
    return out


def window(n_swa: int, causal: bool = True) -> npt.NDArray[np.bool_]:
    """[p, j]: j is one of the last `n_swa` positions up to p, or anywhere after p if not causal."""
    p, j = np.arange(N)[:, None], np.arange(N)[None, :]
    return (p - j < n_swa) & ((j <= p) | (not causal))


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("n_swa", [1, 2, 5, 64])
def test_a_query_sees_exactly_the_window(tiny_model: TinyModels, n_swa: int, flash_attn: str) -> None:
    found = seen(tiny_model(gemma2(1, n_swa)), flash_attn=flash_attn)
    np.testing.assert_array_equal(found, window(n_swa))
    np.testing.assert_array_equal(found.sum(axis=1), np.minimum(np.arange(N) + 1, n_swa))


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("swa_full", [False, True])
def test_the_window_is_the_same_cached_and_not(
    tiny_model: TinyModels, split: list[int], swa_full: bool
) -> None:
    found = seen(tiny_model(gemma2(1, 4)), split, flash_attn="off", swa_full=swa_full)
    np.testing.assert_array_equal(found, window(4))


@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_windows_add_up_over_sliding_layers(tiny_model: TinyModels, flash_attn: str) -> None:
    model = TinyModel(
        "gemma2",
        keys={"block_count": 2, "attention.sliding_window": 3, "attention.sliding_window_pattern": 0},
    )
    np.testing.assert_array_equal(seen(tiny_model(model), flash_attn=flash_attn), window(5))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not-causal"])
@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_only_the_sliding_layer_is_windowed(tiny_model: TinyModels, flash_attn: str, causal: bool) -> None:
    found = seen(tiny_model(gemma2(1, 4)), flash_attn=flash_attn, causal_attn=causal)
    np.testing.assert_array_equal(found, window(4, causal))
    found = seen(tiny_model(gemma2(2, 4)), flash_attn=flash_attn, causal_attn=causal)
    np.testing.assert_array_equal(found, window(N, causal))


@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_a_chunk_is_seen_from_its_first_position(tiny_model: TinyModels, flash_attn: str) -> None:
    path = tiny_model(TinyModel("llama4", keys={"block_count": 1}))
    first = CHUNK - 5
    pos = np.arange(first, first + N)
    same = pos[:, None] // CHUNK == pos[None, :] // CHUNK
    np.testing.assert_array_equal(seen(path, first=first, flash_attn=flash_attn), window(N) & same)


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("n_swa", [1, 4, 7])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_two_masks_equal_the_references(
    reference: Library, tiny_model: TinyModels, n_swa: int, flash_attn: str, split: list[int]
) -> None:
    with (
        Models(reference, tiny_model(gemma2(2, n_swa))) as models,
        Pair(models, Setup(flash_attn=flash_attn, n_threads=1)) as pair,
    ):
        first = 0
        for n in split:
            pair.decode(TOKENS[first : first + n])
            first += n
        assert pair.comparison.rows == N
        assert pair.comparison.bits_equal, pair.comparison.first_difference


@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_a_text_that_is_not_causal_equals_the_references(
    reference: Library, tiny_model: TinyModels, flash_attn: str
) -> None:
    path = tiny_model(gemma2(2, 4))
    params = libllama.ContextParams(n_ctx=256, n_threads=1, flash_attn=flash_attn)
    with RefModel(reference, path) as model, model.context(params) as ctx:
        ctx.set_causal_attn(False)
        ctx.decode(TOKENS, logits="all")
        theirs = ctx.logits.tobytes()
    settings = {"n_ctx": 256, "n_threads": 1, "flash_attn": flash_attn, "causal_attn": False}
    with Model.load(path) as ours, pyggmlkv.Context(ours, **settings) as context:  # type: ignore[arg-type]
        context.decode(Batch(TOKENS, logits="all"))
        assert context.logits.tobytes() == theirs


def test_reused_cells_are_missed_by_no_earlier_ubatch_of_the_batch(tiny_model: TinyModels) -> None:
    """The last ubatches take cells that only they cannot see; the first ones still see them.

    Upstream differs: it purges while it looks for slots, so its first ubatches miss keys inside of their window.
    """
    rows = []
    for n_ubatch in (3, 512):
        params = ContextParams(n_ctx=256, n_threads=1, n_ubatch=n_ubatch, type_k="f32", type_v="f32")
        with (
            Model.load(tiny_model(gemma2(2, 8))) as model,
            Context(model, params=params, flash_attn="off") as ctx,
        ):
            assert ctx.memory is not None
            ctx.decode(Batch(TOKENS[:11]))
            ctx.memory.seq_rm(0, 2, 5)
            ctx.memory.seq_add(0, 5, None, -3)
            ctx.decode(Batch(TOKENS[:11], logits="all"))
            rows.append(ctx.logits.copy())
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-3)
