"""The hyperparameters of a model, grouped: frozen dataclasses of fields with llama.cpp's names and defaults.

Fields only; `hparams.HParams` is their sum and has the methods. Enums are their names in lower case.
Upstream: llama-hparams.h, llama_hparams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

SwaType: TypeAlias = Literal["none", "standard", "chunked", "symmetric"]
RopeType: TypeAlias = Literal["normal", "neox", "mrope", "imrope", "vision"]
ExpertGatingFunc: TypeAlias = str
PoolingType: TypeAlias = str

EXPERT_GATING_FUNCS: Final = ("none", "softmax", "sigmoid", "softmax_weight", "sqrt_softplus")
"""`llama_expert_gating_func_type` by number, for `KeyReader.choice`."""
POOLING_TYPES: Final = ("none", "mean", "cls", "last", "rank")
"""`llama_pooling_type` by number, for `KeyReader.choice`."""
ROPE_SCALING_TYPES: Final = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class SizeHParams:
    """The model's size: layers, widths, vocabulary."""

    arch: str
    n_ctx_train: int
    n_embd: int
    n_layer_all: int
    """Layers of the file, those for next-token prediction included; `n_layer` is without them."""
    n_vocab: int = 0
    n_token_types: int = 0
    n_layer_nextn: int = 0
    n_ff_arr: tuple[int, ...] = ()
    n_embd_inp_impl: int = 0
    n_embd_inp_enc_impl: int = 0
    n_embd_out_impl: int = 0
    n_embd_per_layer: int = 0
    n_cls_out: int = 1
    n_deepstack_layers: int = 0
    deepstack_mapping_arr: tuple[int, ...] = ()
    n_layer_dense_lead: int = 0
    n_altup: int = 4
    i_altup_act: int = 0
    laurel_rank: int = 64
    n_embd_altup: int = 256
    dense_2_feat_in: int = 0
    dense_2_feat_out: int = 0
    dense_3_feat_in: int = 0
    dense_3_feat_out: int = 0
    dec_start_token_id: int | None = None
    dec_n_layer: int = 0


@dataclass(frozen=True, kw_only=True)
class AttentionHParams:
    """Heads, windows, masks and what happens to scores."""

    n_head_arr: tuple[int, ...] = ()
    n_head_kv_arr: tuple[int, ...] = ()
    n_embd_head_k_full: int = 0
    n_embd_head_v_full: int = 0
    n_embd_head_k_swa: int = 0
    n_embd_head_v_swa: int = 0
    n_embd_head_k_mla_impl: int = 0
    n_embd_head_v_mla_impl: int = 0
    n_lora_q: int = 0
    n_lora_kv: int = 0
    n_rel_attn_bkts: int = 0
    n_layer_kv_from_start: int | None = None
    """Layers that have a KV cache, counted from the first; None: all."""
    router_layer: int | None = None
    swa_type: SwaType = "none"
    n_swa: int = 0
    """Positions of the sliding window; 0: none."""
    is_swa_impl: tuple[bool, ...] = ()
    causal_attn: bool = True
    use_alibi: bool = False
    attn_soft_cap: bool = False
    use_kq_norm: bool = False
    f_attn_logit_softcapping: float = 50.0
    f_max_alibi_bias: float = 0.0
    f_clamp_kqv: float = 0.0
    f_attention_scale: float = 0.0
    f_attn_out_scale: float = 0.0
    f_attn_value_scale: float = 0.0
    attn_temp_length: int = 0
    n_attn_temp_floor_scale: int = 0
    f_attn_temp_scale: float = 0.0
    f_attn_temp_offset: float = 0.0
    indexer_n_head: int = 0
    indexer_head_size: int = 0
    indexer_top_k: int = 0
    indexer_block_size: int = 0
    indexer_local_blocks: int = 0
    is_indexer_full_impl: tuple[bool, ...] = ()
    pooling_type: PoolingType | None = None
    """None: the file does not say."""


@dataclass(frozen=True, kw_only=True)
class RopeHParams:
    """Rotary positions, for full and for sliding-window layers."""

    rope_type: RopeType | None = None
    """ggml's name (llama.cpp says `norm` for `normal`); None: no RoPE. Each architecture sets it."""
    n_rot_full: int = 0
    n_rot_swa: int = 0
    rope_attn_factor: float = 1.0
    rope_freq_base_train: float = 10000.0
    rope_freq_base_train_swa: float = 10000.0
    rope_freq_scale_train: float = 1.0
    rope_freq_scale_train_swa: float = 1.0
    rope_scaling_alpha: float = 0.0
    rope_scaling_type_train: str = "linear"
    rope_finetuned: bool = False
    rope_sections: tuple[int, int, int, int] = (0, 0, 0, 0)
    rope_yarn_log_mul: float = 0.0
    n_ctx_orig_yarn: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    n_no_rope_layer_step: int = 4


@dataclass(frozen=True, kw_only=True)
class ScaleHParams:
    """Norms, and factors on embeddings, residuals and logits."""

    f_norm_eps: float = 0.0
    f_norm_rms_eps: float = 0.0
    f_norm_group_eps: float = 0.0
    n_norm_groups: int = 0
    f_final_logit_softcapping: float = 30.0
    f_logit_scale: float = 0.0
    f_residual_scale: float = 0.0
    f_embedding_scale: float = 0.0
    use_par_res: bool = False
    swin_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    llm_ffn_op: str = "none"
    xielu_alpha_n: tuple[float, ...] = ()
    xielu_alpha_p: tuple[float, ...] = ()
    xielu_beta: tuple[float, ...] = ()
    xielu_eps: tuple[float, ...] = ()
    swiglu_clamp_exp: tuple[float, ...] = ()
    swiglu_clamp_shexp: tuple[float, ...] = ()
    situ_beta: float = 1.0
    situ_linear_beta: float = 0.0
    attn_res_block_size: int = 0


@dataclass(frozen=True, kw_only=True)
class ExpertHParams:
    """Mixture of experts."""

    n_expert: int = 0
    n_expert_used: int = 0
    n_expert_shared: int = 0
    n_expert_groups: int = 0
    n_group_used: int = 0
    n_group_experts: int = 0
    n_expert_latent: int = 0
    n_ff_exp: int = 0
    n_ff_shexp: int = 0
    n_ff_chexp: int = 0
    expert_group_scale: float = 0.05
    expert_weights_scale: float = 0.0
    expert_weights_norm: bool = False
    expert_gating_func: ExpertGatingFunc = "none"
    moe_every_n_layers: int = 0
    moe_latent_size: int = 0
    n_moe_layer_step: int = 0
    f_router_logit_softcapping: float = 30.0


@dataclass(frozen=True, kw_only=True)
class RecurrentHParams:
    """State-space, RWKV, short-convolution and linear-attention layers."""

    is_recr_impl: tuple[bool, ...] = ()
    ssm_d_conv: int = 0
    ssm_d_inner: int = 0
    ssm_d_state: int = 0
    ssm_dt_rank: int = 0
    ssm_n_group: int = 0
    ssm_dt_b_c_rms: bool = False
    rescale_every_n_layers: int = 0
    time_mix_extra_dim: int = 0
    time_decay_extra_dim: int = 0
    wkv_head_size: int = 0
    token_shift_count: int = 2
    n_lora_decay: int = 0
    n_lora_iclr: int = 0
    n_lora_value_res_mix: int = 0
    n_lora_gate: int = 0
    n_shortconv_l_cache: int = 0
    n_embd_head_la: int = 0
    n_embd_head_kda: int = 0
    kda_gate_lower_bound: float = float("-inf")
