"""One step's worth of tokens: the unit that memory plans a slot for and a model builds a graph for.

Holds arrays only; how a batch was cut into ubatches is not visible here.
Upstream: llama-batch.h, llama_ubatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggmlkv.types import F32, I32, U64, Bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UBatch:
    """Tokens of one graph run. With `equal_seqs`, sequence set after sequence set, `n_seq_tokens` of each."""

    equal_seqs: bool
    n_tokens: int
    """n_seq_tokens * n_seqs."""
    n_seq_tokens: int
    n_seqs: int
    """Sequence sets; without `equal_seqs` each token counts as one."""
    n_seqs_unq: int
    n_pos: int
    token: I32 | None
    """(n_tokens,)."""
    embd: F32 | None
    """(n_tokens, n_embd) = [n_embd, n_tokens]."""
    pos: I32
    """(n_pos, n_tokens), one row per position section, contiguous."""
    n_seq_id: I32
    """(n_tokens,)."""
    seq_id_flat: I32
    """All tokens' ids, token after token, in the order given."""
    seq_id_offset: I32
    """(n_tokens + 1,): where each token's ids start in `seq_id_flat`."""
    seq_mask: U64
    """(n_tokens, n_words): each token's sequence set; bit s % 64 of word s // 64."""
    seq_id_unq: I32
    """(n_seqs_unq,): the ids that occur, ascending."""
    seq_idx: I32
    """(n_seq_max,): index of an id in `seq_id_unq`, -1 where it does not occur."""
    output: Bool
    """(n_tokens,)."""
    is_text_pos: bool = True
    """One position per token that holds for all its sections; False where the caller gave the sections."""

    @property
    def is_pos_2d(self) -> bool:
        """Whether positions have rows and columns (M-RoPE: time, y, x, other)."""
        return self.n_pos >= 3

    @property
    def seq_id_first(self) -> I32:
        """(n_tokens,): each token's first id, the one that decides its stream."""
        if len(self.seq_id_flat) == self.n_tokens:
            return self.seq_id_flat
        first: I32 = self.seq_id_flat[self.seq_id_offset[:-1]]
        return first

    @property
    def n_outputs(self) -> int:
        return int(np.count_nonzero(self.output))

    def seq_id(self, i: int) -> I32:
        """The ids of token `i`, in the order given."""
        return self.seq_id_flat[self.seq_id_offset[i] : self.seq_id_offset[i + 1]]

    def __repr__(self) -> str:
        kind = "tokens" if self.embd is None else "embeddings"
        shape = f"{self.n_seqs} x {self.n_seq_tokens} " if self.equal_seqs else ""
        ids = self.seq_id_unq.tolist()
        return f"UBatch({self.n_tokens} {kind} {shape}of sequences {ids}, {self.n_outputs} outputs)"
