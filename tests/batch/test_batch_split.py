"""The three splits against the naive ones, and what must hold for any batch."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggmlkv.batch import MAX_SEQ, Batch, BatchAllocator, BatchLimits, UBatch
from pyggmlkv.errors import BatchError
from tests.oracle.batch_naive import Chunk, NaiveBatch, Refused, prepare

N_SEQ_MAX = 70
"""More than one word of a sequence set."""

Split: TypeAlias = Literal["simple", "equal", "sequential", "seq"]
SPLITS: tuple[Split, ...] = ("simple", "equal", "sequential", "seq")
N_UBATCH = st.sampled_from([1, 2, 4, 7, 512])
SEQUENCES = st.lists(st.integers(0, N_SEQ_MAX - 1), min_size=1, max_size=5, unique=True)


@st.composite
def single_ids(draw: st.DrawFn) -> list[list[int]]:
    """Each token in one sequence."""
    pool = draw(SEQUENCES)
    ids = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=24))
    return [[s] for s in (sorted(ids) if draw(st.booleans()) else ids)]


@st.composite
def shared_prefix(draw: st.DrawFn) -> list[list[int]]:
    """A prompt that several sequences share, then tokens of their own."""
    pool = draw(SEQUENCES)
    n_shared = draw(st.integers(1, 8))
    return [list(pool)] * n_shared + [[s] for s in draw(st.lists(st.sampled_from(pool), max_size=12))]


@st.composite
def any_ids(draw: st.DrawFn) -> list[list[int]]:
    pool = draw(SEQUENCES)
    return draw(
        st.lists(
            st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique=True), min_size=1, max_size=16
        )
    )


def flags(n: int) -> st.SearchStrategy[list[bool]]:
    return st.lists(st.booleans(), min_size=n, max_size=n)


def accepted(ids: list[list[int]], outputs: list[bool]) -> tuple[BatchAllocator, NaiveBatch] | None:
    """The batch on both sides; token i has id i. None when both refuse it."""
    allocator = BatchAllocator()
    batch = Batch(range(len(ids)), seq_id=ids, logits=outputs)
    limits = BatchLimits(n_vocab=len(ids), n_embd=1, n_seq_max=N_SEQ_MAX)
    try:
        naive = prepare(ids, None, outputs, {}, N_SEQ_MAX)
    except Refused:
        with pytest.raises(BatchError):
            allocator.init(batch, limits)
        return None
    allocator.init(batch, limits)
    assert allocator.batch.pos[0].tolist() == [token.pos for token in naive.tokens]
    return allocator, naive


def step(allocator: BatchAllocator, split: Split, n_ubatch: int, n_keep_tail: int = 0) -> UBatch | None:
    if split == "simple":
        return allocator.split_simple(n_ubatch)
    if split == "seq":
        return allocator.split_seq(n_ubatch)
    return allocator.split_equal(n_ubatch, split == "sequential", n_keep_tail)


def naive_step(naive: NaiveBatch, split: Split, n_ubatch: int, n_keep_tail: int = 0) -> Chunk | None:
    if split == "simple":
        return naive.split_simple(n_ubatch)
    if split == "seq":
        return naive.split_seq(n_ubatch)
    return naive.split_equal(n_ubatch, split == "sequential", n_keep_tail)


def all_steps(allocator: BatchAllocator, split: Split, n_ubatch: int) -> list[UBatch]:
    ubatches = []
    while (ubatch := step(allocator, split, n_ubatch)) is not None:
        ubatches.append(ubatch)
    return ubatches


def tokens_of(ubatch: UBatch) -> list[int]:
    assert ubatch.token is not None
    return [int(token) for token in ubatch.token]


def assert_is(ubatch: UBatch, chunk: Chunk, naive: NaiveBatch) -> None:
    """Every field of `ubatch` is what the tokens of `chunk` say."""
    tokens = [naive.tokens[i] for i in chunk.index]
    present = sorted({s for token in tokens for s in token.ids})
    assert tokens_of(ubatch) == chunk.index
    assert (ubatch.n_tokens, ubatch.n_seqs, ubatch.equal_seqs) == (
        len(tokens),
        chunk.n_seqs,
        chunk.equal_seqs,
    )
    assert ubatch.n_seq_tokens * ubatch.n_seqs == ubatch.n_tokens
    assert ubatch.pos.tolist() == [[token.pos for token in tokens]]
    assert [ubatch.seq_id(i).tolist() for i in range(ubatch.n_tokens)] == [token.ids for token in tokens]
    assert ubatch.n_seq_id.tolist() == [len(token.ids) for token in tokens]
    assert ubatch.seq_id_first.tolist() == [token.ids[0] for token in tokens]
    masks = [sum(int(word) << 64 * w for w, word in enumerate(words)) for words in ubatch.seq_mask]
    assert masks == [sum(1 << s for s in token.ids) for token in tokens]
    assert (ubatch.seq_id_unq.tolist(), ubatch.n_seqs_unq) == (present, len(present))
    assert {s: int(i) for s, i in enumerate(ubatch.seq_idx) if i >= 0} == {
        s: i for i, s in enumerate(present)
    }
    assert ubatch.output.tolist() == [token.is_output for token in tokens]


def compare(
    ids: list[list[int]], outputs: list[bool], split: Split, n_ubatch: int, n_keep_tail: int = 0
) -> None:
    both = accepted(ids, outputs)
    if both is None:
        return
    allocator, naive = both
    if split == "sequential" and any(len(mine) > 1 for mine in ids):
        with pytest.raises(BatchError):
            step(allocator, split, n_ubatch, n_keep_tail)
        assert allocator.n_used == 0
        return
    handed_out = []
    while (chunk := naive_step(naive, split, n_ubatch, n_keep_tail)) is not None:
        ubatch = step(allocator, split, n_ubatch, n_keep_tail)
        assert ubatch is not None
        assert_is(ubatch, chunk, naive)
        handed_out += chunk.index
        assert allocator.n_used == len(handed_out)
        assert allocator.out_ids.tolist() == [i for i in handed_out if outputs[i]]
    assert step(allocator, split, n_ubatch, n_keep_tail) is None
    assert sorted(handed_out) == list(range(len(ids)))


@pytest.mark.parametrize("split", SPLITS)
@given(data=st.data(), n_ubatch=N_UBATCH)
@settings(max_examples=60, deadline=None)
def test_split_equals_the_naive_one(split: Split, data: st.DataObject, n_ubatch: int) -> None:
    ids = data.draw(st.one_of(single_ids(), shared_prefix(), any_ids()))
    compare(ids, data.draw(flags(len(ids))), split, n_ubatch)


@pytest.mark.parametrize("split", ["equal", "sequential"])
@given(data=st.data(), n_ubatch=st.sampled_from([4, 7, 512]), n_keep_tail=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_keep_tail_equals_the_naive_one(
    split: Split, data: st.DataObject, n_ubatch: int, n_keep_tail: int
) -> None:
    ids = data.draw(st.one_of(single_ids(), shared_prefix()))
    compare(ids, data.draw(flags(len(ids))), split, n_ubatch, n_keep_tail)


@pytest.mark.parametrize("split", SPLITS)
@given(ids=single_ids(), n_ubatch=N_UBATCH)
@settings(max_examples=40, deadline=None)
def test_order_within_each_sequence_is_kept(split: Split, ids: list[list[int]], n_ubatch: int) -> None:
    both = accepted(ids, [True] * len(ids))
    assert both is not None
    order = [i for ubatch in all_steps(both[0], split, n_ubatch) for i in tokens_of(ubatch)]
    for s in {mine[0] for mine in ids}:
        of_sequence = [i for i in order if ids[i] == [s]]
        assert of_sequence == sorted(of_sequence)


@pytest.mark.parametrize("split", ["equal", "sequential"])
@given(ids=single_ids(), n_ubatch=N_UBATCH)
@settings(max_examples=40, deadline=None)
def test_equal_split_gives_each_sequence_the_same_count(
    split: Split, ids: list[list[int]], n_ubatch: int
) -> None:
    both = accepted(ids, [True] * len(ids))
    assert both is not None
    for ubatch in all_steps(both[0], split, n_ubatch):
        counts = np.bincount(ubatch.seq_id_first)
        assert set(counts[counts > 0].tolist()) == {ubatch.n_seq_tokens}


@pytest.mark.parametrize("split", SPLITS)
@given(ids=single_ids(), n_ubatch=N_UBATCH, data=st.data())
@settings(max_examples=40, deadline=None)
def test_outputs_come_back_in_the_order_asked_for(
    split: Split, ids: list[list[int]], n_ubatch: int, data: st.DataObject
) -> None:
    asked = data.draw(st.lists(st.integers(0, len(ids) - 1), unique=True))
    allocator = BatchAllocator()
    batch = Batch(range(len(ids)), seq_id=ids, logits=asked)
    allocator.init(batch, BatchLimits(n_vocab=len(ids), n_embd=1, n_seq_max=N_SEQ_MAX))
    rows: list[int] = []
    for ubatch in all_steps(allocator, split, n_ubatch):
        rows += np.array(tokens_of(ubatch), dtype=int)[ubatch.output].tolist()
    assert allocator.n_outputs == len(asked)
    assert np.array(rows, dtype=int)[allocator.output_rows].tolist() == asked


@given(ids=st.one_of(single_ids(), shared_prefix()), data=st.data())
@settings(max_examples=60, deadline=None)
def test_mixed_splits_hand_out_every_token_once(ids: list[list[int]], data: st.DataObject) -> None:
    both = accepted(ids, [True] * len(ids))
    if both is None:
        return
    allocator, order = both[0], []
    while allocator.n_used < allocator.n_tokens:
        ubatch = step(allocator, data.draw(st.sampled_from(["simple", "equal", "seq"])), data.draw(N_UBATCH))
        assert ubatch is not None
        order += tokens_of(ubatch)
    assert sorted(order) == list(range(len(ids)))
    assert allocator.out_ids.tolist() == order


@pytest.mark.parametrize("split", SPLITS)
def test_three_sequences_interleaved_with_small_ubatches(split: Split) -> None:
    rng = np.random.default_rng(13)
    ids = [[int(s)] for s in rng.permutation(np.repeat([0, 1, 2], [7, 3, 5]))]
    for n_ubatch in (1, 2, 4, 512):
        compare(ids, (rng.random(len(ids)) < 0.5).tolist(), split, n_ubatch)


def test_sequential_split_takes_an_id_it_meets_again() -> None:
    compare([[0], [2], [1], [2]], [True] * 4, "sequential", 8)


def test_equal_split_holds_back_a_set_that_overlaps_any_chosen_one() -> None:
    compare([[0], [1], [0, 2]], [True] * 3, "equal", 8)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("seq_id", [0, 63, 64, N_SEQ_MAX - 1])
def test_one_id_for_all_is_the_same_as_that_id_for_each(split: Split, seq_id: int) -> None:
    limits = BatchLimits(n_vocab=9, n_embd=1, n_seq_max=N_SEQ_MAX)
    for form in (seq_id, [seq_id] * 9):
        allocator = BatchAllocator()
        allocator.init(Batch(range(9), seq_id=form), limits)
        naive = prepare([[seq_id]] * 9, None, [False] * 8 + [True], {}, N_SEQ_MAX)
        while (chunk := naive_step(naive, split, 4)) is not None:
            ubatch = step(allocator, split, 4)
            assert ubatch is not None
            assert_is(ubatch, chunk, naive)


@pytest.mark.parametrize("split", SPLITS)
def test_next_batch_is_split_by_its_own_sequences(split: Split) -> None:
    allocator, limits = BatchAllocator(), BatchLimits(n_vocab=9, n_embd=1, n_seq_max=N_SEQ_MAX)
    for ids in ([[0], [1], [1]], [[1], [1], [0], [2]]):
        allocator.init(Batch(range(len(ids)), seq_id=ids), limits)
        naive = prepare(ids, None, [False] * (len(ids) - 1) + [True], {}, N_SEQ_MAX)
        while (chunk := naive_step(naive, split, 4)) is not None:
            ubatch = step(allocator, split, 4)
            assert ubatch is not None
            assert_is(ubatch, chunk, naive)


def test_equal_split_admits_one_set_more_than_n_ubatch() -> None:
    both = accepted([[0], [1], [2]], [True] * 3)
    assert both is not None
    assert [tokens_of(ubatch) for ubatch in all_steps(both[0], "equal", 1)] == [[0, 1], [2]]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("n_ubatch", [0, -1])
def test_n_ubatch_below_one_is_refused(split: Split, n_ubatch: int) -> None:
    both = accepted([[0], [1]], [True] * 2)
    assert both is not None
    with pytest.raises(BatchError, match=f"n_ubatch is {n_ubatch}"):
        step(both[0], split, n_ubatch)


@pytest.mark.parametrize("n_keep_tail", [-1, 4, 5])
def test_keep_tail_must_fit_in_a_ubatch(n_keep_tail: int) -> None:
    both = accepted([[0]], [True])
    assert both is not None
    with pytest.raises(BatchError, match="n_keep_tail"):
        step(both[0], "equal", 4, n_keep_tail)


@pytest.mark.parametrize("split", SPLITS)
def test_nothing_comes_out_before_a_batch_went_in(split: Split) -> None:
    allocator = BatchAllocator()
    assert step(allocator, split, 4) is None
    assert (allocator.n_tokens, allocator.n_used, allocator.n_outputs, len(allocator.out_ids)) == (0, 0, 0, 0)
    with pytest.raises(BatchError, match="call init"):
        _ = allocator.batch


def test_what_ubatches_share_is_read_only() -> None:
    both = accepted([[0], [1], [0], [1]], [True] * 4)
    assert both is not None
    allocator = both[0]
    for name in ("flat", "offset", "n_seq_id", "mask"):
        assert not getattr(allocator.batch.seqs, name).flags.writeable
    assert not allocator.batch.pos.flags.writeable
    assert not allocator.batch.output.flags.writeable


def test_reserve_leaves_the_current_batch() -> None:
    both = accepted([[0], [1]], [True] * 2)
    assert both is not None
    step(both[0], "simple", 1)
    both[0].ubatch_reserve(8, 2)
    assert (both[0].n_tokens, both[0].n_used) == (2, 1)


def test_reserved_ubatch_has_ids_and_words_for_the_limit() -> None:
    ubatch = BatchAllocator(n_pos_per_embd=4).ubatch_reserve(2, 3, n_seq_max=N_SEQ_MAX)
    assert ubatch.pos.shape == (4, 6)
    assert ubatch.seq_id_first.tolist() == [0, 0, 1, 1, 2, 2]
    assert ubatch.seq_mask[:, 0].tolist() == [1, 1, 2, 2, 4, 4]
    assert (ubatch.seq_mask.shape, ubatch.seq_idx.shape) == ((6, 2), (N_SEQ_MAX,))


@pytest.mark.parametrize(
    ("n_seq_tokens", "n_seqs", "n_seq_max"), [(0, 1, 1), (1, 0, 1), (1, 2, 1), (1, 1, MAX_SEQ + 1)]
)
def test_reserve_needs_tokens_and_sequences(n_seq_tokens: int, n_seqs: int, n_seq_max: int) -> None:
    with pytest.raises(BatchError, match="ubatch_reserve"):
        BatchAllocator().ubatch_reserve(n_seq_tokens, n_seqs, n_seq_max)


def test_repr_of_a_ubatch_is_one_line() -> None:
    both = accepted([[0], [1], [0], [1]], [True, False, False, True])
    assert both is not None
    ubatch = step(both[0], "equal", 4)
    assert repr(ubatch) == "UBatch(4 tokens 2 x 2 of sequences [0, 1], 2 outputs)"
