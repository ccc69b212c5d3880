"""KQ masks against the rule, entry by entry: every window, causality, ALiBi, 2-D places and streams."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggmlkv.errors import ShapeError
from pyggmlkv.memory import slots
from pyggmlkv.memory.mask import MaskRule, SlidingWindow, fill_cross_mask, fill_kq_mask, fill_no_cache_mask
from pyggmlkv.memory.seq_ops import CellStreams, StreamsSpec
from tests.memory.ubatches import run, ubatch
from tests.oracle.mask_naive import is_masked, mask_entry

WINDOWS = [("none", 0), ("standard", 1), ("standard", 5), ("standard", 200), ("chunked", 4), ("chunked", 7)]
WINDOWS += [("symmetric", 6), ("symmetric", 5), ("symmetric", 1)]


def keys_of(streams: CellStreams, stream: int, n_kv: int) -> list:
    cells = streams.cells[stream]
    out = []
    for i in range(n_kv):
        xy = (int(cells.ext_x[i]), int(cells.ext_y[i])) if cells.ext_x is not None else (0, 0)
        out.append((int(cells.pos[i]), set(cells.seq_ids(i)), xy) if cells.pos[i] >= 0 else None)
    return out


def brute(streams: CellStreams, tokens: list, n_kv: int, causal: bool, swa: tuple, alibi: bool) -> np.ndarray:
    rows = []
    for pos, ids, *place in tokens:
        seq = ids[0] if isinstance(ids, list | tuple) else ids
        keys = keys_of(streams, streams.seq_to_stream[seq], n_kv)
        query = (pos, seq, place[0] if place else None)
        rows.append([mask_entry(key, query, causal, swa, alibi) for key in keys])
    return np.array(rows, np.float32)


def check(streams: CellStreams, tokens: list, swa: tuple, rule: tuple[bool, bool], dtype: type) -> None:
    causal, alibi = rule
    n_kv = streams.size
    out = np.full((len(tokens), n_kv), 7, dtype)
    u = ubatch(tokens, streams.spec.n_seq_max)
    fill_kq_mask(out, streams, u, causal, use_alibi=alibi)
    with np.errstate(over="ignore"):
        want = brute(streams, tokens, n_kv, causal, swa, alibi).astype(dtype)
    assert out.tobytes() == want.tobytes()


def messy(swa: tuple, n_pos: int = 1, n_stream: int = 1, seed: int = 0) -> CellStreams:
    """Cells out of order, with holes, shared cells, repeated positions and a pending shift."""
    rng = np.random.default_rng(seed)
    streams = CellStreams(StreamsSpec(48, 70 if n_stream == 1 else 3, n_stream, n_pos, SlidingWindow(*swa)))
    ids = [0, 1, 69] if n_stream == 1 else [0, 1, 2]
    for cells, mine in zip(streams.cells, [ids] if n_stream == 1 else [[i] for i in ids], strict=True):
        for i in rng.permutation(48)[:36].tolist():
            pos = int(rng.integers(0, 26))
            sets = [s for s in mine if rng.random() < 0.6] or [mine[0]]
            xy = (int(rng.integers(0, 4)), int(rng.integers(0, 4)))
            cells.place(
                np.array([i]), ubatch([(pos, sets, xy) if n_pos > 1 else (pos, sets)], streams.spec.n_seq_max)
            )
    return streams


RULES = list(itertools.product([True, False], [True, False]))
RULE_IDS = [f"{'causal' if c else 'full'}{'-alibi' if a else ''}" for c, a in RULES]


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("rule", RULES, ids=RULE_IDS)
@pytest.mark.parametrize("swa", WINDOWS, ids=lambda w: f"{w[0]}{w[1]}")
@pytest.mark.parametrize("n_stream", [1, 3])
def test_mask_of_messy_cells_equals_the_rule(n_stream: int, swa: tuple, rule: tuple, dtype: type) -> None:
    streams = messy(swa, n_stream=n_stream, seed=1)
    ids = [0, 1, 69] if n_stream == 1 else [0, 1, 2]
    tokens = [(pos, s) for s in ids for pos in (3, 9, 17, 24)]
    check(streams, tokens, swa, rule, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("rule", RULES, ids=RULE_IDS)
@pytest.mark.parametrize("swa", WINDOWS, ids=lambda w: f"{w[0]}{w[1]}")
def test_mask_of_a_long_run_equals_the_rule(swa: tuple, rule: tuple, dtype: type) -> None:
    streams = CellStreams(StreamsSpec(80, 2, window=SlidingWindow(*swa)))
    for pos0, n in ((0, 30), (30, 20)):
        u = run(pos0, n, 1, 2)
        streams.heads[0] = pos0
        streams.cells[0].place(np.arange(pos0, pos0 + n), u)
    check(streams, [(p, 1) for p in range(30, 50)], swa, rule, dtype)


@pytest.mark.parametrize("rule", RULES, ids=RULE_IDS)
@pytest.mark.parametrize(
    "swa", [("none", 0), ("standard", 5), ("chunked", 4), ("symmetric", 6)], ids=lambda w: w[0]
)
def test_mask_with_two_dimensional_places_equals_the_rule(swa: tuple, rule: tuple) -> None:
    streams = messy(swa, n_pos=4, seed=2)
    tokens = [(pos, [1, 0], (x, y)) for pos in (8, 9) for x in range(3) for y in range(3)]
    check(streams, tokens, swa, rule, np.float32)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 999),
    swa=st.sampled_from(WINDOWS),
    rule=st.sampled_from(RULES),
    tokens=st.lists(
        st.tuples(
            st.integers(0, 30), st.lists(st.sampled_from([0, 1, 5, 69]), min_size=1, max_size=2, unique=True)
        ),
        min_size=1,
        max_size=20,
    ),
)
def test_mask_of_any_tokens_equals_the_rule(seed: int, swa: tuple, rule: tuple, tokens: list) -> None:
    check(messy(swa, seed=seed), tokens, swa, rule, np.float32)


def test_token_of_several_sequences_sees_its_first_ones_cells() -> None:
    streams = CellStreams(StreamsSpec(4, 3))
    streams.cells[0].place(np.arange(2), ubatch([(0, 0), (0, 2)], 3))
    out = np.zeros((1, 4), np.float32)
    fill_kq_mask(out, streams, ubatch([(1, [2, 0])], 3))
    assert out[0].tolist() == [-math.inf, 0.0, -math.inf, -math.inf]


def test_mask_fills_the_four_dimensional_input_in_place() -> None:
    streams = CellStreams(StreamsSpec(8, 2, 2))
    u = ubatch([(0, 0), (1, 0), (0, 1), (1, 1)], 2)
    slots.apply_ubatch(streams, slots.find_slot(streams, u), u)
    out = np.full((2, 1, 2, 8), 9, np.float16)
    fill_kq_mask(out, streams, u)
    visible = np.isfinite(out[:, 0])
    assert visible.sum(axis=-1).tolist() == [[1, 2], [1, 2]]


def test_mask_covers_only_the_first_n_kv_cells() -> None:
    streams = CellStreams(StreamsSpec(512, 1))
    streams.cells[0].place(np.arange(300), run(0, 300, 0, 1))
    out = np.zeros((1, 256), np.float32)
    fill_kq_mask(out, streams, run(299, 1, 0, 1))
    assert np.isfinite(out).all()


def test_alibi_distances_beyond_float_precision_are_rounded_once() -> None:
    streams = CellStreams(StreamsSpec(3, 1))
    streams.cells[0].put(np.arange(2), np.array([1, 1 << 30], np.int32), np.ones((1, 2), np.uint64))
    tokens = [((1 << 30) + 65, 0), ((1 << 30) + 7, 0)]
    for dtype in (np.float32, np.float16):
        check(streams, tokens, ("none", 0), (True, True), dtype)


def test_shape_that_does_not_fit_is_refused() -> None:
    streams = CellStreams(StreamsSpec(8, 1))
    with pytest.raises(ShapeError, match="3 rows"):
        fill_kq_mask(np.zeros((2, 8), np.float32), streams, run(0, 3, 0, 1))
    with pytest.raises(ShapeError, match="contiguous"):
        fill_kq_mask(np.zeros((8, 3), np.float32).T, streams, run(0, 3, 0, 1))


# case 33: window widths


@pytest.mark.parametrize("n_swa", [1, 2, 7, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
def test_query_sees_exactly_as_many_keys_as_the_window_is_wide(n_swa: int, dtype: type) -> None:
    streams = CellStreams(StreamsSpec(32, 1, window=SlidingWindow("standard", n_swa)))
    streams.cells[0].place(np.arange(20), run(0, 20, 0, 1))
    out = np.zeros((20, 32), dtype)
    fill_kq_mask(out, streams, run(0, 20, 0, 1))
    assert np.isfinite(out).sum(axis=1).tolist() == [min(p + 1, n_swa) for p in range(20)]


@pytest.mark.parametrize("n_swa", [1, 2, 7, 100])
def test_symmetric_window_sees_half_its_width_to_each_side(n_swa: int) -> None:
    streams = CellStreams(StreamsSpec(32, 1, window=SlidingWindow("symmetric", n_swa)))
    streams.cells[0].place(np.arange(20), run(0, 20, 0, 1))
    out = np.zeros((20, 32), np.float32)
    fill_kq_mask(out, streams, run(0, 20, 0, 1), causal=False)
    half = n_swa // 2
    want = [sum(abs(k - p) <= half for k in range(20)) for p in range(20)]
    assert np.isfinite(out).sum(axis=1).tolist() == want


@pytest.mark.parametrize("swa", WINDOWS, ids=lambda w: f"{w[0]}{w[1]}")
def test_window_answers_as_the_rule_for_every_pair(swa: tuple) -> None:
    window = SlidingWindow(*swa)
    for key, query in itertools.product(range(30), range(30)):
        assert window.is_masked(key, query) == is_masked(*swa, key, query)


# case 07: tokens against tokens, one mask for each kind of layer


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("rule", RULES, ids=RULE_IDS)
@pytest.mark.parametrize("swa", WINDOWS, ids=lambda w: f"{w[0]}{w[1]}")
def test_mask_without_a_cache_equals_the_rule(swa: tuple, rule: tuple, dtype: type) -> None:
    causal, alibi = rule
    tokens = [(p, 0) for p in range(12)] + [(p, 2) for p in range(3)] + [(12, 0), (3, [2, 0])]
    first = [t[1][0] if isinstance(t[1], list) else t[1] for t in tokens]
    out = np.zeros((len(tokens), len(tokens)), dtype)
    fill_no_cache_mask(out, ubatch(tokens), MaskRule(causal, SlidingWindow(*swa), alibi))
    keys = [(t[0], {s}, (0, 0)) for t, s in zip(tokens, first, strict=True)]
    want = [
        [mask_entry(k, (t[0], s, None), causal, swa, alibi) for k in keys]
        for t, s in zip(tokens, first, strict=True)
    ]
    assert out.tobytes() == np.array(want, np.float32).astype(dtype).tobytes()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("swa", [("none", 0), ("standard", 4)], ids=["full", "window"])
def test_mask_with_and_without_a_cache_agree(swa: tuple, causal: bool) -> None:
    streams = CellStreams(StreamsSpec(12, 1, window=SlidingWindow(*swa)))
    u = run(0, 12, 0, 1)
    streams.cells[0].place(np.arange(12), u)
    cached, cacheless = np.zeros((12, 12), np.float32), np.zeros((12, 12), np.float32)
    fill_kq_mask(cached, streams, u, causal)
    fill_no_cache_mask(cacheless, u, MaskRule(causal, SlidingWindow(*swa)))
    assert cached.tobytes() == cacheless.tobytes()


# case 08: ALiBi by position


def test_alibi_bias_is_minus_the_distance_of_positions_whatever_the_cells() -> None:
    streams = CellStreams(StreamsSpec(8, 1))
    cells = np.array([6, 1, 4, 0])
    streams.cells[0].put(cells, np.array([0, 2, 3, 7], np.int32), np.ones((1, 4), np.uint64))
    out = np.zeros((1, 8), np.float32)
    fill_kq_mask(out, streams, run(5, 1, 0, 1), use_alibi=True)
    hidden = -math.inf
    assert out[0].tolist() == [hidden, -3.0, hidden, hidden, -2.0, hidden, -5.0, hidden]


# cross attention


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("sets", [[[0]] * 3, [[0], [2, 65], [1]]], ids=["one", "several"])
def test_cross_mask_shows_encoder_rows_of_shared_sequences(sets: list, dtype: type) -> None:
    encoded = [[0], [0, 65], [1], [2]]
    enc = ubatch([(i, ids) for i, ids in enumerate(encoded)], 70).seq_mask
    out = np.full((3, 4), 3, dtype)
    fill_cross_mask(out, enc, ubatch([(0, ids) for ids in sets], 70))
    want = [[0.0 if set(ids) & set(other) else -math.inf for other in encoded] for ids in sets]
    assert out.tolist() == want
