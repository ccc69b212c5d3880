"""Attention and recurrent memory side by side, planned together or not at all.

Every operation is all-or-nothing across the two: what one part refuses, the other never sees.
Upstream: llama_memory_hybrid, llama_memory_hybrid_iswa.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import numpy.typing as npt

from pyggmlkv.backend.runner import Runner
from pyggmlkv.batch.allocator import BatchAllocator
from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.memory.cells.view import CellsMap, CellsView
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.kv.defrag import DefragReport
from pyggmlkv.memory.kv.step import KVStep
from pyggmlkv.memory.protocol import Memory
from pyggmlkv.memory.recurrent.memory import RecurrentMemory, RecurrentStep
from pyggmlkv.memory.sliding import SlidingKVCache, SlidingStep


@dataclasses.dataclass(frozen=True, slots=True)
class HybridStep:
    """One ubatch in both parts.  Upstream: llama_memory_hybrid_context."""

    attn: KVStep | SlidingStep
    recr: RecurrentStep

    @property
    def ubatch(self) -> UBatch:
        return self.attn.ubatch

    @property
    def key(self) -> Hashable:
        return (self.attn.key, self.recr.key)

    def apply(self) -> None:
        self.recr.apply()
        self.attn.apply()

    def commit(self) -> None:
        self.recr.commit()
        self.attn.commit()

    def undo(self, computed: bool = False) -> None:
        """As before; where a recurrent state is lost, its sequences go from the attention part too."""
        self.attn.undo(computed)
        for seq_id in self.recr.take_back(computed):
            self.attn_memory.seq_rm(seq_id)

    attn_memory: KVCache | SlidingKVCache = dataclasses.field(kw_only=True)


class HybridMemory:
    """`attn` holds keys and values, `recr` the recurrent states of the same sequences."""

    def __init__(self, attn: KVCache | SlidingKVCache, recr: RecurrentMemory) -> None:
        self.attn = attn
        self.recr = recr

    @property
    def parts(self) -> tuple[KVCache | SlidingKVCache, RecurrentMemory]:
        """In the order in which state is written."""
        return self.attn, self.recr

    # plan / apply

    def plan(self, allocator: BatchAllocator, n_ubatch: int, embd_all: bool = False) -> list[HybridStep]:
        """Split by sequences; a state cell and a slot for every ubatch.

        Raises:
            NoSlotError: names the part without room; nothing changed.
        """
        allocator.split_reset()
        n_rs = self.recr.spec.n_rs_seq
        sequential = self.attn.spec.n_stream > 1

        def take() -> UBatch | None:
            if embd_all:
                return allocator.split_seq(n_ubatch)
            return allocator.split_equal(n_ubatch, sequential, n_rs + 1 if n_rs else 0)

        ubatches = list(iter(take, None))
        recr = self.recr.steps(ubatches)
        attn: Sequence[KVStep | SlidingStep] = self.attn.steps(ubatches)
        return [HybridStep(a, r, attn_memory=self.attn) for a, r in zip(attn, recr, strict=True)]

    def plan_full(self, ubatch: UBatch) -> HybridStep:
        return HybridStep(self.attn.plan_full(ubatch), self.recr.plan_full(ubatch), attn_memory=self.attn)

    @property
    def has_update(self) -> bool:
        return self.attn.has_update

    def update(self) -> bool:
        return self.attn.update()

    @property
    def defrag_threshold(self) -> float | None:
        """See `KVCache.defrag_threshold`; of the attention part."""
        return self.attn.defrag_threshold

    @defrag_threshold.setter
    def defrag_threshold(self, threshold: float | None) -> None:
        self.attn.defrag_threshold = threshold

    def defrag(self, max_moves: int | None = None) -> DefragReport:
        """Defragment the attention part; recurrent states have nothing to move."""
        return self.attn.defrag(max_moves)

    # sequence operations

    @property
    def shift_reason(self) -> str | None:
        return self.attn.shift_reason

    @property
    def can_shift(self) -> bool:
        return self.attn.can_shift

    def _together(self, operation: Callable[[Memory], bool | None]) -> bool:
        """Run on the recurrent part, whose cells can be put back, then on the attention part; or on neither."""
        before = self.recr.states.snapshot()
        if operation(self.recr) is False:
            return False
        done = False
        try:
            done = operation(self.attn) is not False
        finally:
            if not done:
                self.recr.states.restore(before)
        return done

    def seq_rm(self, seq_id: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove from both parts, or from neither and return False where the state cannot forget that range."""
        return self._together(lambda part: part.seq_rm(seq_id, p0, p1))

    def seq_cp(self, src: int, dst: int, p0: int | None = None, p1: int | None = None) -> None:
        """Let `dst` share all of `src`; a range that leaves out a part of it is refused."""
        self._together(lambda part: part.seq_cp(src, dst, p0, p1))

    def seq_keep(self, seq_id: int) -> None:
        self._together(lambda part: part.seq_keep(seq_id))

    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> None:
        self._together(lambda part: part.seq_add(seq_id, p0, p1, delta))

    def seq_div(self, seq_id: int, p0: int | None, p1: int | None, d: int) -> None:
        self._together(lambda part: part.seq_div(seq_id, p0, p1, d))

    def seq_pos_min(self, seq_id: int) -> int | None:
        """The higher of the two: both parts must be able to go on from there."""
        low = [p for p in (self.attn.seq_pos_min(seq_id), self.recr.seq_pos_min(seq_id)) if p is not None]
        return max(low) if len(low) == 2 else None

    def seq_pos_max(self, seq_id: int) -> int | None:
        """The lower of the two."""
        high = [p for p in (self.attn.seq_pos_max(seq_id), self.recr.seq_pos_max(seq_id)) if p is not None]
        return min(high) if len(high) == 2 else None

    def can_resume(self, seq_id: int, pos: int) -> tuple[bool, str]:
        """Whether both parts can go on at `pos`, and if not, why."""
        ok, why = self.recr.can_resume(seq_id, pos)
        return self.attn.can_resume(seq_id, pos) if ok else (ok, why)

    def clear(self, data: bool = True) -> None:
        self.attn.clear(data)
        self.recr.clear(data)

    # looking inside

    @property
    def runner(self) -> Runner:
        """What runs this memory's graphs, and may run yours."""
        return self.attn.runner

    @property
    def size_k_bytes(self) -> int:
        return self.attn.size_k_bytes

    @property
    def size_v_bytes(self) -> int:
        return self.attn.size_v_bytes

    def memory_breakdown(self) -> dict[str, int]:
        out = self.attn.memory_breakdown()
        for name, nbytes in self.recr.memory_breakdown().items():
            out[name] = out.get(name, 0) + nbytes
        return out

    @property
    def cells(self) -> CellsMap:
        """Cells of the attention part; `recr.cells` are the states."""
        return self.attn.cells

    def view(self) -> CellsView:
        """Counts over the attention part; `recr.view()` counts the states."""
        return self.attn.view()

    def k(self, layer: int, dequantize: bool = True) -> npt.NDArray[Any]:
        """Stored keys of an attention layer; see `KVCache.k`."""
        return self.attn.k(layer, dequantize)

    def v(self, layer: int, dequantize: bool = True) -> npt.NDArray[Any]:
        """Stored values of an attention layer; see `KVCache.v`."""
        return self.attn.v(layer, dequantize)

    def render(self) -> str:
        return f"attention\n{self.attn.render()}\nrecurrent\n{self.recr.render()}"

    def __repr__(self) -> str:
        return f"<HybridMemory attn={self.attn!r} recr={self.recr!r}>"

    def close(self) -> None:
        self.recr.close()
        self.attn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
