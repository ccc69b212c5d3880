"""Which tokens of a batch go into the next ubatch, as index arithmetic on sequence sets.

Pure: reads which tokens are used and answers with batch indices; knows no positions and no outputs.
Upstream: llama-batch.cpp, split_equal and split_seq.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggmlkv.batch.sequences import TokenSequences
from pyggmlkv.types import I32, I64, Bool


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSets:
    """The distinct sequence sets of a batch and their tokens in batch order."""

    set_id: I32 | I64
    """(n_tokens,): each token's set."""
    member: I64
    """Batch indices, set after set."""
    start: I64
    """(n_sets + 1,): where each set's tokens start in `member`."""
    mask: list[int] | None
    """Each set as a bit set; None when every token has one id, so that sets cannot overlap."""
    seq_id_unq: I32
    """Without `mask`: set k is sequence seq_id_unq[k]."""
    seq_idx: I32

    @classmethod
    def of(cls, seqs: TokenSequences) -> SequenceSets:
        set_id: I32 | I64
        masks: list[int] | None = None
        if seqs.is_coupled:
            rows, inverse = np.unique(seqs.mask, axis=0, return_inverse=True)
            set_id, n_sets = inverse.reshape(-1), len(rows)
            masks = [int.from_bytes(row.astype("<u8").tobytes(), "little") for row in rows]
        else:
            set_id, n_sets = seqs.presence.seq_idx[seqs.flat], len(seqs.presence.seq_id_unq)
        start = np.zeros(n_sets + 1, dtype=np.int64)
        np.cumsum(np.bincount(set_id, minlength=n_sets), out=start[1:])
        member = np.argsort(set_id, kind="stable")
        return cls(set_id, member, start, masks, seqs.presence.seq_id_unq, seqs.presence.seq_idx)

    def first_unused(self, used: Bool) -> I64:
        """(n_sets,): index in `member` of each set's first unused token; its used tokens come first."""
        n_used: I64 = np.bincount(self.set_id[used], minlength=len(self.start) - 1)
        return self.start[:-1] + n_used


@dataclass(frozen=True, slots=True)
class EqualSplit:
    """What `split_equal` is asked for."""

    n_ubatch: int
    sequential: bool
    """Sequence ids must increase by one from set to set."""
    n_keep_tail: int
    """The last so many tokens of a sequence stay in one ubatch."""


def next_equal(sets: SequenceSets, used: Bool, how: EqualSplit) -> tuple[I64, int] | None:
    """Batch indices of the next ubatch, set after set, and the number of sets; None when nothing is left."""
    begin = sets.first_unused(used)
    left = sets.start[1:] - begin
    if how.sequential:
        chosen = _increasing_sets(sets, begin, left, how.n_ubatch)
    else:
        chosen = _disjoint_sets(sets, begin, left, how.n_ubatch)
    n_seqs = len(chosen)
    if n_seqs == 0:
        return None
    left = left[chosen]
    n_seq_tokens = min(int(left.min()), max(1, how.n_ubatch // n_seqs))
    if how.n_keep_tail > 0:
        n_seqs, n_seq_tokens = _keep_tail(left, n_seq_tokens, how)
    index = sets.member[begin[chosen[:n_seqs], None] + np.arange(n_seq_tokens)]
    return index.reshape(-1), n_seqs


def next_seq(sets: SequenceSets, used: Bool, n_ubatch: int) -> I64 | None:
    """Batch indices of the next ubatch, of one sequence set, narrowed to each subset it meets."""
    unused = np.flatnonzero(~used)
    if len(unused) == 0:
        return None
    current = sets.set_id[unused[0]]
    if sets.mask is None:
        same: I64 = unused[sets.set_id[unused] == current]
        return same[:n_ubatch]
    parts: list[I64] = []
    room = n_ubatch
    while room > 0 and len(unused):
        outside = ~sets.mask[current]
        is_subset = np.array([mask & outside == 0 for mask in sets.mask])
        unused = unused[is_subset[sets.set_id[unused]]]
        other = sets.set_id[unused] != current
        n_same = int(np.argmax(other)) if other.any() else len(unused)
        parts.append(unused[:n_same][:room])
        room -= n_same
        unused = unused[n_same:]
        if len(unused):
            current = sets.set_id[unused[0]]
    return np.concatenate(parts)


def _by_first_unused(sets: SequenceSets, begin: I64, left: I64) -> I64:
    """The sets that have tokens left, in the order in which those appear in the batch."""
    alive = np.flatnonzero(left > 0)
    return alive[np.argsort(sets.member[begin[alive]])]


def _disjoint_sets(sets: SequenceSets, begin: I64, left: I64, n_ubatch: int) -> I64:
    """Sets without a common sequence. As upstream, one more than n_ubatch may join."""
    candidates = _by_first_unused(sets, begin, left)
    if sets.mask is None:
        return candidates[: n_ubatch + 1]
    taken, chosen = 0, []
    for candidate in candidates.tolist():
        if sets.mask[candidate] & taken == 0:
            taken |= sets.mask[candidate]
            chosen.append(candidate)
            if len(chosen) > n_ubatch:
                break
    return np.array(chosen, dtype=np.int64)


def _increasing_sets(sets: SequenceSets, begin: I64, left: I64, n_ubatch: int) -> I64:
    """Sequences s, s + 1, ... such that each has an unused token behind the one that admitted the last."""
    candidates = _by_first_unused(sets, begin, left)
    if len(candidates) <= 1:
        return candidates
    ids = sets.seq_id_unq[candidates]
    in_order = ids == ids[0] + np.arange(len(ids))
    n_prefix = len(ids) if in_order.all() else int(np.argmin(in_order))
    chosen = candidates[:n_prefix].tolist()
    seq_id, behind = int(ids[n_prefix - 1]), sets.member[begin[chosen[-1]]]
    while len(chosen) <= n_ubatch and seq_id + 1 < len(sets.seq_idx):
        candidate = int(sets.seq_idx[seq_id + 1])
        if candidate < 0:
            break
        tokens = sets.member[begin[candidate] : sets.start[candidate + 1]]
        at = int(np.searchsorted(tokens, behind, side="right"))
        if at == len(tokens):
            break
        seq_id, behind = seq_id + 1, tokens[at]
        chosen.append(candidate)
    return np.array(chosen[: n_ubatch + 1], dtype=np.int64)


def _keep_tail(left: I64, n_seq_tokens: int, how: EqualSplit) -> tuple[int, int]:
    """(n_seqs, n_seq_tokens) such that no kept sequence ends with fewer than n_keep_tail tokens for later.

    Keeps the leading sets that end here or leave enough; where the first does not, it goes alone, to its end
    if that fits, else shortened.
    """
    remaining = left - n_seq_tokens
    violates = (remaining != 0) & (remaining < how.n_keep_tail)
    n_seqs = int(np.argmax(violates)) if violates.any() else len(left)
    if n_seqs > 0:
        return n_seqs, n_seq_tokens
    if left[0] <= how.n_ubatch:
        return 1, int(left[0])
    return 1, int(left[0]) - how.n_keep_tail
