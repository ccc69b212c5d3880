"""One batch at a time, cut into ubatches by one of three splits.

Knows limits and the positions that memory holds, never cells. A batch is prepared aside and committed only
when nothing was wrong with it, so that a refused batch changes nothing.
Upstream: llama-batch.cpp, llama_batch_allocr.
"""

from __future__ import annotations

import numpy as np

from pyggmlkv.batch.batch import Batch
from pyggmlkv.batch.positions import SeqPositions, SeqRange
from pyggmlkv.batch.prepare import BatchLimits, PreparedBatch, prepare
from pyggmlkv.batch.sequences import MAX_SEQ, Index, shared_out
from pyggmlkv.batch.split import EqualSplit, SequenceSets, next_equal, next_seq
from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.errors import BatchError
from pyggmlkv.types import I32, I64, Bool


class BatchAllocator:
    """Turns one batch at a time into ubatches: `init`, then one of the three splits until it returns None."""

    def __init__(self, n_pos_per_embd: int = 1) -> None:
        if n_pos_per_embd < 1:
            raise BatchError(
                f"n_pos_per_embd is {n_pos_per_embd}, expected 1 or more", field="n_pos_per_embd"
            )
        self.n_pos_per_embd = n_pos_per_embd
        self._batch: PreparedBatch | None = None
        self._sets: SequenceSets | None = None
        self.split_reset()

    # -- a batch in

    def init(self, batch: Batch, limits: BatchLimits, memory: SeqPositions | None = None) -> None:
        """Checks `batch`, fills in positions, ids and outputs, and makes it the current batch.

        Without memory, sequences may start anywhere and automatic positions start at 0.

        Raises:
            BatchError: names the sequence with its last stored and the offered position, or the field at
                fault, in its message and in `facts`. The allocator keeps the batch it had.

        Upstream: llama-batch.cpp, init.
        Differs: a position twice in a sequence is refused unless the model has position sections; so are
        negative positions, an id twice on a token and a token without one.
        """
        prepared = prepare(batch, limits, memory, self.n_pos_per_embd)
        self._batch = prepared
        self._sets = None
        self.split_reset()

    # -- what the current batch is

    @property
    def batch(self) -> PreparedBatch:
        """The current batch, completed.

        Raises:
            BatchError: nothing was accepted yet.
        """
        if self._batch is None:
            raise BatchError("no batch: call init first")
        return self._batch

    @property
    def n_tokens(self) -> int:
        return 0 if self._batch is None else self._batch.n_tokens

    @property
    def n_outputs(self) -> int:
        return 0 if self._batch is None else self._batch.n_outputs

    @property
    def n_used(self) -> int:
        """Tokens handed out in ubatches since the last `split_reset`."""
        return self._n_used

    @property
    def out_ids(self) -> I32:
        """Batch index of each output, in the order in which ubatches handed them out."""
        batch, parts = self._batch, self._handed_out
        if batch is None or not parts:
            return np.zeros(0, dtype=np.int32)
        indices = [np.arange(part.start, part.stop) if isinstance(part, slice) else part for part in parts]
        index = indices[0] if len(indices) == 1 else np.concatenate(indices)
        return index[batch.output[index]].astype(np.int32)

    @property
    def output_rows(self) -> I64:
        """For each output, in the order asked for, its row in ubatch order.

        `rows[allocator.output_rows]` puts rows gathered ubatch by ubatch back in that order.
        Upstream: llama-context.cpp, output_swaps.
        """
        out_ids = self.out_ids
        order = self.batch.output_order
        rows = np.argsort(out_ids)
        return rows if order is None else rows[np.searchsorted(out_ids[rows], order)]

    def seq_pos_min(self, seq_id: int) -> int | None:
        """First position of a sequence in the current batch; None when it does not occur."""
        held = None if self._batch is None else self._batch.seq_range.of(seq_id)
        return None if held is None else held[0]

    def seq_pos_max(self, seq_id: int) -> int | None:
        """Last position of a sequence in the current batch; None when it does not occur."""
        held = None if self._batch is None else self._batch.seq_range.of(seq_id)
        return None if held is None else held[1]

    # -- ubatches out

    def split_reset(self) -> None:
        """Starts splitting the current batch from its first token."""
        self._n_used = 0
        self._is_prefix = True  # the used tokens are the first n_used
        self._used: Bool = np.zeros(self.n_tokens, dtype=np.bool_)
        self._handed_out: list[Index] = []

    def split_simple(self, n_ubatch: int) -> UBatch | None:
        """The next `n_ubatch` tokens in batch order; None when all are used.

        Differs: tokens that another split has handed out are left out.
        """
        _check_n_ubatch(n_ubatch)
        if self._batch is None or self._n_used >= self._batch.n_tokens:
            return None
        if self._is_prefix:
            stop = min(self._n_used + n_ubatch, self._batch.n_tokens)
            return self._hand_out(slice(self._n_used, stop), stop - self._n_used, 0, False)
        index = np.flatnonzero(~self._used)[:n_ubatch]
        return self._hand_out(index, len(index), 0, False)

    def split_equal(self, n_ubatch: int, sequential: bool, n_keep_tail: int = 0) -> UBatch | None:
        """The next ubatch of sequence sets with equally many tokens each, set after set; None at the end.

        As upstream, n_ubatch + 1 sets may join when that many are there; the ubatch is then one token longer.

        Args:
            sequential: the sets must be single sequences with ids s, s + 1, ...
            n_keep_tail: so many tokens at the end of each sequence stay in one ubatch.

        Raises:
            BatchError: `sequential` with tokens of several sequences; `n_keep_tail` not below `n_ubatch`.
        """
        _check_n_ubatch(n_ubatch)
        if not 0 <= n_keep_tail < n_ubatch and n_keep_tail != 0:
            raise BatchError(
                f"n_keep_tail is {n_keep_tail}, expected 0 to n_ubatch - 1 = {n_ubatch - 1}",
                field="n_keep_tail",
            )
        if self._batch is None or self._n_used >= self._batch.n_tokens:
            return None
        if sequential and self._batch.seqs.is_coupled:
            token = int(np.argmax(self._batch.seqs.n_seq_id > 1))
            raise BatchError(
                f"token {token} belongs to several sequences, which streams of their own cannot share; "
                "use kv_unified=True, or decode it once and copy the sequence",
                field="seq_id",
                token=token,
            )
        found = next_equal(self._sequence_sets(), self._used, EqualSplit(n_ubatch, sequential, n_keep_tail))
        return None if found is None else self._hand_out(found[0], len(found[0]), found[1], True)

    def split_seq(self, n_ubatch: int) -> UBatch | None:
        """The next up to `n_ubatch` tokens of one sequence set; None when all are used."""
        _check_n_ubatch(n_ubatch)
        if self._batch is None:
            return None
        index = next_seq(self._sequence_sets(), self._used, n_ubatch)
        return None if index is None else self._hand_out(index, len(index), 1, True)

    def ubatch_reserve(self, n_seq_tokens: int, n_seqs: int, n_seq_max: int = MAX_SEQ) -> UBatch:
        """A made-up ubatch of sequences 0, 1, ... with `n_seq_tokens` tokens each, for worst-case graphs.

        Differs: the current batch stays, and each token has its sequence's id.
        """
        if n_seq_tokens < 1 or not 1 <= n_seqs <= n_seq_max <= MAX_SEQ:
            raise BatchError(
                f"ubatch_reserve: {n_seqs} sequences of {n_seq_tokens} tokens, expected 1 or more tokens and "
                f"1 to {min(n_seq_max, MAX_SEQ)} sequences",
                field="n_seqs",
            )
        n_tokens = n_seq_tokens * n_seqs
        reserved = PreparedBatch(
            token=np.zeros(n_tokens, dtype=np.int32),
            embd=None,
            pos=np.zeros((self.n_pos_per_embd, n_tokens), dtype=np.int32),
            is_text_pos=True,
            seqs=shared_out(n_seq_tokens, n_seqs, n_seq_max),
            output=np.zeros(n_tokens, dtype=np.bool_),
            output_order=None,
            n_outputs=0,
            seq_range=SeqRange([], [], []),
        )
        return reserved.select(slice(0, n_tokens), n_seqs, True)

    def _sequence_sets(self) -> SequenceSets:
        if self._sets is None:
            self._sets = SequenceSets.of(self.batch.seqs)
        return self._sets

    def _hand_out(self, index: Index, n_tokens: int, n_seqs: int, equal_seqs: bool) -> UBatch:
        ubatch = self.batch.select(index, n_seqs, equal_seqs)
        self._used[index] = True
        self._n_used += n_tokens
        self._is_prefix = self._is_prefix and isinstance(index, slice)
        self._handed_out.append(index)
        return ubatch


def _check_n_ubatch(n_ubatch: int) -> None:
    if n_ubatch < 1:
        raise BatchError(f"n_ubatch is {n_ubatch}, expected 1 or more", field="n_ubatch")
