"""Positions of a batch: filled in from what memory holds, or checked against it.

Knows memory only by the first and last position of each sequence.
Upstream: llama-batch.cpp, the position part of llama_batch_allocr::init.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NoReturn, Protocol

import numpy as np

from pyggmlkv.batch.sequences import MAX_SEQ, SeqGroups, TokenSequences
from pyggmlkv.errors import BatchError
from pyggmlkv.types import I32

MAX_POS = 2**31 - 1


class SeqPositions(Protocol):
    """The part of a memory that a batch is checked against."""

    def seq_pos_min(self, seq_id: int) -> int | None:
        """First stored position of a sequence; None when it is empty."""

    def seq_pos_max(self, seq_id: int) -> int | None:
        """Last stored position of a sequence; None when it is empty."""


class PositionRule(Enum):
    """How the first offered position Y must follow the last stored position X, and each the one before it."""

    CONSECUTIVE = "Y = X + 1, and positions of a sequence go up by one: none twice, no gap, none backwards"
    TEXT = "for text on an M-RoPE model X < Y, and positions of a sequence never go backwards"
    SECTIONS = "for M-RoPE position sections X <= Y, and positions of a sequence never go backwards"


@dataclass(frozen=True, slots=True, eq=False)
class SeqRange:
    """First and last position of each sequence in a batch."""

    seq_ids: list[int]
    first: list[int]
    last: list[int]

    def of(self, seq_id: int) -> tuple[int, int] | None:
        if seq_id not in self.seq_ids:
            return None
        index = self.seq_ids.index(seq_id)
        return self.first[index], self.last[index]


def automatic_positions(seqs: TokenSequences, memory: SeqPositions | None) -> tuple[I32, SeqRange]:
    """Positions (n_tokens,) that continue each sequence after its last stored one, or from 0.

    A token of several sequences continues the first; whether that suits the others, `check_positions` tells.

    Raises:
        BatchError: past the last position that 32 bits hold.
    """
    seq_ids = [seqs.seq_id] if seqs.seq_id is not None else seqs.presence.seq_id_unq.tolist()
    start = [_next_position(memory, seq_id) for seq_id in seq_ids]
    if seqs.seq_id is not None:
        last = [start[0] + seqs.n_tokens - 1]
        _check_end(seq_ids, last)
        return np.arange(start[0], last[0] + 1, dtype=np.int32), SeqRange(seq_ids, start, last)
    if seqs.is_coupled:
        return _shared_positions(seqs, dict(zip(seq_ids, start, strict=True)))
    groups = seqs.groups()
    counts = np.diff(groups.start)
    last = (np.array(start) + counts - 1).tolist()
    _check_end(seq_ids, last)
    pos = np.empty(seqs.n_tokens, dtype=np.int32)
    pos[groups.token] = np.arange(seqs.n_tokens) + np.repeat(np.array(start) - groups.start[:-1], counts)
    return pos, SeqRange(seq_ids, start, last)


def check_positions(
    pos: I32, seqs: TokenSequences, memory: SeqPositions | None, rule: PositionRule
) -> SeqRange:
    """Checks positions (n_tokens,) token by token within each sequence, and against memory.

    Raises:
        BatchError: names the sequence, its last stored position and the one offered.
    """
    groups = seqs.groups()
    run = pos if seqs.seq_id is not None else pos[groups.token]
    first = run[groups.start[:-1]].tolist()
    stored = [memory.seq_pos_max(seq_id) if memory is not None else None for seq_id in groups.seq_ids]
    for seq_id, offered, last in zip(groups.seq_ids, first, stored, strict=True):
        if last is not None and not _follows(last, offered, rule):
            _refuse(rule, seq_id, last, offered)
    if len(run) > len(first):
        steps = np.diff(run)
        wrong = steps != 1 if rule is PositionRule.CONSECUTIVE else steps < 0
        wrong[groups.start[1:-1] - 1] = False
        if wrong.any():
            _refuse_step(rule, groups, stored, run, int(np.argmax(wrong)) + 1)
    return SeqRange(groups.seq_ids, first, run[groups.start[1:] - 1].tolist())


def check_not_negative(rows: I32, seqs: TokenSequences, memory: SeqPositions | None) -> None:
    """`rows` is (n_pos, n_tokens).

    Raises:
        BatchError: names the token, its sequence and the position.
    """
    if rows.min() >= 0:
        return
    token = int(np.argmax((rows < 0).any(axis=0)))
    seq_id, offered = int(seqs.first[token]), int(rows[:, token].min())
    raise BatchError(
        f"sequence {seq_id}: token {token} has position {offered}, expected 0 or more",
        field="pos",
        seq_id=seq_id,
        token=token,
        stored=None if memory is None else memory.seq_pos_max(seq_id),
        offered=offered,
    )


def check_coupled(seqs: TokenSequences, memory: SeqPositions) -> None:
    """Sequences that share a token of the batch must hold the same range of positions.

    Raises:
        BatchError: names both sequences and their ranges.
    """
    first = np.repeat(seqs.first, seqs.n_seq_id)
    pairs = np.unique(first[first != seqs.flat] * MAX_SEQ + seqs.flat[first != seqs.flat])
    for pair in pairs.tolist():
        a, b = divmod(pair, MAX_SEQ)
        held_a = memory.seq_pos_min(a), memory.seq_pos_max(a)
        held_b = memory.seq_pos_min(b), memory.seq_pos_max(b)
        if held_a != held_b:
            raise BatchError(
                f"sequences {a} and {b} share tokens of the batch but have diverged in memory: {a} holds "
                f"{_span(held_a)}, {b} holds {_span(held_b)}; copy one onto the other or share no token",
                field="seq_id",
                seq_id=a,
                other=b,
                stored=held_a,
                other_stored=held_b,
            )


def _next_position(memory: SeqPositions | None, seq_id: int) -> int:
    last = None if memory is None else memory.seq_pos_max(seq_id)
    return 0 if last is None else last + 1


def _shared_positions(seqs: TokenSequences, following: dict[int, int]) -> tuple[I32, SeqRange]:
    """Token by token, since each shared token moves several sequences on."""
    flat, offset = seqs.flat.tolist(), seqs.offset.tolist()
    seq_ids = list(following)
    first: dict[int, int] = {}
    pos = np.empty(seqs.n_tokens, dtype=np.int64)
    for i in range(seqs.n_tokens):
        ids = flat[offset[i] : offset[i + 1]]
        pos[i] = here = following[ids[0]]
        for seq_id in ids:
            first.setdefault(seq_id, here)
            following[seq_id] = here + 1
    last = [following[seq_id] - 1 for seq_id in seq_ids]
    _check_end(seq_ids, last)
    return pos.astype(np.int32), SeqRange(seq_ids, [first[seq_id] for seq_id in seq_ids], last)


def _check_end(seq_ids: list[int], last: list[int]) -> None:
    for seq_id, end in zip(seq_ids, last, strict=True):
        if end > MAX_POS:
            raise BatchError(
                f"sequence {seq_id}: the batch would end at position {end}, the last possible is {MAX_POS}",
                field="pos",
                seq_id=seq_id,
                offered=end,
            )


def _follows(last: int, offered: int, rule: PositionRule) -> bool:
    if rule is PositionRule.CONSECUTIVE:
        return offered == last + 1
    return offered > last if rule is PositionRule.TEXT else offered >= last


def _refuse(rule: PositionRule, seq_id: int, stored: int, offered: int) -> NoReturn:
    raise BatchError(
        f"sequence {seq_id}: the last stored position is X = {stored}, the batch starts it at Y = {offered}; "
        f"required: {rule.value}",
        field="pos",
        seq_id=seq_id,
        stored=stored,
        offered=offered,
    )


def _refuse_step(
    rule: PositionRule, groups: SeqGroups, stored: list[int | None], run: I32, pair: int
) -> NoReturn:
    """`pair` is the first pair of `run` that does not follow the one before it."""
    group = int(np.searchsorted(groups.start, pair, side="right")) - 1
    seq_id, token = groups.seq_ids[group], int(groups.token[pair])
    previous, offered = int(run[pair - 1]), int(run[pair])
    fault = "twice" if offered == previous else "backwards" if offered < previous else "a gap"
    raise BatchError(
        f"sequence {seq_id}: token {token} offers position {offered} after {previous} ({fault}), "
        f"the last stored position is {stored[group]}; required: {rule.value}",
        field="pos",
        seq_id=seq_id,
        stored=stored[group],
        previous=previous,
        offered=offered,
        token=token,
        fault=fault,
    )


def _span(held: tuple[int | None, int | None]) -> str:
    return "nothing" if held[1] is None else f"positions {held[0]} to {held[1]}"
