"""Which op a weight feeds, and whether it belongs to the input, a layer or the output: by its name.

The op decides which buffer types may hold the weight. Knows names only.
Upstream: llama-arch.cpp, LLM_TENSOR_INFOS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from pyggmlkv.errors import GGUFTensorError

LayerKind: TypeAlias = Literal["input", "repeating", "output"]


@dataclass(frozen=True, slots=True)
class TensorUse:
    """`op` is ggml's name in lower case, `none` for a weight that is never used."""

    layer: LayerKind
    op: str


_INPUT: Final[Mapping[str, str]] = {
    "get_rows": "token_embd position_embd token_types per_layer_token_embd",
    "none": "masked_embd_centroids masked_embd_ordering",
}
_OUTPUT: Final[Mapping[str, str]] = {
    "mul_mat": """
        output cls cls.output output_hc_fn altup_unembd_proj altup_proj dense_2 dense_3 nextn.post_projection
        fc markov_w2 conf_proj""",
    "mul": "output_norm cls.norm enc.output_norm dec.output_norm output_res_score output_hc_scale",
    "add": "output_hc_base",
    "get_rows": "d2t markov_w1",
}
_REPEATING: Final[Mapping[str, str]] = {
    "mul_mat": """
        attn_q attn_k attn_v attn_qkv attn_output attn_gate ffn_gate ffn_down ffn_up ffn_gate_inp
        ffn_gate_shexp ffn_up_shexp ffn_down_shexp ffn_gate_inp_shexp ffn_latent_down ffn_latent_up
        ffn_routed_down ffn_routed_up attn_q_a attn_q_b attn_kv attn_kv_a_mqa attn_kv_b attn_k_b attn_v_b
        attn_output_a attn_output_b hc_attn_fn hc_ffn_fn attn_compressor_kv attn_compressor_gate
        attn_o cross_attn_q cross_attn_k cross_attn_v cross_attn_o
        ssm_dt ssm_ba ssm_alpha ssm_in ssm_out ssm_x ssm_f_a ssm_f_b ssm_beta ssm_g_a ssm_g_b ssm_g
        time_mix_w1 time_mix_w2 time_mix_a1 time_mix_a2 time_mix_v1 time_mix_v2 time_mix_g1 time_mix_g2
        time_mix_decay_w1 time_mix_decay_w2 time_mix_key time_mix_value time_mix_receptance time_mix_gate
        time_mix_output channel_mix_key channel_mix_value channel_mix_receptance
        per_layer_model_proj inp_gate proj altup_correct_coef altup_predict_coef altup_router
        laurel_l laurel_r nextn.pre_projection nextn.eh_proj nextn.shared_head_head convnext.pw1 convnext.pw2
        posnet.attn_q posnet.attn_k posnet.attn_v posnet.attn_output shortconv.in_proj shortconv.out_proj
        vis_attn_qkv vis_attn_output vis_gate vis_down vis_up indexer.proj indexer.attn_k indexer.attn_q_b
        indexer.q_proj indexer.k_proj indexer_compressor_kv indexer_compressor_gate""",
    "mul_mat_id": """
        ffn_down_exps ffn_gate_exps ffn_up_exps ffn_gate_up_exps ffn_down_chexps ffn_gate_chexps
        ffn_up_chexps""",
    "mul": """
        attn_norm attn_norm_2 attn_q_norm attn_k_norm attn_output_norm attn_sub_norm attn_q_a_norm
        attn_kv_a_norm post_attention_norm ffn_norm ffn_norm_exps ffn_sub_norm post_ffw_norm post_ffw_norm_1
        post_ffw_norm_2 pre_ffw_norm_2 layer_output_norm layer_output_scale token_embd_norm ffn_routed_norm
        attn_res_score ffn_res_score hc_attn_scale hc_ffn_scale attn_compressor_norm cross_attn_norm
        ssm_norm ssm_d ssm_dt_norm ssm_b_norm ssm_c_norm ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v
        per_layer_proj_norm post_norm altup_correct_scale altup_router_norm laurel_post_norm
        nextn.enorm nextn.hnorm nextn.shared_head_norm time_mix_lerp_x time_mix_ln time_mix_k_k time_mix_k_a
        time_mix_r_k channel_mix_lerp_k channel_mix_lerp_r convnext.norm convnext.gamma posnet.norm
        posnet.norm1 posnet.norm2 posnet.attn_norm indexer.k_norm indexer.q_norm indexer_compressor_norm""",
    "add": """
        exp_probs_b hc_attn_base hc_ffn_base time_mix_lerp_w time_mix_lerp_k time_mix_lerp_v time_mix_lerp_r
        time_mix_lerp_g time_mix_lerp_fused time_mix_decay time_mix_w0 time_mix_a0 time_mix_v0""",
    "get_rows": """
        attn_rel_b attn_compressor_ape nextn.embed_tokens indexer_compressor_ape ffn_gate_tid2eid""",
    "div": "ffn.act",
    "scale": "attn_sinks",
    "rope": "rope_freqs rope_factors_long rope_factors_short",
    "ssm_conv": "ssm_conv1d shortconv.conv",
    "ssm_scan": "ssm_a",
    "rwkv_wkv6": "time_mix_first",
    "im2col": "conv1d convnext.dw posnet.conv1 posnet.conv2",
    "none": "cross_attn_rel_b",
}


