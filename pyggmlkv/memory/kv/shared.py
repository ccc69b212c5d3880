"""A cache on another cache's cells: a second model (a drafter) that reads the keys and values of the first.

Owns nothing: no cells, no rows. Sequence operations are the other cache's to make and do nothing here; a step places
nothing. Upstream: llama_kv_cache with `mem_other` and `share`. Differs: layers with rows of their own are not taken
(upstream never turns or copies such rows); a full cache does not refuse a step that writes nothing; pending work of
the other cache is done before this one is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from pyggmlkv.backend.runner import Runner
from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.memory import slots
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.kv.defrag import DefragReport
from pyggmlkv.memory.kv.step import KVStep
from pyggmlkv.memory.kv.storage import BorrowedStorage
from pyggmlkv.memory.sliding import SlidingKVCache
from pyggmlkv.memory.slots import SlotInfo


class SharedStep(KVStep):
    """Reads what the other cache holds; places and writes nothing."""

    def apply(self) -> None:
        self._n_kv = slots.n_kv(self._cache.streams, self.slot, self._cache.spec.n_pad)

    def commit(self) -> None:
        """Nothing was placed."""

    def undo(self, computed: bool = False) -> None:
        """Nothing was placed."""


class SharedKVCache(KVCache):
    """Layers `share` (this model's layer -> the other's) on the cells and rows of `other`, which must stay open.

    Raises:
        CacheError: a layer that `other` does not have.
    """

    def __init__(self, other: KVCache, share: Mapping[int, int], name: str = "kv shared") -> None:
        self.other = other
        self.name = name
        self.defrag_threshold = None
        self.storage = BorrowedStorage(other.storage, share)
        self.spec = self.storage.spec
        self.streams = other.streams
        self.k_rot, self.v_rot = other.k_rot, other.v_rot

    def steps(self, ubatches: list[UBatch]) -> list[KVStep]:
        """A step a ubatch; always possible."""
        return [SharedStep(self, ubatch, self._slot(ubatch)) for ubatch in ubatches]

    def _slot(self, ubatch: UBatch) -> SlotInfo:
        ns = self.spec.n_stream
        ids = ubatch.seq_id_unq.tolist()
        strm = tuple(self.streams.seq_to_stream[s] for s in ids) if ns > 1 else (0,)
        idxs = np.zeros((len(strm), max(1, ubatch.n_tokens // len(strm))), np.int32)
        return SlotInfo(min(strm), max(strm), strm, idxs)

    # what the other cache does

    @property
    def runner(self) -> Runner:
        """The other cache's."""
        return self.other.runner

    @property
    def has_update(self) -> bool:
        return self.other.has_update

    def update(self) -> bool:
        """Do what the other cache has pending: its keys must be turned before they are read."""
        return self.other.update()

    def defrag(self, max_moves: int | None = None) -> DefragReport:
        """Nothing here: the cells are the other cache's."""
        return DefragReport()

    def seq_rm(self, seq_id: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        """Does nothing, True: the other cache's cells are not this one's to remove."""
        return True

    def seq_cp(self, src: int, dst: int, p0: int | None = None, p1: int | None = None) -> None:
        """Does nothing."""

    def seq_keep(self, seq_id: int) -> None:
        """Does nothing."""

    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> None:
        """Does nothing."""

    def seq_div(self, seq_id: int, p0: int | None, p1: int | None, d: int) -> None:
        """Does nothing."""

    def clear(self, data: bool = True) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing: the other cache owns everything."""


class SharedSlidingKVCache(SlidingKVCache):
    """`SharedKVCache` for both parts of a sliding-window cache: a layer goes where the layer that it reads is.

    Raises:
        CacheError: a layer that `other` does not have.
    """

    def __init__(self, other: SlidingKVCache, share: Mapping[int, int]) -> None:
        self.other = other
        swa = {il: source for il, source in share.items() if source in other.swa.storage.layers}
        base = {il: source for il, source in share.items() if il not in swa}
        self.base = SharedKVCache(other.base, base, "kv shared base")
        self.swa = SharedKVCache(other.swa, swa, "kv shared swa")
        layers = (*self.base.spec.layers, *self.swa.spec.layers)
        self.spec = dataclasses.replace(other.spec, layers=layers, reuse={})

    def close(self) -> None:
        """Does nothing: the other cache owns everything."""
