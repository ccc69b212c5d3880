"""`HParams`, the hyperparameters of one model, and `base_hparams`, which reads those that all of them share.

Knows no architecture: a model's own file reads the rest with its `KeyReader` and `dataclasses.replace`.
Differs: every GGML_ASSERT is a GGUFKeyError; fields of DeepSeek-V4, WavTokenizer and the speculative drafters
are left out until there is such a model. Upstream: llama-hparams.cpp; llama-model.cpp, load_hparams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypedDict

import numpy as np

from . import keys
from .hparams_parts import (
    POOLING_TYPES,
    ROPE_SCALING_TYPES,
    AttentionHParams,
    ExpertHParams,
    RecurrentHParams,
    RopeHParams,
    ScaleHParams,
    SizeHParams,
)
from .key_reader import KeyReader

MAX_LAYERS: Final = 512
MAX_EXPERTS: Final = 1024
RECURRENT_ARCHS: Final = ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
"""Architectures of which every layer is recurrent. Upstream: llm_arch_is_recurrent."""
ROLLBACK_ARCHS: Final = ("lfm2", "mamba2")
"""Architectures whose recurrent layers write rollback snapshots when asked; the others keep none.

Upstream: llm_arch_supports_rs_rollback. Differs: these two write them too.
"""
FULL_ROT_ARCHS: Final = ("llama", "deci", "falcon", "llama-embed")
"""Architectures whose heads are rotated whole: `n_rot` must equal the head's size."""


