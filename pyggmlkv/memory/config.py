"""What a memory is made of, as frozen settings: layers, element types, RoPE, window, streams.

Knows nothing of models or files: `memory/create.py` derives these from hyperparameters, and people who build their
own graphs write them by hand.  Upstream: the constructor arguments of llama_kv_cache, llama_memory_recurrent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeAlias

from pyggmlkv.types import MAX_SEQ, DType

RopeMode: TypeAlias = Literal["normal", "neox", "mrope", "imrope", "vision"]
SwaType: TypeAlias = Literal["none", "standard", "chunked", "symmetric"]
Forget: TypeAlias = Literal["reuse", "prune"]
"""How cells behind a sliding window go: taken over by new tokens, or emptied once a step is committed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RopeSpec:
    """RoPE as the K-shift needs it; `mode` None means that keys carry no position."""

    mode: RopeMode | None = "normal"
    n_ctx_orig: int = 0
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer's share of the cache.

    `head_dim_k`, `head_dim_v` count elements; `n_embd_nope` is the MLA latent part in front of the turned slice;
    `n_rot` 0 means that this layer's keys are never turned. `freq_base` and `freq_scale` None: the cache's own.
    """

    il: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_rot: int = 0
    n_embd_nope: int = 0
    freq_base: float | None = None
    freq_scale: float | None = None
    has_v: bool = True

    @property
    def n_embd_k_gqa(self) -> int:
        return self.n_head_kv * self.head_dim_k

    @property
    def n_embd_v_gqa(self) -> int:
        return self.n_head_kv * self.head_dim_v

    @classmethod
    def uniform(
        cls, n_layer: int, n_head_kv: int, head_dim: int, n_rot: int | None = None
    ) -> tuple[LayerSpec, ...]:
        """Layers 0 .. n_layer - 1 that are all alike; `n_rot` None turns whole heads."""
        rot = head_dim if n_rot is None else n_rot
        return tuple(cls(il, n_head_kv, head_dim, head_dim, rot) for il in range(n_layer))


@dataclasses.dataclass(frozen=True, slots=True)
class KVSpec:
    """A KV cache. `kv_size` is cells per stream; `attn_rot` None turns rotation on for quantised types as upstream.

    `reuse` maps a layer that owns no storage to the layer whose cells it reads. `can_shift_reason` is set where the
    architecture forbids a K-shift.  Upstream: llama_kv_cache::llama_kv_cache.
    """

    layers: tuple[LayerSpec, ...]
    kv_size: int
    type_k: DType = "f16"
    type_v: DType = "f16"
    v_trans: bool = False
    n_seq_max: int = 1
    unified: bool = False
    n_pad: int = 1
    n_swa: int = 0
    swa_type: SwaType = "none"
    rope: RopeSpec = RopeSpec()
    n_pos_per_embd: int = 1
    use_alibi: bool = False
    n_rel_attn_bkts: int = 0
    attn_rot: bool | None = None
    shift: Literal["upstream", "pure"] = "upstream"
    reuse: Mapping[int, int] = dataclasses.field(default_factory=dict)
    can_shift_reason: str | None = None
    forget: Forget = "reuse"

    @property
    def n_stream(self) -> int:
        return 1 if self.unified else self.n_seq_max

    @property
    def n_seq_ids(self) -> int:
        """Sequence ids accepted, and the width of a cell's sequence set."""
        return MAX_SEQ if self.unified else self.n_seq_max

    @property
    def n_embd_v_row(self) -> int:
        """Widest V row, elements: what every transposed V row is padded to.  Upstream: n_embd_v_gqa_max."""
        return max((layer.n_embd_v_gqa for layer in self.layers), default=0)
