"""The KV cache: cells, slots and tensors behind one object with llama.cpp's sequence operations.

`plan` finds slots and changes nothing; steps `apply` themselves; `update` does what sequence operations left for the
device. Knows no model.  Upstream: llama_kv_cache.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyggmlkv.backend.runner import Runner
from pyggmlkv.batch.allocator import BatchAllocator
from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.binding import dtypes
from pyggmlkv.errors import CacheError, ShiftError
from pyggmlkv.logs import logger
from pyggmlkv.memory import slots
from pyggmlkv.memory.cells.view import CellsMap, CellsView, cells_of, render, view
from pyggmlkv.memory.config import KVSpec
from pyggmlkv.memory.kv.defrag import DefragReport, defrag, fragmentation, moves_a_graph
from pyggmlkv.memory.kv.k_shift import shift_keys
from pyggmlkv.memory.kv.step import KVStep
from pyggmlkv.memory.kv.storage import KVStorage, LayerStorage, predict
from pyggmlkv.memory.mask import SlidingWindow
from pyggmlkv.memory.rotation import rotations
from pyggmlkv.memory.seq_ops import CellStreams, StreamsSpec
from pyggmlkv.memory.site import Where, breakdown, buffer_type_of, site_of
from pyggmlkv.memory.slots import SlotInfo


class KVCache:
    """K and V of past tokens in `kv_size` cells a stream.

    `where` is None for the CPU, or a device, a backend, a runner, or a `Site` that says more. Works without a model:
    a graph of yours writes and reads the cells that a step names.

    ```python
    import numpy as np
    from pyggmlkv import Batch, KVCache, KVSpec, LayerSpec, plan
    from pyggmlkv.binding import ComputeGraph, TensorArena

    spec = KVSpec(LayerSpec.uniform(n_layer=1, n_head_kv=2, head_dim=64), kv_size=256)
    rows = np.random.default_rng(0).standard_normal((8, 2, 64), np.float32)
    with KVCache(spec) as cache, TensorArena(32, graph_nodes=32) as ctx:
        [step] = plan(cache, Batch([0] * 8))  # tokens are not looked up: positions 0 .. 7 of sequence 0
        step.apply()
        cur = ctx.new_tensor("f32", 64, 2, 8)
        idxs = ctx.new_tensor("i64", 8)
        cur.set_input(), idxs.set_input()
        graph = ComputeGraph(ctx, 32)
        graph.build_forward_expand(step.cpy_k(ctx, cur, idxs, 0))
        graph.build_forward_expand(step.cpy_v(ctx, cur, idxs, 0))
        cache.runner.alloc(graph)
        cur.set(rows)
        cells = np.empty(8, np.int64)
        step.fill_k_idxs(cells)
        idxs.set(cells)
        cache.runner.compute(graph)
        step.commit()
        cache.seq_rm(0, 2, 5)  # forget three positions,
        cache.seq_add(0, 5, None, -3)  # close the gap: keys are turned by the next update
        cache.update()
        report = cache.defrag()  # five cells in front
        k, v, pos = cache.k(0)[0, :5], cache.v(0)[0, :5], cache.cells[0].pos[:5]
    ```

    Raises:
        CacheError: element types or sizes that no cache can have.
        DeviceMemoryError: no room on the device.
    """

    def __init__(self, spec: KVSpec, where: Where = None, name: str = "kv") -> None:
        self.spec = spec
        self.name = name
        self._warned = False
        self.defrag_threshold: float | None = None
        """Share of unused cells among those read above which an update defragments; None: only `defrag` does."""
        self._defrag_moves: int | None = None
        self._site = site_of(where)
        self._runner = self._site.runner
        try:
            self.storage = KVStorage(spec, self._site.buffer_type_of)
        except BaseException:
            self._site.close()
            raise
        self.streams = CellStreams(
            StreamsSpec(
                kv_size=spec.kv_size,
                n_seq_max=spec.n_seq_ids,
                n_stream=spec.n_stream,
                n_pos_per_embd=spec.n_pos_per_embd,
                window=SlidingWindow(spec.swa_type, spec.n_swa),
                forget=spec.forget,
                shift=spec.shift,
                name=name,
            )
        )
        quantised = [dtypes.dtype_info(t).is_quantized for t in (spec.type_k, spec.type_v)]
        self.k_rot, self.v_rot = rotations(spec, *quantised)

    # plan / apply

    def plan(self, allocator: BatchAllocator, n_ubatch: int, embd_all: bool = False) -> list[KVStep]:
        """Split the allocator's batch and find a slot for every ubatch; no cell changes.

        Raises:
            NoSlotError: names the part, the cells needed and the cells free.
        Upstream: llama_kv_cache::init_batch, prepare.
        """
        ubatches = self.split(allocator, n_ubatch)
        return self.steps(ubatches)

    def split(self, allocator: BatchAllocator, n_ubatch: int) -> list[UBatch]:
        """Cut the batch as this cache needs it: simple for one stream, equal sequences for several."""
        allocator.split_reset()
        ubatches: list[UBatch] = []
        while True:
            if self.spec.n_stream == 1:
                ubatch = allocator.split_simple(n_ubatch)
            else:
                ubatch = allocator.split_equal(n_ubatch, True)
            if ubatch is None:
                return ubatches
            ubatches.append(ubatch)

    def steps(self, ubatches: list[UBatch]) -> list[KVStep]:
        """Steps for ubatches that were cut elsewhere (compound memories)."""
        found = slots.prepare(self.streams, ubatches)
        return [KVStep(self, ubatch, slot) for ubatch, slot in zip(ubatches, found, strict=True)]

    def plan_full(self, ubatch: UBatch) -> KVStep:
        """The worst case: every cell of every stream in use.  Upstream: init_full."""
        ns = self.spec.n_stream
        idxs = np.zeros((ns, max(1, ubatch.n_tokens // ns)), np.int32)
        slot = SlotInfo(0, ns - 1, tuple(range(ns)), idxs)
        return KVStep(self, ubatch, slot, self.spec.kv_size)

    # pending work

    @property
    def has_update(self) -> bool:
        """Whether stream copies, shifts or moves wait for the device."""
        return bool(self.streams.stream_copies) or self.streams.has_shift or self._defrag_due

    @property
    def _defrag_due(self) -> bool:
        if self.defrag_threshold is None:
            return self._defrag_moves is not None
        return (
            self._defrag_moves is not None
            or fragmentation(self.streams, self.spec.n_pad) > self.defrag_threshold
        )

    def update(self) -> bool:
        """Apply pending stream copies and shifts now, and one graph of moves where a defrag is due; True if any.

        Steps planned before are stale then: plan again.  Upstream: llama_kv_cache::update; older: defrag_sched.
        """
        if not self.has_update:
            return False
        self.copy_streams()
        if self.streams.has_shift:
            if self.spec.rope.mode is not None:
                self._warn_of_scaled_keys()
                shift_keys(self.storage, self._site, self.streams, self.k_rot)
            self.streams.reset_shift()
        if self._defrag_due:
            n = self._defrag_moves
            self.defrag(moves_a_graph(self.storage, self._runner.max_nodes) if n is None else n)
        return True

    def _warn_of_scaled_keys(self) -> None:
        if self.spec.rope.ext_factor != 0.0 and self.spec.shift == "upstream" and not self._warned:
            self._warned = True
            logger.warning(
                "%s: this model scales RoPE with YaRN, and a shift scales its keys once more, as in llama.cpp; "
                'shift="pure" turns them without',
                self.name,
            )

    def copy_streams(self) -> None:
        """Make the copies between streams that `seq_cp` queued, without waiting for an update."""
        for src, dst in self.streams.stream_copies:
            self.storage.copy_stream(src, dst)
        self.streams.stream_copies.clear()

    def defrag(self, max_moves: int | None = None) -> DefragReport:
        """Move cells to the front of each stream, at most `max_moves` blocks now and at every update until done.

        What is stored does not change: rows, positions, sequences and pending shifts move along, bit by bit.
        Steps planned before are stale: plan again.

        Raises:
            UnsupportedOpError: a device cannot copy rows of this type; nothing was changed.
        """
        self.copy_streams()
        report = defrag(self.streams, self.storage, self._runner, max_moves)
        self._defrag_moves = None if report.done or not max_moves else max_moves
        return report

    # sequence operations

    @property
    def shift_reason(self) -> str | None:
        """Why positions cannot be shifted, None where they can.  Upstream: get_can_shift."""
        if self.spec.can_shift_reason is not None:
            return self.spec.can_shift_reason
        if self.spec.n_pos_per_embd > 1:
            return "positions of this model have several dimensions (M-RoPE)"
        return None

    @property
    def can_shift(self) -> bool:
        return self.shift_reason is None

    def _check_shift(self, op: str) -> None:
        reason = self.shift_reason
        if reason is not None:
            raise ShiftError(f"{op}: {reason}; nothing was changed", op=op, reason=reason)

    def seq_rm(self, seq_id: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove positions [p0, p1) of a sequence, of all if None. Always True here; a part of a compound may refuse."""
        return self.streams.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int | None = None, p1: int | None = None) -> None:
        """Give `dst` the cells of `src`; between streams the whole stream is copied at the next update."""
        self.streams.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """Remove everything of the sequence's stream that is not `seq_id`'s."""
        self.streams.seq_keep(seq_id)

    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> None:
        """Move positions in [p0, p1) by `delta`; keys are turned at the next update.

        Raises:
            ShiftError: `can_shift` is False; nothing changed.
        """
        self._check_shift("seq_add")
        self.streams.seq_add(seq_id, p0, p1, delta)

    def seq_div(self, seq_id: int, p0: int | None, p1: int | None, d: int) -> None:
        """Divide positions in [p0, p1) by `d`.

        Raises:
            ShiftError: `can_shift` is False; nothing changed.
        """
        self._check_shift("seq_div")
        self.streams.seq_div(seq_id, p0, p1, d)

    def seq_pos_min(self, seq_id: int) -> int | None:
        """Lowest position of the sequence, None if it is empty."""
        return self.streams.seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int | None:
        """Highest position of the sequence, None if it is empty."""
        return self.streams.seq_pos_max(seq_id)

    def can_resume(self, seq_id: int, pos: int) -> tuple[bool, str]:
        """Whether decoding of the sequence may go on at `pos`, and why not."""
        last = self.seq_pos_max(seq_id)
        if pos != (0 if last is None else last + 1):
            return False, f"sequence {seq_id} holds positions up to {last}"
        return True, ""

    def clear(self, data: bool = True) -> None:
        """Empty all cells; `data` zeroes the tensors too."""
        self.streams.clear()
        if data:
            self.storage.clear()

    # looking inside

    @property
    def runner(self) -> Runner:
        """What runs this memory's graphs, and may run yours."""
        return self._runner

    @property
    def size_k_bytes(self) -> int:
        return self.storage.nbytes_k

    @property
    def size_v_bytes(self) -> int:
        return self.storage.nbytes_v

    def memory_breakdown(self) -> dict[str, int]:
        """Bytes by device name."""
        return breakdown(self.storage.buffers)

    @staticmethod
    def predict(spec: KVSpec, where: Where = None) -> dict[str, int]:
        """What `memory_breakdown` of a cache of this spec would say; nothing is allocated.

        Raises:
            CacheError: element types or sizes that no cache can have.
        """
        return predict(spec, buffer_type_of(where))

    def k(self, layer: int, dequantize: bool = True) -> npt.NDArray[Any]:
        """Copy of the stored keys (n_stream, kv_size, n_embd_k_gqa), [n_embd_k_gqa, kv_size, n_stream] in ggml's order."""
        data: npt.NDArray[Any] = self._layer(layer).k.to_numpy(dequantize)
        return data.reshape(self.spec.n_stream, self.spec.kv_size, -1)

    def v(self, layer: int, dequantize: bool = True) -> npt.NDArray[Any]:
        """Copy of the stored values (n_stream, kv_size, n_embd_v_gqa), cell by cell also where V is transposed."""
        t = self._layer(layer).v
        if t is None:
            raise CacheError(f"layer {layer} has no V: its K is read as V too (MLA)", layer=layer)
        data: npt.NDArray[Any] = t.to_numpy(dequantize)
        if self.spec.v_trans:
            return data.reshape(self.spec.n_stream, -1, self.spec.kv_size).swapaxes(1, 2).copy()
        return data.reshape(self.spec.n_stream, self.spec.kv_size, -1)

    def _layer(self, il: int) -> LayerStorage:
        found = self.storage.layers.get(il)
        if found is None:
            raise CacheError(
                f"layer {il} is not in this cache; it has {sorted(self.storage.layers)}", layer=il
            )
        return found

    @property
    def cells(self) -> CellsMap:
        """Read-only arrays of each stream: `cells[s].pos`, `.shift`, `.seq`."""
        return cells_of(self.streams)

    def view(self) -> CellsView:
        """Token count, used cells, largest free run, sequences per cell."""
        return view(self.streams)

    def render(self) -> str:
        """Text map of the cells."""
        return render(self.streams)

    def __repr__(self) -> str:
        used = sum(c.n_used for c in self.streams.cells)
        s = self.spec
        return (
            f"<KVCache {self.name}: {used} of {s.kv_size * s.n_stream} cells used, {s.n_stream} stream(s), "
            f"{len(s.layers)} layers, K {s.type_k} {self.size_k_bytes} bytes, V {s.type_v} {self.size_v_bytes} bytes>"
        )

    def close(self) -> None:
        self.storage.close()
        self._site.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
