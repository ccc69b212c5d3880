"""What the caller hands in: tokens or embeddings with positions, sequence ids and the outputs wanted.

A `Batch` is a read-only copy of its arguments; it checks shapes and types only. Values (ids in range,
positions that continue what memory holds) are checked by `BatchAllocator.init`, which knows the limits.
Upstream: llama.h, llama_batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pyggmlkv.batch import arguments
from pyggmlkv.errors import BatchError
from pyggmlkv.types import F32, I32, Bool

IntArray: TypeAlias = npt.NDArray[np.integer]
SeqIdArg: TypeAlias = int | Sequence[int] | Sequence[int | Sequence[int]] | IntArray
LogitsArg: TypeAlias = (
    Literal["last", "all", "none"] | Sequence[int] | Sequence[bool] | npt.NDArray[np.generic]
)


class Batch:
    """Tokens (or embeddings) to decode in one call.

    Args:
        tokens: token ids, (n_tokens,).
        pos: positions, (n_tokens,), or (n_pos, n_tokens) with one row per M-RoPE section; `None` continues
            each sequence after its last stored position.
        seq_id: one id for all tokens, one id per token, or a list of ids per token (its cell is then shared).
        logits: tokens that produce an output: "last", "all", "none", a mask (n_tokens,) bool, or indices.
            Output rows come in batch order, or in the order of the list of indices.
        embd: input embeddings, (n_tokens, n_embd) f32 = [n_embd, n_tokens], instead of tokens; both only for
            models that read both.

    Raises:
        BatchError: an argument of the wrong shape or type; `facts["field"]` names it.
    """

    __slots__ = (
        "embd",
        "is_output_default",
        "n_tokens",
        "output",
        "output_order",
        "pos",
        "seq_id",
        "seq_id_flat",
        "seq_id_offset",
        "tokens",
    )

    tokens: I32 | None
    embd: F32 | None
    pos: I32 | None
    n_tokens: int
    seq_id: int | None
    """The id of all tokens, or None where they are given one by one (`seq_id_flat`)."""
    seq_id_flat: I32 | None
    seq_id_offset: I32 | None
    """Where each token's ids start in `seq_id_flat`, (n_tokens + 1,); None when each token has one."""
    output: Bool
    output_order: I32 | None
    """Batch indices in the order asked for; None when that is the batch's own order."""
    is_output_default: bool

    def __init__(
        self,
        tokens: Iterable[int] | IntArray | None = None,
        pos: Iterable[int] | Sequence[Sequence[int]] | IntArray | None = None,
        seq_id: SeqIdArg = 0,
        logits: LogitsArg = "last",
        embd: npt.ArrayLike | None = None,
    ) -> None:
        if tokens is None and embd is None:
            raise BatchError("batch: give tokens or embd, both are None", field="tokens")
        self.embd = None if embd is None else arguments.embedding_rows(embd)
        self.tokens = None if tokens is None else arguments.int32_array("tokens", tokens)
        if self.tokens is not None and self.tokens.ndim != 1:
            raise BatchError(
                f"batch: tokens has shape {self.tokens.shape}, expected (n_tokens,)", field="tokens"
            )
        rows = self.embd if self.tokens is None else self.tokens
        assert rows is not None
        self.n_tokens = n_tokens = len(rows)
        if self.embd is not None:
            arguments.check_length("embd", len(self.embd), n_tokens)
        self.pos = None if pos is None else arguments.position_rows(pos, n_tokens)
        self.seq_id = self.seq_id_flat = self.seq_id_offset = None
        if isinstance(seq_id, (int, np.integer)) and not isinstance(seq_id, bool):
            self.seq_id = int(seq_id)
        else:
            self.seq_id_flat, self.seq_id_offset = arguments.sequence_ids(seq_id, n_tokens)
        self.is_output_default = isinstance(logits, str) and logits == "last"
        self.output, self.output_order = arguments.output_flags(logits, n_tokens)

    def __len__(self) -> int:
        return self.n_tokens

    def __repr__(self) -> str:
        kind = "tokens" if self.embd is None else "embeddings"
        ids = self.seq_id if self.seq_id_flat is None else np.unique(self.seq_id_flat).tolist()
        return f"Batch({self.n_tokens} {kind}, seq_id={ids}, {np.count_nonzero(self.output)} outputs)"
