"""A batch checked against the limits and completed: nothing missing, nothing left to refuse.

Knows of memory only what `SeqPositions` tells.
Upstream: llama-batch.cpp, llama_batch_allocr::init and ubatch_add.
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
    check_not_negative,
    check_positions,
)
from pyggmlkv.batch.sequences import Index, TokenSequences, sequences_of
from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.errors import BatchError
from pyggmlkv.logs import logger
from pyggmlkv.types import F32, I32, Bool


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
        pos = self.pos[:, index] if isinstance(index, slice) else np.take(self.pos, index, axis=1)
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
            pos=np.ascontiguousarray(pos),
            n_seq_id=self.seqs.n_seq_id[index],
            seq_id_flat=flat,
            seq_id_offset=offset,
            seq_mask=self.seqs.mask[index],
            seq_id_unq=presence.seq_id_unq,
            seq_idx=presence.seq_idx,
            output=output,
            is_text_pos=self.is_text_pos,
        )


def prepare(
    batch: Batch, limits: BatchLimits, memory: SeqPositions | None, n_pos_per_embd: int
) -> PreparedBatch:
    """Checks a batch and fills in what it leaves open; changes nothing.

    Raises:
        BatchError: see `BatchAllocator.init`.
    """
    if not isinstance(batch, Batch):
        raise BatchError(f"expected a Batch, {type(batch).__name__} given; write Batch(tokens)")
    _check_inputs(batch, limits)
    seqs = sequences_of(batch, limits.n_seq_max)
    rule = _position_rule(batch, n_pos_per_embd)
    pos, seq_range = _positions(batch, seqs, memory, rule)
    if seqs.is_coupled and memory is not None:
        check_coupled(seqs, memory)
    if len(pos) < n_pos_per_embd:
        pos = np.repeat(pos, n_pos_per_embd, axis=0)
    pos.setflags(write=False)
    output, order = batch.output, batch.output_order
    n_outputs = int(np.count_nonzero(output))
    if limits.output_all and n_outputs != batch.n_tokens:
        if not batch.is_output_default:
            logger.warning(
                "all tokens must be outputs here, but the batch asks for %d of %d", n_outputs, len(output)
            )
        output, order, n_outputs = np.ones(batch.n_tokens, dtype=np.bool_), None, batch.n_tokens
        output.setflags(write=False)
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


def _position_rule(batch: Batch, n_pos: int) -> PositionRule:
    """Also checks the shape of the positions that were given."""
    pos = batch.pos
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
    batch: Batch, seqs: TokenSequences, memory: SeqPositions | None, rule: PositionRule
) -> tuple[I32, SeqRange]:
    """Positions (n_pos, n_tokens) where given by section, else (1, n_tokens)."""
    if batch.pos is not None:
        rows = batch.pos.reshape(-1, batch.n_tokens)
        check_not_negative(rows, seqs, memory)
        return rows, check_positions(rows[0], seqs, memory, rule)
    pos, seq_range = automatic_positions(seqs, memory)
    if seqs.is_coupled:
        seq_range = check_positions(pos, seqs, memory, rule)
    return pos.reshape(1, -1), seq_range


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
