"""Sliding-window attention (iSWA): a full cache for the dense layers, a small one for the sliding layers.

Both hold the same sequences; the small one forgets what its window has passed. They are planned together or not at
all.  Upstream: llama_kv_cache_iswa. Differs: positions are answered by the full part where the window part was emptied
by a deep cut; `can_resume` says whether decoding may go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, Self

import numpy.typing as npt

from pyggmlkv.backend.runner import Runner
from pyggmlkv.batch.allocator import BatchAllocator
from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.errors import NoSlotError
from pyggmlkv.logs import logger
from pyggmlkv.memory.cells.view import CellsMap, CellsView
from pyggmlkv.memory.config import KVSpec
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.kv.defrag import DefragReport, merged
from pyggmlkv.memory.kv.step import KVStep
from pyggmlkv.memory.site import Where, site_of


@dataclasses.dataclass(frozen=True, slots=True)
class SlidingStep:
    """One ubatch in both halves.  Upstream: llama_kv_cache_iswa_context."""

    base: KVStep
    swa: KVStep

    @property
    def ubatch(self) -> UBatch:
        return self.base.ubatch

    @property
    def key(self) -> Hashable:
        return (self.base.key, self.swa.key)

    def apply(self) -> None:
        self.base.apply()
        self.swa.apply()

    def commit(self) -> None:
        """Keep the ubatch in both halves; the sliding one empties cells behind the window, where they are pruned."""
        self.base.commit()
        self.swa.commit()

    def undo(self, computed: bool = False) -> None:
        self.swa.undo(computed)
        self.base.undo(computed)


def swa_size(spec: KVSpec, n_ubatch: int) -> int:
    """Cells a stream of the sliding part: its windows and one ubatch, padded to 256; never more than the full part needs.

    Differs: a full part of less than 256 cells is not padded beyond its own size.
    """
    windows = spec.n_swa * (spec.n_seq_max if spec.unified else 1)
    size = min(spec.kv_size, windows + n_ubatch)
    return size if spec.kv_size < 256 else -(-size // 256) * 256


def part_specs(
    spec: KVSpec, is_swa: Callable[[int], bool], n_ubatch: int, swa_full: bool
) -> tuple[KVSpec, KVSpec]:
    """`spec` cut into the full part and the sliding part."""

    def part(swa: bool) -> KVSpec:
        layers = tuple(layer for layer in spec.layers if is_swa(layer.il) == swa)
        reuse = {il: owner for il, owner in spec.reuse.items() if is_swa(il) == swa}
        return dataclasses.replace(spec, layers=layers, reuse=reuse)

    base = dataclasses.replace(part(False), n_swa=0, swa_type="none", forget="reuse")
    size = spec.kv_size if swa_full else swa_size(spec, n_ubatch)
    return base, dataclasses.replace(part(True), kv_size=size)


class SlidingKVCache:
    """`base` for dense layers, `swa` for sliding ones; `spec` describes both, `is_swa(il)` says which is which.

    `spec.forget` says how the sliding part forgets: "reuse" lets new tokens take cells that every later query is past,
    "prune" empties them as soon as a step is committed. What queries see is the same. `where` as in `KVCache`.
    """

    def __init__(
        self,
        spec: KVSpec,
        where: Where = None,
        *,
        is_swa: Callable[[int], bool],
        n_ubatch: int = 512,
        swa_full: bool = False,
    ) -> None:
        base, swa = part_specs(spec, is_swa, n_ubatch, swa_full)
        self.spec = spec
        self._site = site_of(where)
        shared = dataclasses.replace(self._site, owned=False)
        try:
            self.base = KVCache(base, shared, "kv base")
            try:
                self.swa = KVCache(swa, shared, "kv swa")
            except BaseException:
                self.base.close()
                raise
        except BaseException:
            self._site.close()
            raise

    @property
    def parts(self) -> tuple[KVCache, KVCache]:
        """In the order in which state is written."""
        return self.base, self.swa

    # plan / apply

    def plan(self, allocator: BatchAllocator, n_ubatch: int, embd_all: bool = False) -> list[SlidingStep]:
        """Slots in both parts for every ubatch; a unified cache tries simple splits first.

        Raises:
            NoSlotError: names the part that has no room; nothing changed.
        """
        self._warn_of_lost_windows(allocator)
        if self.spec.unified:
            try:
                return self.steps(_split(allocator, lambda: allocator.split_simple(n_ubatch)))
            except NoSlotError:
                pass  # equal splits may fit where simple ones do not
        return self.steps(_split(allocator, lambda: allocator.split_equal(n_ubatch, not self.spec.unified)))

    def steps(self, ubatches: list[UBatch]) -> list[SlidingStep]:
        """Steps for ubatches cut elsewhere."""
        base, swa = self.base.steps(ubatches), self.swa.steps(ubatches)
        return [SlidingStep(b, s) for b, s in zip(base, swa, strict=True)]

    def plan_full(self, ubatch: UBatch) -> SlidingStep:
        return SlidingStep(self.base.plan_full(ubatch), self.swa.plan_full(ubatch))

    def _warn_of_lost_windows(self, allocator: BatchAllocator) -> None:
        for seq_id in allocator.batch.seq_range.seq_ids:
            first = allocator.seq_pos_min(seq_id)
            if first is not None:
                ok, why = self.can_resume(seq_id, first)
                if not ok and self.base.seq_pos_max(seq_id) is not None:
                    logger.warning("decoding sequence %d from %d: %s", seq_id, first, why)

    # pending work

    @property
    def has_update(self) -> bool:
        return self.base.has_update or self.swa.has_update

    def update(self) -> bool:
        """Apply pending copies and shifts of both parts."""
        done = self.base.update()
        return self.swa.update() or done

    @property
    def defrag_threshold(self) -> float | None:
        """See `KVCache.defrag_threshold`; the same for both parts."""
        return self.base.defrag_threshold

    @defrag_threshold.setter
    def defrag_threshold(self, threshold: float | None) -> None:
        self.base.defrag_threshold = self.swa.defrag_threshold = threshold

    def defrag(self, max_moves: int | None = None) -> DefragReport:
        """Defragment both parts, each with `max_moves` blocks at most; see `KVCache.defrag`."""
        return merged([self.base.defrag(max_moves), self.swa.defrag(max_moves)])

    # sequence operations

    @property
    def shift_reason(self) -> str | None:
        return self.base.shift_reason or self.swa.shift_reason

    @property
    def can_shift(self) -> bool:
        return self.shift_reason is None

    def seq_rm(self, seq_id: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove positions from both parts. Always True."""
        return self.base.seq_rm(seq_id, p0, p1) and self.swa.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int | None = None, p1: int | None = None) -> None:
        self.base.seq_cp(src, dst, p0, p1)
        self.swa.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        self.base.seq_keep(seq_id)
        self.swa.seq_keep(seq_id)

    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> None:
        self.base.seq_add(seq_id, p0, p1, delta)
        self.swa.seq_add(seq_id, p0, p1, delta)

    def seq_div(self, seq_id: int, p0: int | None, p1: int | None, d: int) -> None:
        self.base.seq_div(seq_id, p0, p1, d)
        self.swa.seq_div(seq_id, p0, p1, d)

    def seq_pos_min(self, seq_id: int) -> int | None:
        """Lowest position that the window part still holds; the full part's if the window part is empty."""
        low = self.swa.seq_pos_min(seq_id)
        return self.base.seq_pos_min(seq_id) if low is None else low

    def seq_pos_max(self, seq_id: int) -> int | None:
        """Highest position; None only for an empty sequence."""
        high = self.swa.seq_pos_max(seq_id)
        return self.base.seq_pos_max(seq_id) if high is None else high

    def can_resume(self, seq_id: int, pos: int) -> tuple[bool, str]:
        """Whether a token at `pos` finds its whole window in memory, and if not, why."""
        ok, why = self.base.can_resume(seq_id, pos)
        if not ok:
            return ok, why
        first = max(0, self.swa.streams.window.first_visible(pos))
        low, high = self.swa.seq_pos_min(seq_id), self.swa.seq_pos_max(seq_id)
        lowest = self.base.seq_pos_min(seq_id) or 0
        if low is not None and high == self.base.seq_pos_max(seq_id) and low <= max(first, lowest):
            return True, ""
        full = self.base.streams.of(seq_id).find(seq_id, first, pos).size
        kept = self.swa.streams.of(seq_id).find(seq_id, first, pos).size
        if kept == full:
            return True, ""
        return False, (
            f"the sliding layers have forgotten {full - kept} of the {full} cells at positions {first} to {pos - 1} that "
            f"a token at {pos} attends to; decode the sequence again from an earlier state or from the start"
        )

    def clear(self, data: bool = True) -> None:
        self.base.clear(data)
        self.swa.clear(data)

    # looking inside

    @property
    def runner(self) -> Runner:
        """What runs this memory's graphs, and may run yours."""
        return self.base.runner

    @property
    def size_k_bytes(self) -> int:
        return self.base.size_k_bytes + self.swa.size_k_bytes

    @property
    def size_v_bytes(self) -> int:
        return self.base.size_v_bytes + self.swa.size_v_bytes

    def memory_breakdown(self) -> dict[str, int]:
        out = self.base.memory_breakdown()
        for name, nbytes in self.swa.memory_breakdown().items():
            out[name] = out.get(name, 0) + nbytes
        return out

    @staticmethod
    def predict(
        spec: KVSpec,
        where: Where = None,
        *,
        is_swa: Callable[[int], bool],
        n_ubatch: int = 512,
        swa_full: bool = False,
    ) -> dict[str, int]:
        """What `memory_breakdown` would say; nothing is allocated."""
        out: dict[str, int] = {}
        for part in part_specs(spec, is_swa, n_ubatch, swa_full):
            for name, nbytes in KVCache.predict(part, where).items():
                out[name] = out.get(name, 0) + nbytes
        return out

    @property
    def cells(self) -> CellsMap:
        """Cells of the full part; `swa.cells` are those of the sliding part."""
        return self.base.cells

    def view(self) -> CellsView:
        """Counts over the full part; `swa.view()` counts the sliding part."""
        return self.base.view()

    def part_of(self, layer: int) -> KVCache:
        """The part that stores layer `layer`."""
        return self.swa if layer in self.swa.storage.layers else self.base

    def k(self, layer: int, dequantize: bool = True) -> npt.NDArray[Any]:
        """Stored keys of the part that has the layer; see `KVCache.k`."""
        return self.part_of(layer).k(layer, dequantize)

    def v(self, layer: int, dequantize: bool = True) -> npt.NDArray[Any]:
        """Stored values of the part that has the layer; see `KVCache.v`."""
        return self.part_of(layer).v(layer, dequantize)

    def render(self) -> str:
        return f"base\n{self.base.render()}\nswa\n{self.swa.render()}"

    def __repr__(self) -> str:
        return f"<SlidingKVCache base={self.base!r} swa={self.swa!r}>"

    def close(self) -> None:
        self.swa.close()
        self.base.close()
        self._site.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _split(allocator: BatchAllocator, take: Callable[[], UBatch | None]) -> list[UBatch]:
    allocator.split_reset()
    return list(iter(take, None))
