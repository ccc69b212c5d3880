"""Ubatches by hand: tokens are (pos, ids) or (pos, ids, (x, y))."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyggmlkv.batch.ubatch import UBatch


def ubatch(tokens: Sequence[tuple], n_seq_max: int = 4) -> UBatch:
    """One sequence set per token; with several streams the caller orders tokens by sequence."""
    n, n_words = len(tokens), (n_seq_max + 63) // 64
    ids = [list(token[1]) if isinstance(token[1], list | tuple | set) else [token[1]] for token in tokens]
    seq_mask = np.zeros((n, n_words), np.uint64)
    for i, mine in enumerate(ids):
        for s in mine:
            seq_mask[i, s // 64] |= np.uint64(1 << (s % 64))
    n_pos = 4 if len(tokens[0]) > 2 else 1
    pos = np.zeros((n_pos, n), np.int32)
    pos[0] = [token[0] for token in tokens]
    if n_pos == 4:
        pos[2] = [token[2][0] for token in tokens]
        pos[1] = [token[2][1] for token in tokens]
    n_seq_id = np.array([len(mine) for mine in ids], np.int32)
    flat = np.array([s for mine in ids for s in mine], np.int32)
    unq = np.unique(flat).astype(np.int32)
    seq_idx = np.full(n_seq_max, -1, np.int32)
    seq_idx[unq] = np.arange(len(unq))
    return UBatch(
        equal_seqs=False,
        n_tokens=n,
        n_seq_tokens=1,
        n_seqs=n,
        n_seqs_unq=len(unq),
        n_pos=n_pos,
        token=np.zeros(n, np.int32),
        embd=None,
        pos=pos,
        n_seq_id=n_seq_id,
        seq_id_flat=flat,
        seq_id_offset=np.r_[0, np.cumsum(n_seq_id)].astype(np.int32),
        seq_mask=seq_mask,
        seq_id_unq=unq,
        seq_idx=seq_idx,
        output=np.zeros(n, np.bool_),
    )


def run(pos0: int, n: int, seq: int = 0, n_seq_max: int = 4) -> UBatch:
    """`n` tokens of one sequence at consecutive positions."""
    return ubatch([(pos0 + i, seq) for i in range(n)], n_seq_max)
