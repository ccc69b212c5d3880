"""What an encoder leaves for a decoder: its output rows and the sequences they belong to.  Upstream: llama_cross."""

from __future__ import annotations

import dataclasses

from pyggmlkv.types import F32, U64


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Cross:
    """Encoder output; `embd` (n_enc, n_embd) f32, `seq_mask` (n_enc, n_words) sequence bitsets.

    `embd` None stands for the worst case while buffers are reserved: `n_enc` rows of `n_embd`.
    """

    n_embd: int
    n_enc: int
    embd: F32 | None = None
    seq_mask: U64 | None = None
