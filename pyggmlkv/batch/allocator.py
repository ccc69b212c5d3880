"""Checks and completes a batch, then cuts it into ubatches.

Knows limits and the positions that memory holds, never cells. Everything is prepared aside and committed at the end
of `init`, so that a refused batch changes nothing.
Upstream: llama-batch.cpp, llama_batch_allocr.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggmlkv.batch.batch import Batch
from pyggmlkv.batch.positions import (
    PositionRule,
    SeqPositions,
    SeqRange,
    automatic_positions,
    check_coupled,
    check_positions,
)
from pyggmlkv.batch.sequences import MAX_SEQ, Index, TokenSequences, sequences_of, shared_out
from pyggmlkv.batch.split import EqualSplit, SequenceSets, next_equal, next_seq
from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.errors import BatchError
from pyggmlkv.logs import logger
from pyggmlkv.types import F32, I32, I64, Bool


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a batch is checked against."""

    n_vocab: int
    n_embd: int
    """Width of an input embedding."""
    n_seq_max: int = 1
    n_batch: int | None = None
    """Most tokens of a batch."""
    output_all: bool = False
    """Every token produces an output, whatever the batch says (embeddings)."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """A checked batch with nothing missing; arrays are read-only."""

    token: I32 | None
    embd: F32 | None
    pos: I32
    """(n_pos, n_tokens)."""
    is_text_pos: bool
    seqs: TokenSequences
    output: Bool
    output_order: I32 | None
    """Batch indices in the order asked for; None for batch order."""
    n_outputs: int
    seq_range: SeqRange

    @property
    def n_tokens(self) -> int:
        return self.seqs.n_tokens

    def select(self, index: Index, n_seqs: int, equal_seqs: bool) -> UBatch:
        """The tokens `index` as a ubatch of `n_seqs` sequence sets (0: as many as tokens)."""
        flat, offset = self.seqs.select(index)
        presence = self.seqs.present_in(flat)
        is_slice = isinstance(index, slice)
        output = self.output[index]
        n_tokens = len(output)
        return UBatch(
            equal_seqs=equal_seqs,
            n_tokens=n_tokens,
            n_seq_tokens=n_tokens // n_seqs if n_seqs else 1,
            n_seqs=n_seqs or n_tokens,
            n_seqs_unq=len(presence.seq_id_unq),
            n_pos=len(self.pos),
            token=None if self.token is None else self.token[index],
            embd=None if self.embd is None else self.embd[index],
            pos=np.ascontiguousarray(self.pos[:, index]) if is_slice else np.take(self.pos, index, axis=1),  # type: ignore[arg-type]
            n_seq_id=self.seqs.n_seq_id[index],
            seq_id_flat=flat,
            seq_id_offset=offset,
            seq_mask=self.seqs.mask[index],
            seq_id_unq=presence.seq_id_unq,
            seq_idx=presence.seq_idx,
            output=output,
            is_text_pos=self.is_text_pos,
        )


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
            BatchError: the sequence with its last stored and the offered position, or the field at fault, in the
                message and in `facts`. The allocator keeps the batch it had.

        Upstream: llama-batch.cpp, init.
        Differs: a position twice in a sequence is refused unless the model has position sections; so are negative
        positions, an id twice on a token and a token without one.
        """
        prepared = self._prepare(batch, limits, memory)
        self._batch = prepared
        self._sets = None
        self.split_reset()

    def _prepare(self, batch: Batch, limits: BatchLimits, memory: SeqPositions | None) -> PreparedBatch:
        _check_inputs(batch, limits)
        seqs = sequences_of(batch, limits.n_seq_max)
        rule = self._position_rule(batch)
        pos, seq_range = self._positions(batch, seqs, memory, rule)
        if seqs.is_coupled and memory is not None:
            check_coupled(seqs, memory)
        output, order = batch.output, batch.output_order
        n_outputs = int(np.count_nonzero(output))
        if limits.output_all and n_outputs != batch.n_tokens:
            if not batch.is_output_default:
                logger.warning(
                    "all tokens must be outputs here, but the batch asks for %d of %d", n_outputs, len(output)
                )
            output, order, n_outputs = np.ones(batch.n_tokens, dtype=np.bool_), None, batch.n_tokens
        return PreparedBatch(
            token=batch.tokens,
            embd=batch.embd,
            pos=pos,
            is_text_pos=rule is not PositionRule.SECTIONS,
            seqs=seqs,
            output=output,
            output_order=order,
            n_outputs=n_outputs,
            seq_range=seq_range,
        )

    def _position_rule(self, batch: Batch) -> PositionRule:
        """Also checks the shape of the positions that were given."""
        n_pos, pos = self.n_pos_per_embd, batch.pos
        n_rows = 0 if pos is None or pos.ndim == 1 else len(pos)
        if n_rows > 0 and n_rows != n_pos:
            raise BatchError(
                f"pos has {n_rows} rows of positions, the model has {n_pos} position sections",
                field="pos",
                given=n_rows,
                n_pos=n_pos,
            )
        if n_pos == 1:
            return PositionRule.CONSECUTIVE
        if n_rows == 0 and batch.tokens is None:
            raise BatchError(
                f"embeddings on a model with {n_pos} position sections need pos of shape ({n_pos}, n_tokens), "
                f"got {'none' if pos is None else pos.shape}",
                field="pos",
                n_pos=n_pos,
            )
        return PositionRule.SECTIONS if n_rows > 0 else PositionRule.TEXT

    def _positions(
        self, batch: Batch, seqs: TokenSequences, memory: SeqPositions | None, rule: PositionRule
    ) -> tuple[I32, SeqRange]:
        """Positions (n_pos, n_tokens)."""
        given = batch.pos
        if given is None:
            time, seq_range = automatic_positions(seqs, memory)
        else:
            if given.min() < 0:
                token = int(np.argmax((given < 0).reshape(-1, batch.n_tokens).any(axis=0)))
                offered = int(given.reshape(-1, batch.n_tokens)[:, token].min())
                seq_id = int(seqs.first[token])
                raise BatchError(
                    f"sequence {seq_id}: token {token} has position {offered}, expected 0 or more",
                    field="pos",
                    seq_id=seq_id,
                    token=token,
                    offered=offered,
                    stored=None if memory is None else memory.seq_pos_max(seq_id),
                )
            time = given if given.ndim == 1 else given[0]
        if given is not None or seqs.is_coupled:
            seq_range = check_positions(time, seqs, memory, rule)
        if given is not None and given.ndim == 2:
            return given, seq_range
        rows = time.reshape(1, -1)
        return rows if self.n_pos_per_embd == 1 else np.repeat(rows, self.n_pos_per_embd, axis=0), seq_range

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
        """For each output, in the order asked for, its row in ubatch order: `rows[allocator.output_rows]` restores it.

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
        """The next ubatch of sequence sets with equally many tokens each, grouped by set; None when all are used.

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
        """A made-up ubatch of `n_seqs` sequences 0, 1, ... with `n_seq_tokens` tokens each, for worst-case graphs.

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


def _check_inputs(batch: Batch, limits: BatchLimits) -> None:
    n_tokens = batch.n_tokens
    if n_tokens == 0:
        raise BatchError("the batch has zero tokens, expected at least one", field="n_tokens", n_tokens=0)
    if limits.n_batch is not None and n_tokens > limits.n_batch:
        raise BatchError(
            f"the batch has {n_tokens} tokens, n_batch allows {limits.n_batch}; decode it in parts",
            field="n_tokens",
            n_tokens=n_tokens,
            n_batch=limits.n_batch,
        )
    if batch.tokens is not None and batch.tokens.view(np.uint32).max() >= limits.n_vocab:
        index = int(np.argmax(batch.tokens.view(np.uint32) >= limits.n_vocab))
        token = int(batch.tokens[index])
        raise BatchError(
            f"token {index} has id {token}, expected 0 to {limits.n_vocab - 1} (n_vocab is {limits.n_vocab})",
            field="tokens",
            index=index,
            token_id=token,
            n_vocab=limits.n_vocab,
        )
    if batch.embd is not None and batch.embd.shape[1] != limits.n_embd:
        raise BatchError(
            f"embd has rows of {batch.embd.shape[1]} numbers, the model's n_embd is {limits.n_embd}",
            field="embd",
            given=batch.embd.shape[1],
            n_embd=limits.n_embd,
        )
