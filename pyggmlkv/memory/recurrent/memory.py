"""Recurrent memory: one state per sequence, in r (rolling) and s (recurrent) tensors of every recurrent layer.

Bookkeeping is `recurrent_cells`; this module owns the tensors and the steps that graphs see.
Upstream: llama_memory_recurrent, llama_memory_recurrent_context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pyggmlkv.batch.allocator import BatchAllocator
from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.binding import Buffer, BufferType, Tensor, TensorArena
from pyggmlkv.errors import CacheError
from pyggmlkv.memory.cells.view import CellsMap, CellsView, cells_of_recurrent, view_recurrent
from pyggmlkv.memory.kv.defrag import DefragReport
from pyggmlkv.memory.recurrent.cells import RecurrentCells
from pyggmlkv.memory.recurrent.slots import RecurrentSlot
from pyggmlkv.memory.site import Where, breakdown, buffer_type_of, by_device
from pyggmlkv.types import I32


@dataclasses.dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """Sizes of a recurrent memory: elements of r and s for each layer that has a state.

    `size` is the number of state cells, at least `n_seq_max`; `n_rs_seq` rollback snapshots are kept of each.
    """

    layers: tuple[int, ...]
    n_embd_r: int
    n_embd_s: int
    n_seq_max: int = 1
    size: int = 1
    n_rs_seq: int = 0


class RecurrentStep:
    """Implements `protocol.RecurrentStep`."""

    def __init__(self, memory: RecurrentMemory, ubatch: UBatch, slot: RecurrentSlot) -> None:
        self._memory = memory
        self._slot = slot
        self._applied = False
        self.ubatch = ubatch

    def apply(self) -> None:
        self._memory.states.apply(self._slot)
        self._applied = True

    def commit(self) -> None:
        """Keep what `apply` did."""
        self._applied = False

    def undo(self, computed: bool = False) -> None:
        """Cells as before; sequences whose state an interrupted graph may have overwritten are removed whole."""
        self.take_back(computed)

    def take_back(self, computed: bool = False) -> list[int]:
        """As `undo`; the sequences that were removed."""
        if not self._applied:
            return []
        self._applied = False
        return self._memory.states.undo(self._slot, computed)

    @property
    def key(self) -> Hashable:
        return self._slot.key

    @property
    def n_rs(self) -> int:
        return self._slot.n_rs

    @property
    def head(self) -> int:
        return self._slot.head

    @property
    def size(self) -> int:
        return self._memory.spec.size

    @property
    def rs_z(self) -> int | None:
        return self._slot.rs_z

    def r(self, il: int) -> Tensor:
        return self._memory.tensors[il][0]

    def s(self, il: int) -> Tensor:
        return self._memory.tensors[il][1]

    def fill_s_copy(self, out: I32) -> None:
        out[:] = self._slot.s_copy


class RecurrentMemory:
    """State cells of all recurrent layers. Positions cannot be shifted, parts cannot be removed (`seq_rm` says False)."""

    has_update = False

    def __init__(self, spec: RecurrentSpec, where: Where = None) -> None:
        self.spec = spec
        self.states = RecurrentCells(spec.size, spec.n_seq_max, spec.n_rs_seq)
        arenas, self.tensors = _lay_out(spec, buffer_type_of(where))
        self._arenas = tuple(arenas.values())
        self.buffers: tuple[Buffer, ...] = tuple(buft.alloc_tensors(arena) for buft, arena in arenas.items())
        for buffer in self.buffers:
            buffer.clear(0)

    # plan / apply

    def plan(self, allocator: BatchAllocator, n_ubatch: int, embd_all: bool = False) -> list[RecurrentStep]:
        """Split by sequences and find a state cell for each; nothing changes.

        Raises:
            NoSlotError: no free state cell.
        Upstream: llama_memory_recurrent::init_batch.
        """
        return self.steps(self.split(allocator, n_ubatch, embd_all))

    def split(self, allocator: BatchAllocator, n_ubatch: int, embd_all: bool) -> list[UBatch]:
        """Equal sequences, or one sequence at a time when every token is an output."""
        allocator.split_reset()
        n_keep_tail = self.spec.n_rs_seq + 1 if self.spec.n_rs_seq else 0

        def take() -> UBatch | None:
            if embd_all:
                return allocator.split_seq(n_ubatch)
            return allocator.split_equal(n_ubatch, True, n_keep_tail)

        return list(iter(take, None))

    def steps(self, ubatches: list[UBatch]) -> list[RecurrentStep]:
        slots = self.states.prepare(ubatches)
        return [RecurrentStep(self, ubatch, slot) for ubatch, slot in zip(ubatches, slots, strict=True)]

    def plan_full(self, ubatch: UBatch) -> RecurrentStep:
        return RecurrentStep(self, ubatch, self.states.full_slot())

    def update(self) -> bool:
        """Nothing is ever pending: copies happen in the next graph."""
        return False

    defrag_threshold: float | None = None

    def defrag(self, max_moves: int | None = None) -> DefragReport:
        """Nothing to do: a sequence has one cell, and graphs read them in any order."""
        return DefragReport()

    # sequence operations

    can_shift = True
    shift_reason: str | None = None

    def seq_rm(self, seq_id: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove a whole sequence, or as much of its end as snapshots allow; else False and nothing changed."""
        return self.states.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int | None = None, p1: int | None = None) -> None:
        self.states.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        self.states.seq_keep(seq_id)

    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> None:
        self.states.seq_add(seq_id, p0, p1, delta)

    def seq_div(self, seq_id: int, p0: int | None, p1: int | None, d: int) -> None:
        self.states.seq_div(seq_id, p0, p1, d)

    def seq_pos_min(self, seq_id: int) -> int | None:
        """Same as `seq_pos_max`: a state cannot go back."""
        return self.states.seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int | None:
        return self.states.seq_pos_max(seq_id)

    def can_resume(self, seq_id: int, pos: int) -> tuple[bool, str]:
        """Whether decoding of the sequence may go on at `pos`, once `seq_rm` took back what follows, and why not."""
        last = self.seq_pos_max(seq_id)
        if pos == (0 if last is None else last + 1) or self._has_snapshot(seq_id, pos - 1):
            return True, ""
        return (
            False,
            f"the recurrent state of sequence {seq_id} stands after position {last}; no state after {pos - 1} is kept",
        )

    def _has_snapshot(self, seq_id: int, pos: int) -> bool:
        """Whether `seq_rm` can bring the sequence back to where `pos` was its last position."""
        cells = self.states
        cell = int(cells.tail[seq_id])
        if cell < 0 or pos < 0 or cells.is_shared(cell):
            return False
        return bool((cells.rs_pos[cell, cells.rs_idx[cell] :] == pos).any())

    def clear(self, data: bool = True) -> None:
        self.states.clear()
        if data:
            for buffer in self.buffers:
                buffer.clear(0)

    # looking inside

    @property
    def size_r_bytes(self) -> int:
        return sum(r.nbytes for r, _ in self.tensors.values())

    @property
    def size_s_bytes(self) -> int:
        return sum(s.nbytes for _, s in self.tensors.values())

    def memory_breakdown(self) -> dict[str, int]:
        """Bytes by device name."""
        return breakdown(self.buffers)

    @staticmethod
    def predict(spec: RecurrentSpec, where: Where = None) -> dict[str, int]:
        """What `memory_breakdown` of a memory of this spec would say; nothing is allocated."""
        arenas, _ = _lay_out(spec, buffer_type_of(where))
        try:
            return by_device((buft, buft.alloc_tensors_size(arena)) for buft, arena in arenas.items())
        finally:
            for arena in arenas.values():
                arena.close()

    size_k_bytes = 0
    size_v_bytes = 0

    @property
    def cells(self) -> CellsMap:
        """The state cells as one stream, in read-only copies; a sequence's cell holds its last position."""
        return cells_of_recurrent(self.states)

    def view(self) -> CellsView:
        """State cells as one stream: their sequences and positions."""
        return view_recurrent(self.states)

    def k(self, layer: int, dequantize: bool = True) -> npt.NDArray[Any]:
        """There are no keys and no values.

        Raises:
            CacheError: always; `r(layer)` and `s(layer)` give what is stored.
        """
        raise CacheError(
            f"layer {layer} is not in this cache: it holds recurrent states, no keys or values; see r(layer) and s(layer)",
            layer=layer,
        )

    v = k

    def r(self, layer: int) -> npt.NDArray[np.float32]:
        """Copy of the rolling states (n_cells, n_embd_r), [n_embd_r, n_cells] in ggml's order."""
        return self._tensors(layer)[0].to_numpy()

    def s(self, layer: int) -> npt.NDArray[np.float32]:
        """Copy of the recurrent states (n_cells, n_embd_s)."""
        return self._tensors(layer)[1].to_numpy()

    def _tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer not in self.tensors:
            raise CacheError(
                f"layer {layer} has no recurrent state; layers {sorted(self.tensors)} have", layer=layer
            )
        return self.tensors[layer]

    def render(self) -> str:
        """One line a state cell: its sequences and position."""
        lines = []
        for i in range(self.spec.size):
            ids = self.states.seq_ids(i)
            lines.append(f"{i:4d}  " + (f"pos {int(self.states.pos[i])}  seq {ids}" if ids else "."))
        return "\n".join(lines)

    def __repr__(self) -> str:
        n = len(self.tensors)
        return f"<RecurrentMemory: {self.states.used} of {self.spec.size} states used, {n} layers, {self.size_s_bytes} bytes>"

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        for arena in self._arenas:
            arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


Arenas = dict[BufferType, TensorArena]


def _lay_out(
    spec: RecurrentSpec, buffer_type_of: Callable[[int], BufferType]
) -> tuple[Arenas, dict[int, tuple[Tensor, Tensor]]]:
    """r and s of each layer without memory, in an arena a buffer type."""
    n_rows = spec.size * (1 + spec.n_rs_seq)
    arenas: Arenas = {}
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    for il in spec.layers:
        buft = buffer_type_of(il)
        arena = arenas.get(buft)
        if arena is None:
            arena = arenas[buft] = TensorArena(2 * len(spec.layers))
        r = arena.new_tensor("f32", spec.n_embd_r, n_rows, name=f"cache_r_l{il}")
        s = arena.new_tensor("f32", spec.n_embd_s, n_rows, name=f"cache_s_l{il}")
        tensors[il] = (r, s)
    return arenas, tensors
