"""What may not matter does not: how a text is split, in which order sequences come, one stream or several.

Splits change rounding in the reference too, so each split is compared with the reference's same split, bit for bit. Keys
of layer 0 depend on token and position alone: they are equal whatever the split, the order or the streams, and later
layers are close.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracle.libllama import Library
from tests.oracle.tiny_models import TinyModel
from tests.side_by_side import Models, Pair, Setup

TinyModels = Callable[[str | TinyModel], Path]
ARCHS = ("llama", "gemma3", "bloom", "qwen2vl", "deepseek2", "phi3", "mamba2", "jamba", "lfm2")
WITH_KEYS = ("llama", "gemma3", "bloom", "qwen2vl", "deepseek2", "phi3")
N, N_SEQ = 36, 3
CLOSE = 2e-4
"""Later layers see cells in another order, and add them up in it: f32 sums, then f16 storage."""


def texts(n_vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [[int(t) for t in rng.integers(0, n_vocab, N)] for _ in range(N_SEQ)]


def pieces(seed: int, n: int) -> list[tuple[int, int]]:
    """A random cut of n tokens."""
    rng = np.random.default_rng([5, seed])
    cuts = [0, *sorted({int(c) for c in rng.integers(1, n, rng.integers(1, 7))}), n]
    return list(zip(cuts[:-1], cuts[1:], strict=True))


def play(pair: Pair, order: list[int], cut: list[tuple[int, int]]) -> dict[int, bytes]:
    """Every sequence's text in the given pieces, sequences of a piece in one batch; all rows of each sequence."""
    text, rows = texts(pair.n_vocab), dict.fromkeys(order, b"")
    for a, b in cut:
        ids = [t for s in order for t in text[s][a:b]]
        got = pair.decode(
            ids, pos=[p for _ in order for p in range(a, b)], seq_id=[s for s in order for _ in range(a, b)]
        )
        assert got is not None and pair.comparison.bits_equal, pair.comparison.first_difference
        for i, s in enumerate(order):
            rows[s] += pair.ours.logits[i * (b - a) : (i + 1) * (b - a)].tobytes()
    return rows


def held(memory: Any, layer: int) -> dict[tuple[int, int], np.ndarray]:
    """Keys of a layer by sequence and position."""
    part = memory.part_of(layer) if "Sliding" in type(memory).__name__ else memory
    k, out = part.k(layer), {}
    for stream, cells in enumerate(part.streams.cells):
        for cell in np.flatnonzero(cells.pos >= 0):
            for s in cells.seq_ids(int(cell)):
                out[s, int(cells.pos[cell])] = k[stream, cell]
    return out


@pytest.fixture(scope="module", params=ARCHS)
def models(request: pytest.FixtureRequest, reference: Library, tiny_model: TinyModels) -> Any:
    with Models(reference, tiny_model(TinyModel(request.param))) as opened:
        yield opened


@pytest.mark.parametrize("seed", range(3))
def test_every_split_equals_the_references_same_split(models: Models, seed: int) -> None:
    setup = Setup(n_ubatch=int(np.random.default_rng(seed).integers(4, 20)))
    with Pair(models, setup) as pair:
        play(pair, [0], pieces(seed, N))


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_order_of_sequences_matters_only_where_it_does_to_the_reference(
    models: Models, unified: bool
) -> None:
    setup = Setup(n_ctx=256 * (1 if unified else N_SEQ), n_seq_max=N_SEQ, kv_unified=unified, n_ubatch=16)
    positions = []
    for order in ([0, 1, 2], [2, 0, 1]):
        with Pair(models, setup) as pair:
            play(pair, order, pieces(1, N))
            memory = pair.ours.memory
            assert memory is not None
            positions.append([(memory.seq_pos_min(s), memory.seq_pos_max(s)) for s in range(N_SEQ)])
            pair.compare_positions(N_SEQ)
            assert pair.comparison.bits_equal, pair.comparison.first_difference
    assert positions[0] == positions[1]


@pytest.mark.parametrize("name", WITH_KEYS)
def test_streams_order_and_splits_store_the_same_keys(
    reference: Library, tiny_model: TinyModels, name: str
) -> None:
    ways = [(True, [0, 1, 2], 1), (False, [0, 1, 2], 1), (False, [2, 0, 1], 2), (True, [1, 2, 0], 3)]
    with Models(reference, tiny_model(TinyModel(name))) as models:
        kept = []
        for unified, order, seed in ways:
            setup = Setup(
                256 * (1 if unified else N_SEQ),
                n_seq_max=N_SEQ,
                kv_unified=unified,
                type_k="f32",
                type_v="f32",
            )
            with Pair(models, setup) as pair:
                play(pair, order, pieces(seed, N))
                kept.append([held(pair.ours.memory, layer) for layer in (0, 1)])
    assert len(kept[0][0]) == N * N_SEQ
    for other in kept[1:]:
        for layer, rows in enumerate(other):
            assert rows.keys() == kept[0][layer].keys()
            gap = max(float(np.abs(rows[key] - kept[0][layer][key]).max()) for key in rows)
            assert gap <= (1e-5 if layer == 0 else CLOSE), (layer, gap)


@pytest.mark.parametrize("arch", ["mamba2", "jamba"])
def test_order_of_sequences_leaves_each_the_same_state(
    reference: Library, tiny_model: TinyModels, arch: str
) -> None:
    with Models(reference, tiny_model(TinyModel(arch))) as models:
        kept = []
        for order in ([0, 1, 2], [2, 0, 1]):
            with Pair(models, Setup(n_seq_max=N_SEQ, kv_unified=True, n_ubatch=64)) as pair:
                play(pair, order, pieces(1, N))
                part: Any = pair.ours.memory if arch == "mamba2" else pair.ours.memory.recr  # type: ignore[union-attr]
                rows = part.states.tail[:N_SEQ]
                kept.append([side[rows] for il in part.tensors for side in (part.r(il), part.s(il))])
    for a, b in zip(*kept, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=CLOSE)
