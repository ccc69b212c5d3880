"""Which sequences each token of a batch belongs to: ids token by token, as bit sets, and grouped by sequence.

Checks the ids; knows no positions. Upstream: llama-batch.cpp, the sequence part of llama_batch_allocr::init.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggmlkv.batch.batch import Batch
from pyggmlkv.errors import BatchError
from pyggmlkv.types import I32, I64, U64

MAX_SEQ = 256
"""Most sequence ids a context can have (LLAMA_MAX_SEQ)."""

Index = slice | I64


@dataclass(frozen=True, slots=True, eq=False)
class Presence:
    """The ids that occur among some tokens, and where each stands in their list."""

    seq_id_unq: I32
    """(n_seqs_unq,), ascending."""
    seq_idx: I32
    """(n_seq_max,), -1 where absent."""


@dataclass(frozen=True, slots=True, eq=False)
class SeqGroups:
    """The batch regrouped: for each present id, in ascending order, its tokens in batch order."""

    seq_ids: list[int]
    token: I64
    """Batch index of each (token, id) pair, pairs sorted by id."""
    start: I64
    """(n + 1,): where each id's pairs start."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequences:
    """Sequence ids of n_tokens tokens. `seq_id` is set when all tokens have that one id."""

    n_seq_max: int
    seq_id: int | None
    flat: I32
    offset: I32
    n_seq_id: I32
    mask: U64
    presence: Presence
    is_coupled: bool
    """Some token has several ids."""

    def __post_init__(self) -> None:
        for shared in (self.flat, self.offset, self.n_seq_id, self.mask):
            shared.setflags(write=False)
        self.presence.seq_id_unq.setflags(write=False)
        self.presence.seq_idx.setflags(write=False)

    @property
    def n_tokens(self) -> int:
        return len(self.n_seq_id)

    @property
    def first(self) -> I32:
        """(n_tokens,): each token's first id."""
        if not self.is_coupled:
            return self.flat
        first: I32 = self.flat[self.offset[:-1]]
        return first

    def pair_token(self) -> I64:
        """Batch index of each entry of `flat`."""
        return np.repeat(np.arange(self.n_tokens), self.n_seq_id)

    def groups(self) -> SeqGroups:
        """The batch regrouped by sequence id."""
        n_pairs = len(self.flat)
        if self.seq_id is not None:
            return SeqGroups([self.seq_id], np.arange(n_pairs), np.array([0, n_pairs]))
        order = np.argsort(self.flat, kind="stable")
        counts = np.bincount(self.flat, minlength=self.n_seq_max)[self.presence.seq_id_unq]
        start = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
        token = self.pair_token()[order] if self.is_coupled else order
        return SeqGroups(self.presence.seq_id_unq.tolist(), token, start)

    def select(self, index: Index) -> tuple[I32, I32]:
        """(flat, offset) of some tokens, offsets starting at 0."""
        if not self.is_coupled:
            flat = self.flat[index]
            return flat, self.offset[: len(flat) + 1]
        counts = self.n_seq_id[index]
        offset = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=offset[1:])
        if isinstance(index, slice):
            return self.flat[self.offset[index.start] : self.offset[index.stop]], offset
        source = np.arange(offset[-1]) + np.repeat(self.offset[:-1][index] - offset[:-1], counts)
        return self.flat[source], offset

    def present_in(self, flat: I32) -> Presence:
        """Which ids occur in `flat`, a part of this batch's ids."""
        if self.seq_id is not None or len(flat) == len(self.flat):
            return self.presence
        return presence_of(flat, self.n_seq_max)


def presence_of(flat: I32, n_seq_max: int) -> Presence:
    """Which ids occur in `flat`."""
    occurs = np.zeros(n_seq_max, dtype=np.bool_)
    occurs[flat] = True
    seq_id_unq = np.flatnonzero(occurs).astype(np.int32)
    seq_idx = np.full(n_seq_max, -1, dtype=np.int32)
    seq_idx[seq_id_unq] = np.arange(len(seq_id_unq), dtype=np.int32)
    return Presence(seq_id_unq, seq_idx)


def mask_words(n_seq_max: int) -> int:
    """64-bit words of a sequence set."""
    return (n_seq_max + 63) // 64


