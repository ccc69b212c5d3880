"""What a batch is refused for and what the error says; that nothing changes then; automatic positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyggmlkv.batch import Batch, BatchAllocator, BatchLimits
from pyggmlkv.errors import BatchError

Held = dict[int, tuple[int, int]]
LIMITS = BatchLimits(n_vocab=100, n_embd=3, n_seq_max=4, n_batch=16)


class Memory:
    """Holds position ranges only; fails the test when anything but the two queries is used."""

    def __init__(self, held: Held) -> None:
        self.held = held

    def seq_pos_min(self, seq_id: int) -> int | None:
        return self.held[seq_id][0] if seq_id in self.held else None

    def seq_pos_max(self, seq_id: int) -> int | None:
        return self.held[seq_id][1] if seq_id in self.held else None


THREE = {0: (0, 3), 1: (0, 7), 2: (0, 5)}
"""Positions held in the cases below."""

REFUSED: dict[str, tuple[Callable[[], Batch], dict[str, Any]]] = {
    "one_of_three_does_not_continue": (
        lambda: Batch([1, 2, 3], pos=[4, 8, 9], seq_id=[0, 1, 2]),
        {"field": "pos", "seq_id": 2, "stored": 5, "offered": 9},
    ),
    "overlaps_memory": (
        lambda: Batch([1], pos=[5], seq_id=2),
        {"field": "pos", "seq_id": 2, "stored": 5, "offered": 5},
    ),
    "negative_position": (
        lambda: Batch([1, 2], pos=[4, -1]),
        {"field": "pos", "seq_id": 0, "token": 1, "stored": 3, "offered": -1},
    ),
    "negative_position_in_an_empty_sequence": (
        lambda: Batch([1], pos=[-1], seq_id=3),
        {"field": "pos", "seq_id": 3, "token": 0, "stored": None, "offered": -1},
    ),
    "gap_in_the_batch": (
        lambda: Batch([1, 2, 3], pos=[4, 5, 7]),
        {"field": "pos", "seq_id": 0, "stored": 3, "previous": 5, "offered": 7, "token": 2, "fault": "a gap"},
    ),
    "backwards": (
        lambda: Batch([1, 2, 3, 4], pos=[4, 6, 5, 5], seq_id=[0, 2, 0, 2]),
        {"seq_id": 2, "stored": 5, "previous": 6, "offered": 5, "token": 3, "fault": "backwards"},
    ),
    "same_position_twice": (
        lambda: Batch([1, 2, 3], pos=[4, 5, 5]),
        {"seq_id": 0, "stored": 3, "previous": 5, "offered": 5, "token": 2, "fault": "twice"},
    ),
    "shared_token_leaves_a_gap_in_its_second_sequence": (
        lambda: Batch([1, 2], pos=[4, 4], seq_id=[[0], [0, 3]]),
        {"seq_id": 0, "previous": 4, "offered": 4, "fault": "twice"},
    ),
    "sequence_id_at_the_limit": (
        lambda: Batch([1], seq_id=4),
        {"field": "seq_id", "seq_id": 4, "token": None},
    ),
    "sequence_id_of_one_token": (
        lambda: Batch([1, 2], seq_id=[0, 4]),
        {"field": "seq_id", "seq_id": 4, "token": 1, "n_seq_max": 4},
    ),
    "sequence_id_minus_one": (lambda: Batch([1], seq_id=-1), {"field": "seq_id", "seq_id": -1}),
    "no_sequence_id": (lambda: Batch([1, 2], seq_id=[[0], []]), {"field": "seq_id", "token": 1}),
    "sequence_id_twice_on_a_token": (
        lambda: Batch([1, 2], seq_id=[[0, 1], [1, 0, 1]]),
        {"field": "seq_id", "token": 1, "seq_ids": [1, 0, 1]},
    ),
    "diverged_sequences_share_a_token": (
        lambda: Batch([1], seq_id=[[3, 0]]),
        {"field": "pos", "seq_id": 0, "stored": 3, "offered": 0},
    ),
    "zero_tokens": (lambda: Batch([]), {"field": "n_tokens", "n_tokens": 0}),
    "more_than_n_batch": (lambda: Batch([1] * 17), {"field": "n_tokens", "n_tokens": 17, "n_batch": 16}),
    "token_outside_the_vocabulary": (
        lambda: Batch([1, 100]),
        {"field": "tokens", "index": 1, "token_id": 100, "n_vocab": 100},
    ),
    "negative_token": (lambda: Batch([-5]), {"field": "tokens", "index": 0, "token_id": -5}),
    "embedding_width": (lambda: Batch(embd=np.zeros((1, 2))), {"field": "embd", "given": 2, "n_embd": 3}),
    "sections_for_a_plain_model": (
        lambda: Batch([1], pos=[[4], [0], [0], [0]]),
        {"field": "pos", "given": 4, "n_pos": 1},
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refusal_carries_its_facts(case: tuple[Callable[[], Batch], dict[str, Any]]) -> None:
    make, facts = case
    with pytest.raises(BatchError) as caught:
        BatchAllocator().init(make(), LIMITS, Memory(dict(THREE)))
    assert {name: caught.value.facts[name] for name in facts} == facts


def snapshot(allocator: BatchAllocator) -> dict[str, object]:
    state = {name: getattr(allocator, name) for name in vars(allocator)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in state.items()}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refusal_leaves_the_half_split_batch_as_it_was(
    case: tuple[Callable[[], Batch], dict[str, Any]],
) -> None:
    allocator, memory = BatchAllocator(), Memory(dict(THREE))
    allocator.init(Batch([7, 8, 9], pos=[4, 5, 6], logits="all"), LIMITS, memory)
    allocator.split_simple(1)
    before = snapshot(allocator)
    with pytest.raises(BatchError):
        allocator.init(case[0](), LIMITS, memory)
    assert snapshot(allocator) == before
    assert memory.held == THREE
    rest = allocator.split_simple(8)
    assert rest is not None and rest.token is not None
    assert (rest.token.tolist(), rest.pos.tolist()) == ([8, 9], [[5, 6]])


def test_corrected_batch_is_accepted_after_a_refusal() -> None:
    allocator, memory = BatchAllocator(), Memory(dict(THREE))
    with pytest.raises(BatchError):
        allocator.init(Batch([1, 2, 3], pos=[4, 8, 9], seq_id=[0, 1, 2]), LIMITS, memory)
    allocator.init(Batch([1, 2, 3], pos=[4, 8, 6], seq_id=[0, 1, 2]), LIMITS, memory)
    assert allocator.n_tokens == 3


def test_error_states_the_rule_for_a_position_twice() -> None:
    with pytest.raises(BatchError, match="none twice, no gap, none backwards"):
        BatchAllocator().init(Batch([1, 2], pos=[4, 4]), LIMITS, Memory(dict(THREE)))


def test_coupled_sequences_with_different_starts_in_memory_are_refused() -> None:
    with pytest.raises(BatchError, match="0 and 1 share tokens") as caught:
        BatchAllocator().init(Batch([1], seq_id=[[0, 1]]), LIMITS, Memory({0: (0, 5), 1: (2, 5)}))
    assert (caught.value.facts["stored"], caught.value.facts["other_stored"]) == ((0, 5), (2, 5))


def test_empty_sequence_may_start_anywhere() -> None:
    allocator = BatchAllocator()
    allocator.init(Batch([1, 2], pos=[40, 41], seq_id=3), LIMITS, Memory(dict(THREE)))
    assert (allocator.seq_pos_min(3), allocator.seq_pos_max(3)) == (40, 41)


@pytest.mark.parametrize(
    ("seq_id", "expected"),
    [
        (2, [6, 7, 8, 9]),
        ([0, 3, 0, 2], [4, 0, 5, 6]),
        ([1, 1, 0, 1], [8, 9, 4, 10]),
        ([[0, 3], [0], [3], [3, 0]], None),
    ],
    ids=["one", "three", "two", "coupled_but_diverged"],
)
def test_automatic_positions_continue_memory(seq_id: Any, expected: list[int] | None) -> None:
    allocator, batch = BatchAllocator(), Batch([1, 2, 3, 4], seq_id=seq_id)
    if expected is None:
        with pytest.raises(BatchError):
            allocator.init(batch, LIMITS, Memory(dict(THREE)))
        return
    allocator.init(batch, LIMITS, Memory(dict(THREE)))
    assert allocator.batch.pos.tolist() == [expected]


def test_automatic_positions_of_shared_tokens_move_all_their_sequences_on() -> None:
    allocator = BatchAllocator()
    allocator.init(Batch([1] * 4, seq_id=[[0, 3], [0], [3], [0]]), LIMITS)
    assert allocator.batch.pos.tolist() == [[0, 1, 1, 2]]
    assert [allocator.seq_pos_max(s) for s in (0, 3, 1)] == [2, 1, None]


@pytest.mark.parametrize("seq_id", [0, [0, 1], [[0, 1], [0, 1]]], ids=["one", "two", "coupled"])
def test_positions_stay_within_32_bits(seq_id: Any) -> None:
    end = (0, 2**31 - 1)
    with pytest.raises(BatchError, match="last possible is 2147483647"):
        BatchAllocator().init(Batch([1, 2], seq_id=seq_id), LIMITS, Memory({0: end, 1: end}))


def test_override_by_output_all_marks_every_token(caplog: pytest.LogCaptureFixture) -> None:
    allocator = BatchAllocator()
    limits = BatchLimits(n_vocab=100, n_embd=3, output_all=True)
    allocator.init(Batch([1, 2, 3], logits=[2, 0]), limits)
    assert allocator.n_outputs == 3
    assert "asks for 2 of 3" in caplog.text
    caplog.clear()
    allocator.init(Batch([1, 2, 3]), limits)
    assert caplog.text == ""


# -- positions with sections (M-RoPE)


def image(time: int, n_rows: int, n_columns: int) -> np.ndarray:
    """Positions of an image, (4, n_rows * n_columns): one time, rows, columns, zero."""
    grid = np.mgrid[0:n_rows, 0:n_columns].reshape(2, -1)
    return np.stack([np.full(grid.shape[1], time), *grid, np.zeros(grid.shape[1])]).astype(np.int32)


@pytest.mark.parametrize("n_parts", [1, 2, 4])
@pytest.mark.parametrize("kind", ["embd", "tokens"])
def test_image_may_be_split_over_batches(n_parts: int, kind: str) -> None:
    allocator, memory = BatchAllocator(n_pos_per_embd=4), Memory({0: (0, 7)})
    for part in np.split(image(8, 4, 4), n_parts, axis=1):
        n = part.shape[1]
        given = {"embd": np.zeros((n, 3))} if kind == "embd" else {"tokens": [1] * n}
        allocator.init(Batch(pos=part, **given), LIMITS, memory)
        ubatch = allocator.split_simple(16)
        assert ubatch is not None
        assert np.array_equal(ubatch.pos, part)
        memory.held[0] = (0, 8)
    allocator.init(Batch([1], pos=[12]), LIMITS, memory)
    assert allocator.seq_pos_min(0) == 12


def test_image_behind_the_last_position_is_refused() -> None:
    with pytest.raises(BatchError, match="X <= Y") as caught:
        BatchAllocator(4).init(Batch(embd=np.zeros((4, 3)), pos=image(7, 2, 2)), LIMITS, Memory({0: (0, 8)}))
    assert (caught.value.facts["stored"], caught.value.facts["offered"]) == (8, 7)


def test_text_after_an_image_must_move_on() -> None:
    allocator, memory = BatchAllocator(4), Memory({0: (0, 8)})
    with pytest.raises(BatchError, match="X < Y"):
        allocator.init(Batch([1], pos=[8]), LIMITS, memory)
    allocator.init(Batch([1], pos=[11]), LIMITS, memory)


def test_positions_after_a_cut_count_from_the_last_position_not_from_the_cells() -> None:
    """Text 0..4, a 3x3 image at 5 (next position 8), text 8..10, a draft of 4 of which one is accepted."""
    allocator, memory = BatchAllocator(4), Memory({0: (0, 10)})
    allocator.init(Batch([1] * 4, logits="all"), LIMITS, memory)
    assert allocator.batch.pos[0].tolist() == [11, 12, 13, 14]
    memory.held[0] = (0, 11)
    allocator.init(Batch([1]), LIMITS, memory)
    assert allocator.batch.pos[0].tolist() == [12]


def test_text_positions_fill_all_sections() -> None:
    allocator = BatchAllocator(4)
    allocator.init(Batch([1, 2]), LIMITS, Memory({0: (0, 4)}))
    ubatch = allocator.split_simple(2)
    assert ubatch is not None
    assert ubatch.pos.tolist() == [[5, 6]] * 4
    assert ubatch.is_text_pos


@pytest.mark.parametrize("pos", [None, [0, 1], [[0, 1], [0, 0]]], ids=["none", "one_row", "two_rows"])
def test_embeddings_need_all_sections(pos: Any) -> None:
    with pytest.raises(BatchError, match="pos") as caught:
        BatchAllocator(4).init(Batch(embd=np.zeros((2, 3)), pos=pos), LIMITS)
    assert caught.value.facts["field"] == "pos"


def test_positions_with_sections_may_not_go_backwards() -> None:
    pos = np.hstack([image(8, 1, 2), image(7, 1, 1)])
    with pytest.raises(BatchError, match="token 2 offers position 7 after 8"):
        BatchAllocator(4).init(Batch(embd=np.zeros((3, 3)), pos=pos), LIMITS)
