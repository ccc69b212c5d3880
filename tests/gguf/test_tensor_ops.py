"""The table from weight names to ops."""

from __future__ import annotations

import pytest

from pyggmlkv.errors import GGUFTensorError
from pyggmlkv.gguf.tensor_ops import TensorName, TensorUse, split_name, tensor_use


@pytest.mark.parametrize(
    "name, parts",
    [
        ("token_embd.weight", TensorName(None, "token_embd", "weight")),
        ("blk.12.attn_q.bias", TensorName(12, "attn_q", "bias")),
        ("blk.0.nextn.eh_proj.weight", TensorName(0, "nextn.eh_proj", "weight")),
        ("dec.blk.3.cross_attn_o.weight", TensorName(3, "cross_attn_o", "weight")),
        ("posnet.2.attn_q.weight", TensorName(2, "posnet.attn_q", "weight")),
        ("blk.1.ssm_a", TensorName(1, "ssm_a", "")),
        ("cls.output.bias", TensorName(None, "cls.output", "bias")),
        ("blk.4.attn_q.input_scale", TensorName(4, "attn_q", "input_scale")),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_names_are_taken_apart(name, parts):
    assert split_name(name) == parts


@pytest.mark.parametrize(
    "name, role, layer, op",
    [
        ("token_embd.weight", None, "input", "get_rows"),
        ("token_embd.weight", "output", "output", "mul_mat"),
        ("output.weight", None, "output", "mul_mat"),
        ("output_norm.weight", None, "output", "mul"),
        ("token_embd_norm.weight", None, "repeating", "mul"),
        ("token_embd_norm.weight", "output_norm", "output", "mul"),
        ("rope_freqs.weight", None, "repeating", "rope"),
        ("blk.0.attn_q.weight", None, "repeating", "mul_mat"),
        ("blk.0.attn_q.bias", None, "repeating", "add"),
        ("blk.0.ffn_up_exps.weight", None, "repeating", "mul_mat_id"),
        ("blk.0.ffn_up_exps.bias", None, "repeating", "add_id"),
        ("blk.0.exp_probs_b.bias", None, "repeating", "add"),
        ("blk.0.attn_sinks.weight", None, "repeating", "scale"),
        ("blk.0.ssm_a", None, "repeating", "ssm_scan"),
        ("blk.0.ssm_a", "ssm_a_noscan", "repeating", "mul"),
        ("enc.blk.0.attn_rel_b.weight", None, "repeating", "get_rows"),
        ("dec.blk.0.cross_attn_rel_b.weight", None, "repeating", "none"),
    ],
)
def test_uses(name, role, layer, op):
    assert tensor_use(name, role) == TensorUse(layer, op)


def test_adapters_chosen_by_token_multiply_by_id():
    assert tensor_use("blk.0.attn_q.lora_a", routed_adapters=True).op == "mul_mat_id"
    assert tensor_use("blk.0.attn_q.lora_a").op == "mul_mat"


def test_unknown_names_are_refused():
    with pytest.raises(GGUFTensorError, match="'blk.0.magic.weight'"):
        tensor_use("blk.0.magic.weight")