def sequences_of(batch: Batch, n_seq_max: int) -> TokenSequences:
    """Checks the ids of a batch and prepares them.

    Raises:
        BatchError: an id out of range, a token without an id, an id twice on one token.
    """
    if not 1 <= n_seq_max <= MAX_SEQ:
        raise BatchError(
            f"n_seq_max is {n_seq_max}, expected 1 to {MAX_SEQ}",
            field="n_seq_max",
            given=n_seq_max,
            limit=MAX_SEQ,
        )
    if batch.seq_id is not None:
        return one_sequence(batch.seq_id, batch.n_tokens, n_seq_max)
    assert batch.seq_id_flat is not None
    return _many_sequences(batch.seq_id_flat, batch.seq_id_offset, batch.n_tokens, n_seq_max)


def one_sequence(seq_id: int, n_tokens: int, n_seq_max: int) -> TokenSequences:
    """All tokens in one sequence."""
    if not 0 <= seq_id < n_seq_max:
        raise _id_out_of_range(seq_id, n_seq_max, None)
    flat = np.full(n_tokens, seq_id, dtype=np.int32)
    mask = np.zeros((n_tokens, mask_words(n_seq_max)), dtype=np.uint64)
    mask[:, seq_id >> 6] = 1 << (seq_id & 63)
    seq_idx = np.full(n_seq_max, -1, dtype=np.int32)
    seq_idx[seq_id] = 0
    return TokenSequences(
        n_seq_max=n_seq_max,
        seq_id=seq_id,
        flat=flat,
        offset=np.arange(n_tokens + 1, dtype=np.int32),
        n_seq_id=np.ones(n_tokens, dtype=np.int32),
        mask=mask,
        presence=Presence(np.array((seq_id,), dtype=np.int32), seq_idx),
        is_coupled=False,
    )


def shared_out(n_seq_tokens: int, n_seqs: int, n_seq_max: int) -> TokenSequences:
    """Sequences 0, 1, ... with `n_seq_tokens` tokens each."""
    flat = np.repeat(np.arange(n_seqs, dtype=np.int32), n_seq_tokens)
    return _many_sequences(flat, None, len(flat), n_seq_max)


def _many_sequences(flat: I32, offset: I32 | None, n_tokens: int, n_seq_max: int) -> TokenSequences:
    if offset is None:
        offset = np.arange(n_tokens + 1, dtype=np.int32)
        n_seq_id = np.ones(n_tokens, dtype=np.int32)
        pair_token = None
    else:
        n_seq_id = np.diff(offset)
        if not n_seq_id.all():
            token = int(np.argmin(n_seq_id))
            raise BatchError(
                f"token {token} has no sequence id, expected at least one", field="seq_id", token=token
            )
        pair_token = np.repeat(np.arange(n_tokens), n_seq_id)
    outside = flat.view(np.uint32) >= n_seq_max
    if outside.any():
        pair = int(np.argmax(outside))
        raise _id_out_of_range(
            int(flat[pair]), n_seq_max, pair if pair_token is None else int(pair_token[pair])
        )
    mask = sequence_sets(flat, pair_token, n_tokens, n_seq_max)
    return TokenSequences(
        n_seq_max=n_seq_max,
        seq_id=None,
        flat=flat,
        offset=offset,
        n_seq_id=n_seq_id,
        mask=mask,
        presence=presence_of(flat, n_seq_max),
        is_coupled=pair_token is not None,
    )


def sequence_sets(flat: I32, pair_token: I64 | None, n_tokens: int, n_seq_max: int) -> U64:
    """The sequence set of each token, (n_tokens, n_words).

    Raises:
        BatchError: an id twice on one token.
    """
    mask = np.zeros((n_tokens, mask_words(n_seq_max)), dtype=np.uint64)
    bits = np.left_shift(np.uint64(1), (flat & 63).astype(np.uint64))
    if pair_token is None:
        mask[np.arange(n_tokens), flat >> 6] = bits
        return mask
    np.bitwise_or.at(mask, (pair_token, flat >> 6), bits)
    pair = np.sort(pair_token * MAX_SEQ + flat)
    same = pair[1:] == pair[:-1]
    if same.any():
        token = int(pair[np.argmax(same)]) // MAX_SEQ
        ids = flat[pair_token == token].tolist()
        raise BatchError(
            f"token {token} has sequence ids {ids}, one of them twice",
            field="seq_id",
            token=token,
            seq_ids=ids,
        )
    return mask


def _id_out_of_range(seq_id: int, n_seq_max: int, token: int | None) -> BatchError:
    where = "the batch" if token is None else f"token {token}"
    return BatchError(
        f"{where} has sequence id {seq_id}, expected 0 to {n_seq_max - 1} (n_seq_max is {n_seq_max})",
        field="seq_id",
        seq_id=seq_id,
        token=token,
        n_seq_max=n_seq_max,
    )
