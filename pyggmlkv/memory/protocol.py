"""What a graph may ask of memory: the step that one ubatch makes, seen from the graph's side.

Graph code imports this module and no other of the package. A step's `key` names everything that its part of a
graph's shape depends on, so equal keys mean a graph that can be reused.  Upstream: llama_memory_context_i and the
`*_context` classes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyggmlkv.batch.allocator import BatchAllocator
from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.binding import Tensor, TensorArena
from pyggmlkv.types import I32, I64


class Step(Protocol):
    """One ubatch placed in memory: `apply` changes cells; `commit` keeps that, `undo` takes exactly that back.

    `undo(computed=True)` also drops what a graph that was stopped half-way may have overwritten.
    Upstream: older llama_kv_cache::commit and restore, for a step instead of all that is pending.
    """

    @property
    def ubatch(self) -> UBatch: ...

    @property
    def key(self) -> Hashable: ...

    def apply(self) -> None: ...

    def commit(self) -> None: ...

    def undo(self, computed: bool = False) -> None: ...


class Memory(Protocol):
    """What a context asks of a memory of any kind.  Upstream: llama_memory_i."""

    @property
    def has_update(self) -> bool: ...

    @property
    def can_shift(self) -> bool: ...

    def plan(self, allocator: BatchAllocator, n_ubatch: int, embd_all: bool = False) -> Sequence[Step]: ...

    def plan_full(self, ubatch: UBatch) -> Step: ...

    def update(self) -> bool: ...

    def clear(self, data: bool = True) -> None: ...

    def seq_rm(self, seq_id: int | None, p0: int | None = None, p1: int | None = None) -> bool: ...

    def seq_cp(self, src: int, dst: int, p0: int | None = None, p1: int | None = None) -> None: ...

    def seq_keep(self, seq_id: int) -> None: ...

    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> None: ...

    def seq_div(self, seq_id: int, p0: int | None, p1: int | None, d: int) -> None: ...

    def seq_pos_min(self, seq_id: int) -> int | None: ...

    def seq_pos_max(self, seq_id: int) -> int | None: ...

    def can_resume(self, seq_id: int, pos: int) -> tuple[bool, str]: ...

    def memory_breakdown(self) -> dict[str, int]: ...

    def render(self) -> str: ...

    def close(self) -> None: ...


class AttentionStep(Step, Protocol):
    """Cache writes and reads of one attention memory.  Upstream: llama_kv_cache_context."""

    @property
    def n_kv(self) -> int:
        """Cells a query row sees, the padding included."""

    @property
    def n_stream(self) -> int:
        """Streams that this ubatch touches."""

    @property
    def n_v_idxs(self) -> int: ...

    @property
    def k_rot(self) -> npt.NDArray[np.float32] | None:
        """Hadamard matrix applied to Q and K, or None."""

    @property
    def v_rot(self) -> npt.NDArray[np.float32] | None: ...

    def cpy_k(self, ctx: TensorArena, k_cur: Tensor, k_idxs: Tensor, il: int) -> Tensor: ...

    def cpy_v(self, ctx: TensorArena, v_cur: Tensor, v_idxs: Tensor, il: int) -> Tensor: ...

    def get_k(self, ctx: TensorArena, il: int) -> Tensor: ...

    def get_v(self, ctx: TensorArena, il: int) -> Tensor: ...

    def fill_k_idxs(self, out: I64) -> None: ...

    def fill_v_idxs(self, out: I64) -> None: ...

    def fill_mask(self, out: npt.NDArray[np.floating], causal: bool) -> None: ...

    def fill_pos_bucket(self, out: I32) -> None: ...


class SlidingStep(Step, Protocol):
    """Full and sliding-window attention side by side.  Upstream: llama_kv_cache_iswa_context."""

    @property
    def base(self) -> AttentionStep: ...

    @property
    def swa(self) -> AttentionStep: ...


class RecurrentStep(Step, Protocol):
    """State cells of one recurrent memory.  Upstream: llama_memory_recurrent_context."""

    @property
    def n_rs(self) -> int: ...

    @property
    def head(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def rs_z(self) -> int | None: ...

    def r(self, il: int) -> Tensor: ...

    def s(self, il: int) -> Tensor: ...

    def fill_s_copy(self, out: I32) -> None: ...


class HybridStep(Step, Protocol):
    """Attention and recurrent parts of one ubatch.  Upstream: llama_memory_hybrid_context."""

    @property
    def attn(self) -> Step: ...

    @property
    def recr(self) -> RecurrentStep: ...
