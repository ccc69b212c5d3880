"""A live memory as saved states see it: its parts in saving order, and what each expects to read.

The one place that knows how memories are put together and what their tensors are.  Upstream: state_write of
llama_kv_cache_iswa, llama_memory_hybrid, llama_memory_hybrid_iswa.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from pyggmlkv.binding import Tensor, dtypes
from pyggmlkv.errors import StateError
from pyggmlkv.memory.create import MemoryObject
from pyggmlkv.memory.hybrid import HybridMemory
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.kv.shared import SharedKVCache
from pyggmlkv.memory.kv.storage import LayerStorage
from pyggmlkv.memory.recurrent.memory import RecurrentMemory
from pyggmlkv.memory.sliding import SlidingKVCache
from pyggmlkv.state.blocks import (
    KVStateLayer,
    KVStateSpec,
    PartSpec,
    RecurrentStateSpec,
    StateSpec,
    TensorSpec,
)

LivePart: TypeAlias = KVCache | RecurrentMemory


@dataclasses.dataclass(frozen=True, slots=True)
class Live:
    """What states are taken of and put into: a memory (None: a model without one) and its model's name and layers."""

    arch: str
    memory: MemoryObject | None
    n_layer: int

    def parts(self, partial: bool = False) -> tuple[LivePart, ...]:
        """In saving order; `partial`: without those that the partial flag leaves out."""
        return tuple(part for part, in_partial in _parts(self.memory) if in_partial or not partial)

    def spec(self) -> StateSpec:
        """What a state must look like to fit."""
        return StateSpec(
            self.arch, tuple(_spec(part, flag, self.n_layer) for part, flag in _parts(self.memory))
        )

    def check_seq(self, seq_id: int | None, partial: bool) -> None:
        """Raises: SequenceError for an id that the memory cannot have, StateError for a partial whole context."""
        if seq_id is None:
            if partial:
                raise StateError("state: only a sequence is saved in part; give seq_id", field="partial")
        elif self.memory is not None:
            self.memory.seq_pos_max(seq_id)
        elif not 0 <= seq_id < 2**31:
            raise StateError(
                f"state: sequence id {seq_id} given, 0 or more expected", field="seq_id", found=seq_id
            )


def _parts(memory: MemoryObject | None) -> tuple[tuple[LivePart, bool], ...]:
    if memory is None or isinstance(memory, SharedKVCache):  # what is borrowed is saved where it belongs
        return ()
    if isinstance(memory, SlidingKVCache):
        return tuple((part, flag) for part, flag in ((memory.base, False), (memory.swa, True)) if _owns(part))
    if isinstance(memory, HybridMemory):
        attn = ((memory.attn, False),) if isinstance(memory.attn, KVCache) else _parts(memory.attn)
        return (*attn, (memory.recr, True))
    return ((memory, True),)


def _owns(part: KVCache) -> bool:
    return not isinstance(part, SharedKVCache)


def _spec(part: LivePart, in_partial: bool, n_layer: int) -> PartSpec:
    if isinstance(part, RecurrentMemory):
        layers = tuple(
            (tensor_spec(part.tensors[il][0]), tensor_spec(part.tensors[il][1]))
            if il in part.tensors
            else None
            for il in range(n_layer)
        )
        return RecurrentStateSpec(layers, part.spec.size, part.spec.n_seq_max, "recurrent", in_partial)
    spec = part.spec
    return KVStateSpec(
        layers=tuple(kv_layer(layer, spec.v_trans) for layer in part.storage.owners),
        kv_size=spec.kv_size,
        n_stream=spec.n_stream,
        n_seq_max=spec.n_seq_ids,
        n_pos_per_embd=spec.n_pos_per_embd,
        v_trans=spec.v_trans,
        name=part.name,
        in_partial=in_partial,
    )


def kv_layer(layer: LayerStorage, v_trans: bool) -> KVStateLayer:
    """One layer's rows; a transposed V is saved without the padding of its rows."""
    v = None if layer.v is None else tensor_spec(layer.v)
    if layer.v is not None and v_trans:
        n_embd, size = layer.spec.n_embd_v_gqa, layer.v.dtype_info.type_size
        v = TensorSpec(layer.v.dtype_info.number, n_embd * size, n_embd, size)
    return KVStateLayer(layer.spec.il, tensor_spec(layer.k), v)


def tensor_spec(t: Tensor) -> TensorSpec:
    """Type and row of a tensor whose rows are cells."""
    return TensorSpec(t.dtype_info.number, dtypes.row_size(t.dtype, t.ne[0]), t.ne[0], t.dtype_info.type_size)
