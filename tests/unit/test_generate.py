"""Generation on a made-up context: what is decoded when, and how room is made. Real models are tested elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pyggmlkv.batch import Batch
from pyggmlkv.errors import BatchError, ShiftError, UsageError
from pyggmlkv.generate import ContextShift, generate
from pyggmlkv.types import F32

N_VOCAB = 50


class PositionMemory:
    """The positions of sequence 0, kept naively."""

    def __init__(self, can_shift: bool = True) -> None:
        self.can_shift = can_shift
        self.pos: list[int] = []

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        self.pos = [p for p in self.pos if not (p0 or 0) <= p < (10**9 if p1 is None else p1)]
        return True

    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> None:
        self.pos = [p + delta if (p0 or 0) <= p < (10**9 if p1 is None else p1) else p for p in self.pos]

    def seq_pos_max(self, seq_id: int) -> int | None:
        return max(self.pos, default=None)


class CountingContext:
    """Predicts the token after the last one, modulo the vocabulary, and keeps what it was given."""

    def __init__(self, n_ctx: int = 16, n_batch: int = 8, can_shift: bool = True) -> None:
        self.n_ctx_seq = n_ctx
        self.cparams = SimpleNamespace(n_batch=n_batch)
        self.memory = PositionMemory(can_shift)
        self.batches: list[list[int]] = []
        self.logits: F32 = np.zeros((0, N_VOCAB), np.float32)

    def decode(self, batch: Batch) -> None:
        assert batch.tokens is not None
        tokens = batch.tokens.tolist()
        first = -1 if (last := self.memory.seq_pos_max(0)) is None else last
        self.memory.pos += range(first + 1, first + 1 + len(tokens))
        assert len(self.memory.pos) <= self.n_ctx_seq, "the context overflowed"
        self.batches.append(tokens)
        self.logits = np.zeros((1, N_VOCAB), np.float32)
        self.logits[0, (tokens[-1] + 1) % N_VOCAB] = 1.0


def test_tokens_follow_the_prompt_one_at_a_time() -> None:
    ctx = CountingContext()
    assert list(generate(ctx, [3, 4, 5], 4)) == [6, 7, 8, 9]
    assert ctx.batches == [[3, 4, 5], [6], [7], [8]]


def test_a_long_prompt_is_decoded_in_batches() -> None:
    ctx = CountingContext(n_ctx=32)
    list(generate(ctx, list(range(20)), 1))
    assert [len(b) for b in ctx.batches] == [8, 8, 4]


def test_nothing_to_predict_still_decodes_the_prompt() -> None:
    ctx = CountingContext()
    generation = generate(ctx, [1, 2], 0)
    assert list(generation) == []
    assert (ctx.batches, generation.stop_reason) == ([[1, 2]], "length")


def test_a_stop_token_ends_it_and_is_not_given_out() -> None:
    generation = generate(CountingContext(), [3], 10, stop={6})
    assert (list(generation), generation.stop_reason) == ([4, 5], "stop")


def test_a_full_context_ends_it_without_a_shift() -> None:
    ctx = CountingContext(n_ctx=6)
    generation = generate(ctx, [1, 2, 3], None)
    assert (list(generation), generation.stop_reason) == ([4, 5, 6, 7], "context")
    assert ctx.memory.pos == list(range(6))


def test_a_shift_keeps_the_prefix_and_closes_the_gap() -> None:
    ctx = CountingContext(n_ctx=10)
    seen: list[tuple[str, int, list[int]]] = []
    shift = ContextShift(n_keep=2, on_shift=lambda when, n: seen.append((when, n, list(ctx.memory.pos))))
    assert list(generate(ctx, [1, 2, 3], 9, context_shift=shift)) == list(range(4, 13))
    assert seen == [("before", 1, list(range(10))), ("after", 1, list(range(6)))]


def test_a_generation_may_go_on_far_past_the_context() -> None:
    ctx = CountingContext(n_ctx=10)
    generation = generate(ctx, [1, 2, 3], 100, context_shift=ContextShift(n_keep=3))
    assert len(list(generation)) == 100
    assert generation.n_shifts > 20
    assert ctx.memory.pos == list(range(len(ctx.memory.pos)))


def test_half_of_what_is_not_kept_is_dropped() -> None:
    ctx = CountingContext(n_ctx=10)
    dropped: list[int] = []
    shift = ContextShift(n_keep=2, on_shift=lambda when, n: dropped.append(len(ctx.memory.pos)))
    list(generate(ctx, [1], 12, context_shift=shift))
    assert dropped[:2] == [10, 6]


def test_a_second_generation_goes_on_where_the_first_ended() -> None:
    ctx = CountingContext(n_ctx=10)
    list(generate(ctx, [1, 2], 3))
    list(generate(ctx, [5], 2))
    assert ctx.memory.pos == list(range(6))


def test_a_prompt_larger_than_the_context_is_refused_before_anything_is_decoded() -> None:
    ctx = CountingContext(n_ctx=4)
    with pytest.raises(BatchError, match="5 tokens.*room for 4"):
        list(generate(ctx, [1, 2, 3, 4, 5]))
    assert ctx.batches == []


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BatchError, match="no tokens"):
        generate(CountingContext(), [])


def test_a_memory_that_cannot_shift_is_refused_at_once() -> None:
    with pytest.raises(ShiftError, match="cannot be shifted"):
        generate(CountingContext(can_shift=False), [1], context_shift=True)


@pytest.mark.parametrize(
    "shift", [ContextShift(n_keep=-1), ContextShift(n_keep=15), ContextShift(n_discard=0)], ids=str
)
def test_a_shift_that_makes_no_room_is_refused(shift: ContextShift) -> None:
    with pytest.raises(UsageError):
        generate(CountingContext(), [1], context_shift=shift)


def test_timings_count_both_phases() -> None:
    generation = generate(CountingContext(), [1, 2, 3], 4)
    list(generation)
    assert (generation.timings.n_prompt, generation.timings.n_decode) == (3, 3)
