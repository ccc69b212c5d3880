"""What tiny random models look like: a row of metadata a recipe, and the optional tensors it goes without.

Small dimensions, but no two alike where mixing them up should show; windows of 8 tokens, RoPE factors, sinks,
soft caps and biases are all there. Knows nothing of how a file is written.
Upstream: tests/test-llama-archs.cpp; src/models/*.cpp, load_arch_hparams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

Value = int | float | bool | str | list[int] | list[float] | list[bool]

N_VOCAB = 128
NO_BIAS = r"\.bias$"
NO_ROPE_FREQS = r"^rope_freqs"
TIED = r"^output\.weight$"
NEVER = (r"scale$", r"^cls", r"^dense_")

BASE: Mapping[str, Value] = {
    "vocab_size": N_VOCAB,
    "context_length": 512,
    "embedding_length": 256,
    "block_count": 2,
    "feed_forward_length": 320,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.dimension_count": 64,
    "rope.freq_base": 10000.0,
}
YARN: Mapping[str, Value] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}
MOE: Mapping[str, Value] = {"expert_count": 4, "expert_used_count": 2}
DEEPSEEK2: Mapping[str, Value] = {
    **MOE,
    **YARN,
    "rope.scaling.yarn_log_multiplier": 0.0707,
    "block_count": 3,
    "leading_dense_block_count": 1,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 96,
    "attention.kv_lora_rank": 96,
    "attention.key_length": 128,
    "attention.value_length": 96,
    "attention.key_length_mla": 96,
    "attention.value_length_mla": 64,
    "rope.dimension_count": 32,
    "expert_feed_forward_length": 96,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
T5: Mapping[str, Value] = {
    "attention.head_count_kv": 4,
    "attention.relative_buckets_count": 8,
    "block_count": 3,
    "decoder_block_count": 2,
    "decoder_start_token_id": 0,
}
JAMBA: Mapping[str, Value] = {
    "block_count": 4,
    "attention.head_count_kv": [0, 2, 0, 2],
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 512,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 24,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """An architecture, metadata beyond (or instead of) the base's, and patterns of tensors to leave out.

    without: keys of the base that this architecture must not have. fused_qkv: one attn_qkv instead of three.
    split_experts: ffn_gate_exps and ffn_up_exps instead of the fused ffn_gate_up_exps.
    """

    arch: str
    keys: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    drop: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    fused_qkv: bool = False
    split_experts: bool = False


NO_ATTENTION = tuple(
    key for key in BASE if key.startswith(("attention.head", "attention.key", "attention.value"))
)
NO_ROPE = ("rope.dimension_count", "rope.freq_base")

ENCODE_ONLY = ("t5encoder",)
"""Architectures that decode nothing."""
RECIPES: Mapping[str, Recipe] = {
    "llama": Recipe("llama", drop=(NO_BIAS, NO_ROPE_FREQS)),
    "llama-tied": Recipe("llama", drop=(NO_BIAS, NO_ROPE_FREQS, TIED)),
    "llama-bias": Recipe("llama"),
    "llama-yarn": Recipe("llama", YARN, drop=(NO_BIAS, NO_ROPE_FREQS)),
    "llama-linear": Recipe(
        "llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, drop=(NO_BIAS, NO_ROPE_FREQS)
    ),
    "llama-moe": Recipe("llama", MOE, drop=(NO_BIAS, NO_ROPE_FREQS)),
    "qwen3": Recipe("qwen3", drop=(NO_BIAS,)),
    "phi3": Recipe(
        "phi3",
        {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.19},
        drop=(NO_BIAS,),
        fused_qkv=True,
    ),
    "gemma2": Recipe(
        "gemma2",
        {
            "block_count": 4,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        drop=(NO_BIAS,),
    ),
    "gemma3": Recipe(
        "gemma3",
        {
            "block_count": 4,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 1000000.0,
            "rope.freq_base_swa": 10000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        drop=(NO_BIAS, TIED),
    ),
    "gpt-oss": Recipe(
        "gpt-oss",
        {**MOE, **YARN, "block_count": 4, "expert_feed_forward_length": 96, "attention.sliding_window": 8},
    ),
    "llama4": Recipe(
        "llama4",
        {
            "block_count": 4,
            "context_length": 16384,
            "expert_count": 4,
            "expert_used_count": 1,
            "expert_feed_forward_length": 96,
            "interleave_moe_layer_step": 2,
        },
        drop=(NO_BIAS, NO_ROPE_FREQS),
    ),
    "bloom": Recipe("bloom", {"attention.head_count_kv": 4}, drop=(TIED,), without=NO_ROPE),
    "deepseek2": Recipe(
        "deepseek2",
        DEEPSEEK2,
        drop=(r"(attn|ffn)_.*\.bias$", r"attn_kv_b"),
        split_experts=True,
    ),
    "deepseek2-heads": Recipe(
        "deepseek2",
        {
            **DEEPSEEK2,
            "attention.head_count_kv": 4,
            "attention.key_length": 96,
            "attention.value_length": 64,
            "attention.key_length_mla": 0,
            "attention.value_length_mla": 0,
        },
        drop=(r"(attn|ffn)_.*\.bias$",),
        split_experts=True,
    ),
    "qwen2vl": Recipe("qwen2vl", {"rope.dimension_sections": [16, 8, 8, 0]}, drop=(r"output\.bias",)),
    "t5encoder": Recipe(
        "t5encoder",
        {"attention.head_count_kv": 4, "attention.relative_buckets_count": 8, "block_count": 3},
        drop=(r"blk\.[1-9]\.attn_rel_b",),
        without=NO_ROPE,
    ),
    "t5": Recipe("t5", T5, drop=(r"blk\.[1-9]\.attn_rel_b",), without=NO_ROPE),
    "t5-biases": Recipe("t5", T5, without=NO_ROPE),
    "mamba": Recipe(
        "mamba",
        {"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 16, "ssm.time_step_rank": 24},
        without=(*NO_ATTENTION, *NO_ROPE),
    ),
    "mamba2": Recipe(
        "mamba2",
        {
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 512,
            "ssm.state_size": 32,
            "ssm.time_step_rank": 8,
            "ssm.group_count": 2,
        },
        without=(*NO_ATTENTION, *NO_ROPE),
    ),
    "jamba": Recipe("jamba", JAMBA, drop=(r"attn_.*\.bias$",), without=NO_ROPE),
    "jamba-moe": Recipe("jamba", {**JAMBA, **MOE}, drop=(r"attn_.*\.bias$",), without=NO_ROPE),
    "lfm2": Recipe(
        "lfm2",
        {"block_count": 4, "attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3},
        drop=(NO_BIAS,),
    ),
}
