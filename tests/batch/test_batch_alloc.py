"""The named cases of llama.cpp's tests/test-batch-alloc.cpp, each under its own name, in our terms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pyggmlkv.batch import MAX_SEQ, Batch, BatchAllocator, BatchLimits, UBatch
from pyggmlkv.errors import BatchError

N_EMBD = 2
Held = dict[int, tuple[int, int]]


class HeldPositions:
    """A memory of which only the first and last position of each sequence is known."""

    def __init__(self, held: Held) -> None:
        self.held = held

    def seq_pos_min(self, seq_id: int) -> int | None:
        return self.held[seq_id][0] if seq_id in self.held else None

    def seq_pos_max(self, seq_id: int) -> int | None:
        return self.held[seq_id][1] if seq_id in self.held else None


def limits(n_seq_max: int = 4, n_vocab: int = 1000, output_all: bool = False) -> BatchLimits:
    return BatchLimits(n_vocab=n_vocab, n_embd=N_EMBD, n_seq_max=n_seq_max, output_all=output_all)


def rows(n_tokens: int) -> np.ndarray:
    """Embeddings in which row i holds 100 i, 100 i + 1, so that a token can be told from its row."""
    return 100.0 * np.arange(n_tokens)[:, None] + np.arange(N_EMBD)


def batch_of(
    pos: Sequence[int] | np.ndarray | None,
    seq_id: int | list[list[int]] | list[int] = 0,
    logits: str | list[bool] = "last",
    n_tokens: int | None = None,
) -> Batch:
    n_tokens = n_tokens if pos is None else np.shape(pos)[-1]
    assert n_tokens is not None
    return Batch(embd=rows(n_tokens), pos=pos, seq_id=seq_id, logits=logits)  # type: ignore[arg-type]


def accepted(batch: Batch, held: Held | None = None, n_seq_max: int = 4) -> BatchAllocator:
    allocator = BatchAllocator()
    allocator.init(batch, limits(n_seq_max), None if held is None else HeldPositions(held))
    return allocator


def ids_of(ubatch: UBatch) -> list[list[int]]:
    return [ubatch.seq_id(i).tolist() for i in range(ubatch.n_tokens)]


def taken(ubatch: UBatch | None) -> UBatch:
    assert ubatch is not None
    return ubatch


class TestInit:
    def test_rejects_n_seq_max_too_large(self) -> None:
        with pytest.raises(BatchError, match="n_seq_max is 257") as caught:
            BatchAllocator().init(batch_of([0]), limits(MAX_SEQ + 1))
        assert caught.value.facts["field"] == "n_seq_max"

    @pytest.mark.parametrize("token", [0, -1], ids=["token_id_at_n_vocab", "negative_token_id"])
    def test_rejects_invalid_token(self, token: int) -> None:
        with pytest.raises(BatchError, match=f"token 0 has id {token}"):
            BatchAllocator().init(Batch([token]), limits(n_vocab=0))

    @pytest.mark.parametrize("seq_id", [4, -1])
    @pytest.mark.parametrize("shape", ["all", "each", "lists"])
    def test_rejects_invalid_seq_id(self, seq_id: int, shape: str) -> None:
        shapes: dict[str, int | list[int] | list[list[int]]] = {
            "all": seq_id,
            "each": [seq_id],
            "lists": [[0, seq_id]],
        }
        given = shapes[shape]
        with pytest.raises(BatchError, match=f"sequence id {seq_id}, expected 0 to 3"):
            BatchAllocator().init(batch_of([0], seq_id=given), limits(4))

    def test_autofill_defaults(self) -> None:
        allocator = accepted(batch_of(None, n_tokens=4))
        batch = allocator.batch
        assert allocator.n_tokens == 4
        assert batch.pos.tolist() == [[0, 1, 2, 3]]
        assert batch.seqs.n_seq_id.tolist() == [1, 1, 1, 1]
        assert batch.seqs.flat.tolist() == [0, 0, 0, 0]
        assert allocator.n_outputs == 1
        assert batch.output.tolist() == [False, False, False, True]
        assert (allocator.seq_pos_min(0), allocator.seq_pos_max(0)) == (0, 3)
        assert allocator.seq_pos_min(1) is None

    def test_output_all(self) -> None:
        allocator = BatchAllocator()
        allocator.init(batch_of([0, 1, 2, 3]), limits(output_all=True))
        assert allocator.n_outputs == 4

    def test_explicit_logits(self) -> None:
        allocator = accepted(batch_of([0, 1, 2], logits=[True, False, True]))
        assert allocator.n_outputs == 2
        ubatch = taken(allocator.split_simple(10))
        assert ubatch.n_tokens == 3
        assert ubatch.output.tolist() == [True, False, True]
        assert allocator.out_ids.tolist() == [0, 2]

    def test_pos_from_memory(self) -> None:
        allocator = accepted(batch_of(None, n_tokens=3), {0: (0, 9)})
        assert (allocator.seq_pos_min(0), allocator.seq_pos_max(0)) == (10, 12)

    def test_pos_continuity_with_memory(self) -> None:
        accepted(batch_of([10, 11]), {0: (0, 9)})

    @pytest.mark.parametrize("first", [11, 9], ids=["gap", "overlap"])
    def test_pos_continuity_with_memory_is_required(self, first: int) -> None:
        with pytest.raises(BatchError, match=f"X = 9, the batch starts it at Y = {first}"):
            accepted(batch_of([first, first + 1]), {0: (0, 9)})

    def test_rejects_non_continuous_positions(self) -> None:
        with pytest.raises(BatchError, match="token 2 offers position 3 after 1") as caught:
            accepted(batch_of([0, 1, 3]))
        assert caught.value.facts["fault"] == "a gap"

    def test_rejects_decreasing_positions(self) -> None:
        with pytest.raises(BatchError, match="sequence 0: token 6 offers position 3 after 6") as caught:
            accepted(batch_of([4, 5, 0, 1, 6, 2, 3], seq_id=[0, 0, 1, 1, 0, 1, 0]))
        assert caught.value.facts["fault"] == "backwards"

    def test_allows_equal_positions_in_seq(self) -> None:
        """Where positions have sections. A plain model refuses them, which libllama does not."""
        allocator = BatchAllocator(n_pos_per_embd=4)
        allocator.init(Batch([1, 2, 3], pos=[0, 0, 1]), limits())
        assert allocator.n_tokens == 3
        with pytest.raises(BatchError, match="token 1 offers position 0 after 0") as caught:
            accepted(batch_of([0, 0, 1]))
        assert caught.value.facts["fault"] == "twice"

    def test_rejects_coupled_diverged_seqs(self) -> None:
        with pytest.raises(BatchError, match="0 holds positions 0 to 5, 1 holds positions 2 to 5"):
            accepted(batch_of([6], seq_id=[[0, 1]]), {0: (0, 5), 1: (2, 5)})
        accepted(batch_of([6], seq_id=[[0, 1]]), {0: (0, 5), 1: (0, 5)})


class TestSplit:
    def test_split_simple_chunks(self) -> None:
        allocator = accepted(batch_of(range(5)))
        ubatch = taken(allocator.split_simple(2))
        assert (ubatch.n_tokens, ubatch.equal_seqs, ubatch.n_seqs_unq) == (2, False, 1)
        assert (ubatch.seq_id_unq.tolist(), int(ubatch.seq_idx[0])) == ([0], 0)
        assert ubatch.pos.tolist() == [[0, 1]]
        assert ids_of(ubatch) == [[0], [0]]
        assert ubatch.embd is not None
        assert ubatch.embd.tolist() == [[0, 1], [100, 101]]
        assert taken(allocator.split_simple(2)).pos.tolist() == [[2, 3]]
        ubatch = taken(allocator.split_simple(2))
        assert (ubatch.pos.tolist(), ubatch.output.tolist()) == ([[4]], [True])
        assert allocator.n_used == 5
        assert allocator.split_simple(2) is None
        assert allocator.out_ids.tolist() == [4]

    def test_split_reset_allows_resplit(self) -> None:
        allocator = accepted(batch_of(range(3)))
        while allocator.split_simple(1):
            pass
        assert allocator.n_used == 3
        allocator.split_reset()
        assert allocator.n_used == 0
        assert taken(allocator.split_simple(10)).n_tokens == 3

    def test_split_equal_unequal_lengths(self) -> None:
        allocator = accepted(batch_of([0, 1, 2, 3, 0, 1], seq_id=[0, 0, 0, 0, 1, 1]))
        ubatch = taken(allocator.split_equal(8, False))
        assert ubatch.equal_seqs
        assert (ubatch.n_tokens, ubatch.n_seq_tokens, ubatch.n_seqs, ubatch.n_seqs_unq) == (4, 2, 2, 2)
        assert ids_of(ubatch) == [[0], [0], [1], [1]]
        assert ubatch.pos.tolist() == [[0, 1, 0, 1]]
        ubatch = taken(allocator.split_equal(8, False))
        assert (ubatch.n_tokens, ubatch.n_seqs, ubatch.pos.tolist()) == (2, 1, [[2, 3]])
        assert allocator.split_equal(8, False) is None
        assert allocator.n_used == 6

    def test_split_equal_coupled(self) -> None:
        allocator = accepted(batch_of([0, 1], seq_id=[[0, 1], [0, 1]]))
        with pytest.raises(BatchError, match="kv_unified"):
            allocator.split_equal(4, True)
        assert allocator.n_used == 0
        ubatch = taken(allocator.split_equal(4, False))
        assert (ubatch.n_tokens, ubatch.n_seqs, ubatch.n_seqs_unq) == (2, 1, 2)
        assert int(ubatch.n_seq_id[0]) == 2
        assert ubatch.seq_idx[:2].tolist() == [0, 1]

    def test_split_seq_per_sequence(self) -> None:
        allocator = accepted(batch_of([0, 1] * 3, seq_id=[0, 0, 1, 1, 2, 2]))
        for seq_id in range(3):
            ubatch = taken(allocator.split_seq(8))
            assert (ubatch.n_tokens, ubatch.n_seqs) == (2, 1)
            assert (ids_of(ubatch)[0], ubatch.seq_id_unq.tolist()) == ([seq_id], [seq_id])
        assert allocator.split_seq(8) is None
        assert allocator.n_used == 6

    def test_ubatch_reserve(self) -> None:
        ubatch = BatchAllocator().ubatch_reserve(3, 2)
        assert (ubatch.n_tokens, ubatch.n_seq_tokens, ubatch.n_seqs, ubatch.n_seqs_unq) == (6, 3, 2, 2)
        assert ubatch.equal_seqs
        assert ubatch.seq_id_unq.tolist() == [0, 1]
        assert ubatch.token is not None
        assert ubatch.embd is None


def sequences_of_lengths(*n_tokens: int) -> Batch:
    """For each length one sequence from position 0, with an output at its end."""
    return batch_of(
        [i for n in n_tokens for i in range(n)],
        seq_id=[s for s, n in enumerate(n_tokens) for _ in range(n)],
        logits=[i == n - 1 for n in n_tokens for i in range(n)],
    )


class TestKeepTail:
    def test_noop_when_seqs_complete(self) -> None:
        allocator = accepted(sequences_of_lengths(2, 2))
        ubatch = taken(allocator.split_equal(4, False, 2))
        assert (ubatch.n_tokens, ubatch.n_seqs, ubatch.n_seq_tokens) == (4, 2, 2)
        assert allocator.split_equal(4, False, 2) is None

    def test_defers_seq_with_short_remainder(self) -> None:
        allocator = accepted(sequences_of_lengths(2, 3))
        ubatch = taken(allocator.split_equal(4, True, 2))
        assert (ubatch.n_tokens, ubatch.n_seqs, ids_of(ubatch)[0]) == (2, 1, [0])
        assert allocator.n_used == 2
        ubatch = taken(allocator.split_equal(4, True, 2))
        assert (ubatch.n_tokens, ubatch.n_seqs, ids_of(ubatch)[0]) == (3, 1, [1])
        assert ubatch.pos.tolist() == [[0, 1, 2]]
        assert allocator.n_used == 5
        assert allocator.split_equal(4, True, 2) is None

    def test_completes_first_seq_when_all_violate(self) -> None:
        allocator = accepted(sequences_of_lengths(3, 3))
        ubatch = taken(allocator.split_equal(4, False, 2))
        assert (ubatch.n_tokens, ubatch.n_seqs, ubatch.n_seq_tokens) == (3, 1, 3)
        assert (ids_of(ubatch)[0], ubatch.pos.tolist()) == ([0], [[0, 1, 2]])
        assert allocator.n_used == 3
        ubatch = taken(allocator.split_equal(4, False, 2))
        assert (ubatch.n_tokens, ids_of(ubatch)[0]) == (3, [1])
        assert allocator.n_used == 6

    def test_truncates_to_preserve_tail(self) -> None:
        allocator = accepted(sequences_of_lengths(5))
        ubatch = taken(allocator.split_equal(4, False, 2))
        assert (ubatch.n_tokens, ubatch.n_seqs, int(ubatch.pos[0, 2])) == (3, 1, 2)
        assert allocator.n_used == 3
        ubatch = taken(allocator.split_equal(4, False, 2))
        assert (ubatch.pos.tolist(), ubatch.output.tolist()) == ([[3, 4]], [False, True])
        assert allocator.n_used == 5

    def test_keeps_full_ubatch_with_sufficient_remainder(self) -> None:
        allocator = accepted(sequences_of_lengths(6))
        assert taken(allocator.split_equal(4, False, 2)).n_tokens == 4
        assert taken(allocator.split_equal(4, False, 2)).pos.tolist() == [[4, 5]]
        assert allocator.n_used == 6

    def test_multi_seq_prefix_kept(self) -> None:
        allocator = accepted(sequences_of_lengths(3, 4))
        ubatch = taken(allocator.split_equal(6, True, 2))
        assert (ubatch.n_tokens, ubatch.n_seqs, ids_of(ubatch)[0]) == (3, 1, [0])
        assert allocator.n_used == 3
        ubatch = taken(allocator.split_equal(6, True, 2))
        assert (ubatch.n_tokens, ids_of(ubatch)[0]) == (4, [1])
        assert allocator.n_used == 7


class TestMRoPE:
    def test_pos_layout_and_split(self) -> None:
        sections = [[10, 11], [5, 6], [7, 8], [0, 0]]
        allocator = BatchAllocator(n_pos_per_embd=4)
        allocator.init(batch_of(np.array(sections)), limits())
        ubatch = taken(allocator.split_simple(2))
        assert (ubatch.n_tokens, ubatch.n_pos, ubatch.is_pos_2d) == (2, 4, True)
        assert ubatch.pos.tolist() == sections
        assert not ubatch.is_text_pos

    @pytest.mark.parametrize("first", [15, 9], ids=["gap", "overlap"])
    def test_pos_jump_allowed(self, first: int) -> None:
        allocator = BatchAllocator(n_pos_per_embd=4)
        allocator.init(batch_of(np.array([[first], [1], [1], [0]])), limits(), HeldPositions({0: (0, 9)}))
        assert allocator.seq_pos_min(0) == first

    def test_pos_jump_allowed_forward_only(self) -> None:
        allocator = BatchAllocator(n_pos_per_embd=4)
        with pytest.raises(BatchError, match="X = 9, the batch starts it at Y = 8"):
            allocator.init(batch_of(np.array([[8], [1], [1], [0]])), limits(), HeldPositions({0: (0, 9)}))