@dataclass(frozen=True, kw_only=True, repr=False)
class HParams(RecurrentHParams, ExpertHParams, ScaleHParams, RopeHParams, AttentionHParams, SizeHParams):
    """All hyperparameters under llama.cpp's names; a method that takes `il` answers for that layer."""

    def __repr__(self) -> str:
        return (
            f"<HParams {self.arch}: n_layer {self.n_layer}, n_embd {self.n_embd}, n_head {self.n_head()}, "
            f"n_head_kv {self.n_head_kv()}, n_vocab {self.n_vocab}, n_ctx_train {self.n_ctx_train}>"
        )

    @property
    def n_layer(self) -> int:
        """Layers that run: without those for next-token prediction."""
        return self.n_layer_all - self.n_layer_nextn

    def n_head(self, il: int = 0) -> int:
        return self.n_head_arr[il]

    def n_head_kv(self, il: int = 0) -> int:
        return self.n_head_kv_arr[il]

    def n_ff(self, il: int = 0) -> int:
        return self.n_ff_arr[il]

    def n_gqa(self, il: int = 0) -> int:
        """Query heads a KV head; 0 where the layer has no KV."""
        n_head_kv = self.n_head_kv(il)
        return self.n_head(il) // n_head_kv if n_head_kv else 0

    def n_rot(self, il: int = 0) -> int:
        return self.n_rot_swa if self.is_swa(il) else self.n_rot_full

    def n_embd_head_k(self, il: int = 0) -> int:
        return self.n_embd_head_k_swa if self.is_swa(il) else self.n_embd_head_k_full

    def n_embd_head_v(self, il: int = 0) -> int:
        return self.n_embd_head_v_swa if self.is_swa(il) else self.n_embd_head_v_full

    def n_embd_k_gqa(self, il: int = 0) -> int:
        """Elements of one cell's K over all KV heads."""
        return self.n_embd_head_k(il) * self.n_head_kv(il)

    def n_embd_v_gqa(self, il: int = 0) -> int:
        """Elements of one cell's V over all KV heads."""
        return self.n_embd_head_v(il) * self.n_head_kv(il)

    def n_embd_k_gqa_max(self) -> int:
        return max(self.n_embd_k_gqa(il) for il in range(self.n_layer_all))

    def n_embd_v_gqa_max(self) -> int:
        return max(self.n_embd_v_gqa(il) for il in range(self.n_layer_all))

    def is_n_embd_k_gqa_variable(self) -> bool:
        return any(self.n_embd_k_gqa(il) != self.n_embd_k_gqa() for il in range(self.n_layer_all))

    def is_n_embd_v_gqa_variable(self) -> bool:
        return any(self.n_embd_v_gqa(il) != self.n_embd_v_gqa() for il in range(self.n_layer_all))

    @property
    def is_mla(self) -> bool:
        return self.n_embd_head_k_mla_impl != 0 and self.n_embd_head_v_mla_impl != 0

    def n_embd_head_k_mla(self) -> int:
        return self.n_embd_head_k_mla_impl if self.is_mla else self.n_embd_head_k()

    def n_embd_head_v_mla(self) -> int:
        return self.n_embd_head_v_mla_impl if self.is_mla else self.n_embd_head_v()

    @property
    def n_embd_inp(self) -> int:
        """Width of the input embeddings, auxiliary ones included."""
        return self.n_embd_inp_impl or self.n_embd * (1 + self.n_deepstack_layers)

    @property
    def n_embd_inp_enc(self) -> int:
        return self.n_embd_inp_enc_impl or self.n_embd_inp

    @property
    def n_embd_out(self) -> int:
        return self.n_embd_out_impl or self.n_embd

    def n_embd_r(self) -> int:
        """Elements of one sequence's rolling state a layer: convolution window, or token shift."""
        if self.wkv_head_size:
            return self.token_shift_count * self.n_embd
        if self.n_shortconv_l_cache:
            return self.n_embd * (self.n_shortconv_l_cache - 1)
        if self.n_embd_head_kda:
            return 3 * (self.ssm_d_conv - 1 if self.ssm_d_conv else 3) * self.n_head() * self.n_embd_head_kda
        window = self.ssm_d_conv - 1 if self.ssm_d_conv else 0
        return window * (self.ssm_d_inner + 2 * self.ssm_n_group * self.ssm_d_state)

    def n_embd_s(self) -> int:
        """Elements of one sequence's recurrent state a layer."""
        if self.wkv_head_size:
            return self.n_embd * self.wkv_head_size
        if self.n_embd_head_kda:
            return self.n_embd_head_kda * self.n_embd_head_kda * self.n_head()
        if self.n_embd_head_la:
            return self.n_embd_head_la * self.n_embd_head_la * self.n_head()
        return self.ssm_d_state * self.ssm_d_inner

    def is_swa(self, il: int) -> bool:
        return self.is_swa_impl[il]

    def is_swa_any(self) -> bool:
        return any(self.is_swa_impl)

    def is_recr(self, il: int) -> bool:
        return self.is_recr_impl[il]

    def is_recurrent(self, il: int) -> bool:
        """The long name of `is_recr`."""
        return self.is_recr(il)

    def is_indexer_full(self, il: int) -> bool:
        return self.is_indexer_full_impl[il]

    def has_kv(self, il: int) -> bool:
        return self.n_layer_kv_from_start is None or il < self.n_layer_kv_from_start

    def has_rope(self, il: int) -> bool:
        return il != self.router_layer

    @property
    def n_pos_per_embd(self) -> int:
        """Positions an embedding needs: 4 with M-RoPE, else 1."""
        return 4 if self.rope_type in ("mrope", "imrope") else 1

    @property
    def use_mrope(self) -> bool:
        return self.rope_sections[0] > 0 and self.rope_sections[1] > 0

    @property
    def rope_scaling_type(self) -> str:
        """The short name of `rope_scaling_type_train`."""
        return self.rope_scaling_type_train

    def rope_freq_base(self, il: int, full: float | None = None) -> float:
        """The layer's RoPE base; `full` replaces the trained one of layers that are not sliding.

        Upstream: llama-model.cpp, get_rope_freq_base.
        """
        if self.is_swa(il):
            return self.rope_freq_base_train_swa
        return self.rope_freq_base_train if full is None else full

    def rope_freq_scale(self, il: int, full: float | None = None) -> float:
        """The layer's RoPE scale; see `rope_freq_base`."""
        if self.is_swa(il):
            return self.rope_freq_scale_train_swa
        return self.rope_freq_scale_train if full is None else full

    def with_swa_pattern(self, n_pattern: int, dense_first: bool = False) -> HParams:
        """Every `n_pattern`-th layer is dense, the rest sliding; 0: all sliding, 1: all dense.

        Upstream: llama-hparams.cpp, set_swa_pattern.
        """
        return replace(self, is_swa_impl=self._pattern(n_pattern, dense_first))

    def with_recr_pattern(self, n_pattern: int, dense_first: bool = False) -> HParams:
        """Every `n_pattern`-th layer is attention, the rest recurrent. Upstream: set_recr_pattern."""
        return replace(self, is_recr_impl=self._pattern(n_pattern, dense_first))

    def _pattern(self, n: int, dense_first: bool) -> tuple[bool, ...]:
        def chosen(il: int) -> bool:
            return n == 0 or (il % n != 0 if dense_first else il % n < n - 1)

        return tuple(il < self.n_layer and chosen(il) for il in range(self.n_layer_all))