def _table() -> Mapping[str, TensorUse]:
    kinds: tuple[tuple[LayerKind, Mapping[str, str]], ...] = (
        ("input", _INPUT),
        ("output", _OUTPUT),
        ("repeating", _REPEATING),
    )
    return MappingProxyType(
        {
            stem: TensorUse(layer, op)
            for layer, by_op in kinds
            for op, stems in by_op.items()
            for stem in stems.split()
        }
    )


TENSOR_USES: Final = _table()
ROLES: Final[Mapping[str, TensorUse]] = MappingProxyType(
    {
        "output": TensorUse("output", "mul_mat"),  # token_embd used once more as the output matrix
        "output_norm": TensorUse("output", "mul"),  # token_embd_norm in LFM2 files
        "ssm_a_noscan": TensorUse("repeating", "mul"),  # ssm_a where it only multiplies
    }
)
"""Uses that a name alone does not tell; the architecture names them."""

_PREFIX: Final = re.compile(r"^(?:(?:dec|enc)\.)?blk\.(\d+)\.|^(?:convnext|posnet)\.(\d+)(?=\.)")
_SUFFIXES: Final = ("weight", "bias", "scale", "input_scale", "lora_a", "lora_b")


@dataclass(frozen=True, slots=True)
class TensorName:
    """A weight's name taken apart: `blk.3.attn_q.bias` is layer 3, stem `attn_q`, suffix `bias`."""

    il: int | None
    stem: str
    suffix: str


def split_name(name: str) -> TensorName:
    """Layer number, stem and suffix of a weight's name."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in _SUFFIXES:
        stem, suffix = name, ""
    match = _PREFIX.match(stem)
    if match is None:
        return TensorName(None, stem, suffix)
    if match[1] is not None:
        return TensorName(int(match[1]), stem[match.end() :], suffix)
    return TensorName(int(match[2]), stem.split(".")[0] + stem[match.end() :], suffix)


def tensor_use(name: str, role: str | None = None, routed_adapters: bool = False) -> TensorUse:
    """What a weight is used for; `role` (a key of `ROLES`) overrides the name.

    A bias is added, whatever the weight beside it does; `routed_adapters` is for models that choose a LoRA
    adapter per token. Upstream: llama-model-loader.cpp, create_tensor.
    Raises: GGUFTensorError for a name that is in no table.
    """
    parts = split_name(name)
    use = TENSOR_USES.get(parts.stem) if role is None else ROLES[role]
    if use is None:
        raise GGUFTensorError(f"tensor '{name}': no architecture knows a weight of this name", tensor=name)
    if use.op == "none":
        return use
    if parts.suffix == "bias":
        return TensorUse(use.layer, "add_id" if use.op == "mul_mat_id" else "add")
    if routed_adapters and parts.suffix in ("lora_a", "lora_b"):
        return TensorUse(use.layer, "mul_mat_id")
    return use
