"""One ubatch's step through a KV cache: its slot, and what its graph writes, reads and is filled with.

A step is planned with no cell changed; `apply` places it, then either `undo` takes exactly that back or `commit` keeps
it.  Upstream: llama_kv_cache_context; older: commit, restore.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.binding import Tensor, TensorArena
from pyggmlkv.memory import buckets, mask, slots
from pyggmlkv.memory.slots import Journal, SlotInfo
from pyggmlkv.types import F32, I32, I64

if TYPE_CHECKING:
    from pyggmlkv.memory.kv import KVCache


class KVStep:
    """Implements `protocol.AttentionStep`. Without a ubatch of its own it stands for the full cache (worst case)."""

    def __init__(self, cache: KVCache, ubatch: UBatch, slot: SlotInfo, n_kv: int | None = None) -> None:
        self._cache = cache
        self._slot = slot
        self._journal: Journal | None = None
        self._n_kv = n_kv
        self.ubatch = ubatch

    @property
    def slot(self) -> SlotInfo:
        """Where the tokens go."""
        return self._slot

    def apply(self) -> None:
        """Place the ubatch; `n_kv` is known from here on."""
        streams = self._cache.streams
        self._journal = Journal(streams)
        slots.apply_ubatch(streams, self._slot, self.ubatch, self._journal)
        self._n_kv = slots.n_kv(streams, self._slot, self._cache.spec.n_pad)

    def commit(self) -> None:
        """Keep what `apply` did: it can no longer be undone. Cells behind the window go, where they are pruned."""
        self._journal = None
        slots.commit_ubatch(self._cache.streams, self.ubatch)

    def undo(self, computed: bool = False) -> None:
        """Take `apply` back: cells, sequence extents and heads as before.

        `computed`: a graph may have written rows. Cells that held something else before (reused from behind a window)
        have lost it and are emptied.
        """
        if self._journal is None:
            return
        self._journal.undo()
        self._journal = None
        if computed:
            for stream, idxs in zip(self._slot.strm, self._slot.idxs, strict=True):
                cells = self._cache.streams.cells[stream]
                cells.remove(idxs[cells.pos[idxs] >= 0])

    @property
    def n_kv(self) -> int:
        assert self._n_kv is not None, "apply the step first"
        return self._n_kv

    @property
    def n_stream(self) -> int:
        return self._slot.s1 - self._slot.s0 + 1

    @property
    def key(self) -> Hashable:
        return (self.n_kv, self._slot.s0, self._slot.s1)

    @property
    def n_v_idxs(self) -> int:
        spec = self._cache.spec
        return self.ubatch.n_tokens * (spec.n_embd_v_row if spec.v_trans else 1)

    @property
    def k_rot(self) -> F32 | None:
        return self._cache.k_rot

    @property
    def v_rot(self) -> F32 | None:
        return self._cache.v_rot

    def cpy_k(self, ctx: TensorArena, k_cur: Tensor, k_idxs: Tensor, il: int) -> Tensor:
        return self._cache.storage.cpy_k(ctx, k_cur, k_idxs, il)

    def cpy_v(self, ctx: TensorArena, v_cur: Tensor, v_idxs: Tensor, il: int) -> Tensor:
        return self._cache.storage.cpy_v(ctx, v_cur, v_idxs, il)

    def get_k(self, ctx: TensorArena, il: int) -> Tensor:
        return self._cache.storage.get_k(ctx, il, self.n_kv, range(self._slot.s0, self._slot.s1 + 1))

    def get_v(self, ctx: TensorArena, il: int) -> Tensor:
        return self._cache.storage.get_v(ctx, il, self.n_kv, range(self._slot.s0, self._slot.s1 + 1))

    def fill_k_idxs(self, out: I64) -> None:
        slots.fill_k_idxs(self._slot, self._cache.spec.kv_size, out)

    def fill_v_idxs(self, out: I64) -> None:
        spec = self._cache.spec
        if spec.v_trans:
            slots.fill_v_idxs(self._slot, spec.kv_size, spec.n_embd_v_row, out)
        else:
            slots.fill_k_idxs(self._slot, spec.kv_size, out)

    def fill_mask(self, out: npt.NDArray[np.floating], causal: bool) -> None:
        mask.fill_kq_mask(out, self._cache.streams, self.ubatch, causal, use_alibi=self._cache.spec.use_alibi)

    def fill_pos_bucket(self, out: I32) -> None:
        cells = self._cache.streams.cells[0]
        buckets.fill_pos_bucket(out, cells, self.ubatch, self._cache.spec.n_rel_attn_bkts)