class _HeadSizes(TypedDict):
    n_head_arr: tuple[int, ...]
    n_head_kv_arr: tuple[int, ...]
    n_embd_head_k_full: int
    n_embd_head_v_full: int
    n_embd_head_k_swa: int
    n_embd_head_v_swa: int
    n_rot_full: int
    n_rot_swa: int


class _Rope(TypedDict):
    n_ctx_orig_yarn: int
    rope_finetuned: bool
    rope_freq_base_train: float
    rope_freq_scale_train: float
    rope_scaling_type_train: str
    rope_attn_factor: float
    rope_scaling_alpha: float


class _Experts(TypedDict):
    n_expert: int
    n_expert_used: int
    n_expert_groups: int
    n_group_used: int


def base_hparams(kr: KeyReader) -> HParams:
    """The hyperparameters that every architecture reads the same way.

    Raises: GGUFKeyError for a missing key, a wrong type or length, or values that contradict each other.
    Upstream: llama-model.cpp, llama_model_base::load_hparams.
    """
    n_layer = kr.u32(keys.BLOCK_COUNT)
    if not 0 < n_layer <= MAX_LAYERS:
        kr.refuse(keys.BLOCK_COUNT, f"1 to {MAX_LAYERS} layers", str(n_layer))
    n_ctx_train = kr.u32(keys.CONTEXT_LENGTH)
    n_embd = kr.u32(keys.EMBEDDING_LENGTH)
    zeros = (0.0,) * n_layer
    return HParams(
        arch=kr.arch,
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_layer_all=n_layer,
        n_vocab=kr.n_vocab(),
        n_token_types=kr.u32(keys.TOKENIZER_TOKEN_TYPE_COUNT, 0),
        n_embd_out_impl=kr.u32(keys.EMBEDDING_LENGTH_OUT, 0),
        n_ff_arr=kr.u32_per_layer(keys.FEED_FORWARD_LENGTH, n_layer, (0,) * n_layer),
        n_cls_out=kr.arr_n(keys.CLASSIFIER_OUTPUT_LABELS, 0) or 1,
        deepstack_mapping_arr=(-1,) * n_layer,
        causal_attn=kr.bool(keys.ATTENTION_CAUSAL, True),
        pooling_type=kr.choice(keys.POOLING_TYPE, POOLING_TYPES, None),
        is_swa_impl=(False,) * n_layer,
        is_recr_impl=(kr.arch in RECURRENT_ARCHS,) * n_layer,
        is_indexer_full_impl=(False,) * n_layer,
        xielu_alpha_n=zeros,
        xielu_alpha_p=zeros,
        xielu_beta=zeros,
        xielu_eps=zeros,
        swiglu_clamp_exp=zeros,
        swiglu_clamp_shexp=zeros,
        **_experts(kr),
        **_rope(kr, n_ctx_train),
        **_head_sizes(kr, n_layer, n_embd),
    )


