"""What a decode leaves behind: logits and embeddings, rows in the order they were asked for.

Every decode writes fresh arrays, so rows that a caller kept stay as they were.
Upstream: llama_context::output_reserve, output_reorder.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pyggmlkv.binding import Tensor
from pyggmlkv.types import F32, I64


class Rows:
    """Gathers an output tensor's rows over the ubatches of one batch: (n_rows, width) f32."""

    def __init__(self) -> None:
        self._parts: list[F32] = []

    def take(self, tensor: Tensor) -> None:
        """Copy the rows that this ubatch computed."""
        self._parts.append(tensor.to_numpy().reshape(-1, tensor.ne[0]))

    def gathered(self, order: I64 | None, width: int) -> F32:
        """All rows, put in `order` if given."""
        if not self._parts:
            return np.zeros((0, width), np.float32)
        rows = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        return rows if order is None or len(rows) == 1 else rows[order]


def sequence_rows(tensor: Tensor, seq_ids: npt.NDArray[np.int32]) -> dict[int, F32]:
    """Pooled rows [width, n_seqs_unq] by sequence id."""
    rows = tensor.to_numpy().reshape(-1, tensor.ne[0])
    return {int(s): rows[i] for i, s in enumerate(seq_ids)}
