"""Planning without a model: a batch in, steps out, for people who build their own graphs.

Tokens are not looked up anywhere; only positions and sequence ids count.  Upstream: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from pyggmlkv.batch.allocator import BatchAllocator
from pyggmlkv.batch.batch import Batch
from pyggmlkv.batch.prepare import BatchLimits
from pyggmlkv.memory.hybrid import HybridMemory, HybridStep
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.kv.step import KVStep
from pyggmlkv.memory.recurrent.memory import RecurrentMemory, RecurrentStep
from pyggmlkv.memory.sliding import SlidingKVCache, SlidingStep

MAX_TOKEN = 1 << 31
"""Beyond every token id: without a model any is accepted."""
AnyMemory: TypeAlias = KVCache | SlidingKVCache | RecurrentMemory | HybridMemory
AnyStep: TypeAlias = KVStep | SlidingStep | RecurrentStep | HybridStep


def plan(memory: AnyMemory, batch: Batch, n_ubatch: int = 512) -> Sequence[AnyStep]:
    """Steps that take `batch` into `memory`, `n_ubatch` tokens each at most.

    No cell changes before a step is applied; shifts and copies that are pending are done, if there is room. Use each
    step as `apply` -> build and run a graph with it -> `commit`, or `undo` where that failed.

    Raises:
        BatchError: positions or sequence ids do not fit what memory holds.
        NoSlotError: no room; memory is as it was.
    """
    n_pos, n_seq = _limits(memory)
    allocator = BatchAllocator(n_pos)
    allocator.init(
        batch, BatchLimits(MAX_TOKEN, 0 if batch.embd is None else batch.embd.shape[1], n_seq), memory
    )
    steps = memory.plan(allocator, n_ubatch)
    return memory.plan(allocator, n_ubatch) if memory.update() else steps


def _limits(memory: AnyMemory) -> tuple[int, int]:
    """Positions a token, sequence ids."""
    if isinstance(memory, RecurrentMemory):
        return 1, memory.spec.n_seq_max
    if isinstance(memory, HybridMemory):
        attn = memory.attn.spec
        return attn.n_pos_per_embd, min(attn.n_seq_ids, memory.recr.spec.n_seq_max)
    return memory.spec.n_pos_per_embd, memory.spec.n_seq_ids