def _experts(kr: KeyReader) -> _Experts:
    n_expert = kr.u32(keys.EXPERT_COUNT, 0)
    n_used = kr.u32(keys.EXPERT_USED_COUNT, 0)
    n_groups = kr.u32(keys.EXPERT_GROUP_COUNT, 0)
    n_group_used = kr.u32(keys.EXPERT_GROUP_USED_COUNT, 0)
    if kr.arch in ("hunyuan_vl", "hunyuan-dense") and n_expert <= 1:
        n_expert = n_used = 0
    if n_expert > MAX_EXPERTS:
        kr.refuse(keys.EXPERT_COUNT, f"at most {MAX_EXPERTS} experts", str(n_expert))
    if n_used > n_expert or (n_expert > 0 and n_used == 0):
        kr.refuse(keys.EXPERT_USED_COUNT, f"1 to {n_expert} of {n_expert} experts", str(n_used))
    if n_groups > 0 and n_groups >= n_expert:
        kr.refuse(keys.EXPERT_GROUP_COUNT, f"fewer groups than the {n_expert} experts", str(n_groups))
    if n_groups > 1 and n_expert % n_groups:
        kr.refuse(keys.EXPERT_GROUP_COUNT, f"a divisor of the {n_expert} experts", str(n_groups))
    if n_groups > 1 and not 0 < n_group_used < n_groups:
        kr.refuse(
            keys.EXPERT_GROUP_USED_COUNT, f"1 to {n_groups - 1} of {n_groups} groups", str(n_group_used)
        )
    return {
        "n_expert": n_expert,
        "n_expert_used": n_used,
        "n_expert_groups": n_groups,
        "n_group_used": n_group_used,
    }


def _rope(kr: KeyReader, n_ctx_train: int) -> _Rope:
    scaling = kr.str(keys.ROPE_SCALING_TYPE, "linear")
    if scaling not in ROPE_SCALING_TYPES:
        kr.refuse(keys.ROPE_SCALING_TYPE, f"one of {', '.join(ROPE_SCALING_TYPES)}", repr(scaling))
    factor = kr.f32(keys.ROPE_SCALING_FACTOR, None)
    if factor is None:
        factor = kr.f32(keys.ROPE_SCALE_LINEAR, 0.0)
    return {
        "n_ctx_orig_yarn": kr.u32(keys.ROPE_SCALING_ORIG_CTX_LEN, n_ctx_train),
        "rope_finetuned": kr.bool(keys.ROPE_SCALING_FINETUNED, False),
        "rope_freq_base_train": kr.f32(keys.ROPE_FREQ_BASE, 10000.0),
        "rope_freq_scale_train": 1.0 if factor == 0.0 else float(np.float32(1.0) / np.float32(factor)),
        "rope_scaling_type_train": scaling,
        "rope_attn_factor": kr.f32(keys.ROPE_SCALING_ATTN_FACTOR, 1.0),
        "rope_scaling_alpha": kr.f32(keys.ROPE_SCALING_ALPHA, 0.0),
    }


def _head_sizes(kr: KeyReader, n_layer: int, n_embd: int) -> _HeadSizes:
    n_head = kr.u32_per_layer(keys.ATTENTION_HEAD_COUNT, n_layer, (0,) * n_layer)
    head_k = head_v = n_rot = 0
    if n_head[0] > 0:
        head_k = kr.u32(keys.ATTENTION_KEY_LENGTH, n_embd // n_head[0])
        head_v = kr.u32(keys.ATTENTION_VALUE_LENGTH, n_embd // n_head[0])
        n_rot = kr.u32(keys.ROPE_DIMENSION_COUNT, head_k)
        if kr.arch in FULL_ROT_ARCHS and n_rot != head_k:
            kr.refuse(keys.ROPE_DIMENSION_COUNT, f"{head_k}, the size of a head", str(n_rot))
    return {
        "n_head_arr": n_head,
        "n_head_kv_arr": kr.u32_per_layer(keys.ATTENTION_HEAD_COUNT_KV, n_layer, n_head),
        "n_embd_head_k_full": head_k,
        "n_embd_head_v_full": head_v,
        "n_embd_head_k_swa": kr.u32(keys.ATTENTION_KEY_LENGTH_SWA, head_k),
        "n_embd_head_v_swa": kr.u32(keys.ATTENTION_VALUE_LENGTH_SWA, head_v),
        "n_rot_full": n_rot,
        "n_rot_swa": kr.u32(keys.ROPE_DIMENSION_COUNT_SWA, n_rot),
    }
