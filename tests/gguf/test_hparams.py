"""Hyperparameters: what is read and defaulted, every per-layer form, what is refused. (Case 34.)"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyggmlkv.errors import GGUFKeyError
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams, base_hparams
from pyggmlkv.gguf.key_reader import KeyReader

MINIMAL = {
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.block_count": 4,
    "llama.attention.head_count": 8,
    "llama.feed_forward_length": 96,
    "llama.vocab_size": 100,
}


def read(arch: str = "llama", drop: str = "", **changes: object) -> HParams:
    """Base hyperparameters of MINIMAL with changes; `__` in a name stands for a dot."""
    metadata = {k.replace("llama.", f"{arch}."): v for k, v in MINIMAL.items() if k != drop}
    for key, v in changes.items():
        name = key.replace("__", ".")
        metadata[name if name.startswith("tokenizer") else f"{arch}.{name}"] = v
    return base_hparams(KeyReader(arch, metadata))


def test_what_the_file_does_not_say_has_upstreams_default():
    hp = read()
    assert (hp.n_ctx_train, hp.n_embd, hp.n_layer, hp.n_layer_all, hp.n_vocab) == (128, 64, 4, 4, 100)
    assert hp.n_head_kv_arr == hp.n_head_arr == (8,) * 4
    assert (hp.n_embd_head_k(), hp.n_embd_head_v(), hp.n_rot()) == (8, 8, 8)
    assert (hp.rope_freq_base_train, hp.rope_freq_scale_train, hp.n_ctx_orig_yarn) == (10000.0, 1.0, 128)
    assert (hp.rope_scaling_type_train, hp.causal_attn, hp.pooling_type) == ("linear", True, None)
    assert not hp.is_swa_any()
    assert not any(hp.is_recr(il) for il in range(4))
    assert hp.n_embd_out == hp.n_embd_inp == 64


@pytest.mark.parametrize("key", ["context_length", "embedding_length", "block_count"])
def test_a_missing_required_key_is_named_in_full(key):
    with pytest.raises(GGUFKeyError, match=f"'llama.{key}' is missing") as e:
        read(drop=f"llama.{key}")
    assert e.value.facts["key"] == f"llama.{key}"


PER_LAYER = {
    "attention__head_count": lambda hp: hp.n_head_arr,
    "attention__head_count_kv": lambda hp: hp.n_head_kv_arr,
    "feed_forward_length": lambda hp: hp.n_ff_arr,
}


@pytest.mark.parametrize("key", PER_LAYER)
def test_a_per_layer_key_may_be_a_number(key):
    assert PER_LAYER[key](read(**{key: 4})) == (4,) * 4


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.uint8, np.int64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("key", PER_LAYER)
def test_a_per_layer_key_may_be_an_array(key, dtype):
    assert PER_LAYER[key](read(**{key: np.array([8, 4, 2, 1], dtype)})) == (8, 4, 2, 1)


@pytest.mark.parametrize("n", [0, 1, 3, 5])
@pytest.mark.parametrize("key", PER_LAYER)
def test_a_per_layer_array_of_another_length_is_refused(key, n):
    with pytest.raises(GGUFKeyError, match=f"an array of 4 integers, found an array of {n} uint32"):
        read(**{key: np.ones(n, np.uint32)})


@pytest.mark.parametrize(
    "value, found",
    [
        (-1, r"an integer \(-1\)"),
        (2**32, "an integer"),
        (True, "a bool"),
        (1.0, "a float"),
        ("8", "a string"),
        (["8"] * 4, "an array of 4 strings"),
        (np.ones(4, np.float32), "an array of 4 float32"),
        (np.array([1, -1, 1, 1], np.int32), "-1"),
    ],
    ids=["negative", "33 bits", "bool", "float", "string", "strings", "floats", "negative in array"],
)
def test_a_per_layer_key_of_another_type_is_refused(value, found):
    with pytest.raises(GGUFKeyError, match=found) as e:
        read(attention__head_count=value)
    assert e.value.facts["key"] == "llama.attention.head_count"


def test_layers_may_differ_in_kv_width():
    hp = read(attention__head_count=np.array([8, 8, 8, 8]), attention__head_count_kv=np.array([8, 4, 0, 1]))
    assert [hp.n_embd_k_gqa(il) for il in range(4)] == [64, 32, 0, 8]
    assert [hp.n_gqa(il) for il in range(4)] == [1, 2, 0, 8]
    assert hp.is_n_embd_k_gqa_variable()
    assert (hp.n_embd_k_gqa_max(), hp.n_embd_v_gqa_max()) == (64, 64)


def test_key_and_value_lengths_override_the_even_split():
    hp = read("gemma3", attention__key_length=16, attention__value_length=4, rope__dimension_count=6)
    assert (hp.n_embd_head_k(), hp.n_embd_head_v(), hp.n_rot(), hp.n_embd_v_gqa()) == (16, 4, 6, 32)


def test_sliding_layers_have_their_own_head_size_rotation_and_base():
    hp = read("gemma3", attention__key_length=16, attention__key_length_swa=8, rope__dimension_count_swa=2)
    hp = replace(hp, rope_freq_base_train=1e6, rope_freq_base_train_swa=1e4, rope_freq_scale_train=0.125)
    hp = hp.with_swa_pattern(2)
    assert [hp.is_swa(il) for il in range(4)] == [True, False, True, False]
    assert [hp.n_embd_head_k(il) for il in range(2)] == [8, 16]
    assert [hp.n_rot(il) for il in range(2)] == [2, 16]
    assert [hp.rope_freq_base(il) for il in range(2)] == [1e4, 1e6]
    assert [hp.rope_freq_base(il, full=5.0) for il in range(2)] == [1e4, 5.0]
    assert [hp.rope_freq_scale(il) for il in range(2)] == [1.0, 0.125]


@pytest.mark.parametrize(
    "n, dense_first, expected",
    [
        (0, False, "SSSS"),
        (1, False, "...."),
        (2, False, "S.S."),
        (3, False, "SS.S"),
        (2, True, ".S.S"),
        (3, True, ".SS."),
        (6, False, "SSSS"),
    ],
)
def test_patterns_of_sliding_and_recurrent_layers(n, dense_first, expected):
    hp = read()
    marks = tuple(c == "S" for c in expected)
    assert hp.with_swa_pattern(n, dense_first).is_swa_impl == marks
    assert hp.with_recr_pattern(n, dense_first).is_recr_impl == marks


def test_layers_for_next_token_prediction_are_not_counted_and_never_slide():
    hp = replace(read(), n_layer_nextn=1).with_swa_pattern(0)
    assert (hp.n_layer, hp.n_layer_all) == (3, 4)
    assert hp.is_swa_impl == (True, True, True, False)


@pytest.mark.parametrize(
    "arch, recurrent", [("mamba", True), ("rwkv7", True), ("llama", False), ("jamba", False)]
)
def test_purely_recurrent_architectures_have_only_recurrent_layers(arch, recurrent):
    hp = read(arch)
    assert hp.is_recr_impl == (recurrent,) * 4
    assert hp.is_recurrent(0) == recurrent


def test_a_model_without_heads_has_no_head_sizes():
    hp = read("mamba", attention__head_count=0)
    assert (hp.n_head(), hp.n_embd_head_k(), hp.n_rot(), hp.n_gqa()) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "changes, n_embd_r, n_embd_s",
    [
        ({"ssm_d_conv": 4, "ssm_d_inner": 32, "ssm_d_state": 16}, 3 * 32, 16 * 32),
        ({"ssm_d_conv": 4, "ssm_d_inner": 32, "ssm_d_state": 16, "ssm_n_group": 2}, 3 * (32 + 64), 16 * 32),
        ({"wkv_head_size": 16, "token_shift_count": 1}, 64, 64 * 16),
        ({"wkv_head_size": 16}, 2 * 64, 64 * 16),
        ({"n_shortconv_l_cache": 3}, 2 * 64, 0),
        ({"n_embd_head_kda": 8, "ssm_d_conv": 4}, 3 * 3 * 8 * 8, 8 * 8 * 8),
        ({"n_embd_head_la": 8}, 0, 8 * 8 * 8),
    ],
    ids=["mamba", "mamba2", "rwkv7", "rwkv6", "lfm2", "kda", "minimax"],
)
def test_recurrent_state_sizes(changes, n_embd_r, n_embd_s):
    hp = replace(read(), **changes)
    assert (hp.n_embd_r(), hp.n_embd_s()) == (n_embd_r, n_embd_s)


def test_mla_head_sizes():
    hp = read()
    assert (hp.is_mla, hp.n_embd_head_k_mla(), hp.n_embd_head_v_mla()) == (False, 8, 8)
    hp = replace(hp, n_embd_head_k_mla_impl=24, n_embd_head_v_mla_impl=16)
    assert (hp.is_mla, hp.n_embd_head_k_mla(), hp.n_embd_head_v_mla()) == (True, 24, 16)


def test_which_layers_have_kv_and_rope():
    hp = replace(read(), n_layer_kv_from_start=2, router_layer=3)
    assert [hp.has_kv(il) for il in range(4)] == [True, True, False, False]
    assert [hp.has_rope(il) for il in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("kind, n", [(None, 1), ("normal", 1), ("neox", 1), ("mrope", 4), ("imrope", 4)])
def test_positions_an_embedding_needs(kind, n):
    assert replace(read(), rope_type=kind).n_pos_per_embd == n


@pytest.mark.parametrize("key", ["rope__scaling__factor", "rope__scale_linear"])
def test_the_rope_scale_is_the_inverse_in_single_precision(key):
    hp = read(**{key: float(np.float32(3.0))})
    assert hp.rope_freq_scale_train == float(np.float32(1) / np.float32(3))


def test_yarn_keys():
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 0.5}
    hp = read(rope__freq_base=5e5, **{f"rope__scaling__{key}": value for key, value in keys.items()})
    assert (hp.rope_scaling_type, hp.rope_freq_scale_train, hp.n_ctx_orig_yarn) == ("yarn", 0.25, 32)
    assert (hp.rope_attn_factor, hp.rope_freq_base_train) == (0.5, 5e5)


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"block_count": 0}, "llama.block_count"),
        ({"block_count": 513}, "llama.block_count"),
        ({"expert_count": 2000, "expert_used_count": 1}, "llama.expert_count"),
        ({"expert_count": 4, "expert_used_count": 5}, "llama.expert_used_count"),
        ({"expert_count": 4}, "llama.expert_used_count"),
        ({"expert_used_count": 1}, "llama.expert_used_count"),
        ({"expert_count": 4, "expert_used_count": 2, "expert_group_count": 4}, "llama.expert_group_count"),
        ({"expert_count": 8, "expert_used_count": 2, "expert_group_count": 3}, "llama.expert_group_count"),
        (
            {"expert_count": 8, "expert_used_count": 2, "expert_group_count": 4},
            "llama.expert_group_used_count",
        ),
        ({"rope__scaling__type": "magic"}, "llama.rope.scaling.type"),
        ({"rope__dimension_count": 4}, "llama.rope.dimension_count"),
        ({"pooling_type": 9}, "llama.pooling_type"),
        ({"rope__freq_base": 10000}, "llama.rope.freq_base"),
        ({"attention__causal": 1}, "llama.attention.causal"),
        ({"context_length": "long"}, "llama.context_length"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_values_upstream_would_abort_on_are_refused_by_key(changes, key):
    with pytest.raises(GGUFKeyError) as e:
        read(**changes)
    assert e.value.facts["key"] == key
    assert key in str(e.value)


def test_the_vocabulary_is_counted_from_its_tokens():
    assert read(tokenizer__ggml__model="gpt2", tokenizer__ggml__tokens=["a", "b"]).n_vocab == 2
    assert read(tokenizer__ggml__model="none").n_vocab == 100
    with pytest.raises(GGUFKeyError, match="tokenizer.ggml.tokens"):
        read(tokenizer__ggml__model="gpt2")


def test_optional_getters_return_the_default_and_required_ones_raise():
    kr = KeyReader("llama", {"llama.n": 5, "llama.b": True, "llama.s": "x", "llama.f": 0.5, "llama.l": ["a"]})
    assert kr.u32("{arch}.n") == 5
    assert kr.u32("{arch}.missing", 3) == 3
    assert kr.u32("{arch}.missing", None) is None
    assert (kr.bool("{arch}.b"), kr.str("{arch}.s"), kr.f32("{arch}.f"), kr.strings("{arch}.l")) == (
        True,
        "x",
        0.5,
        ["a"],
    )
    assert kr.arr_n("{arch}.l") == 1
    for get in (kr.u32, kr.i32, kr.f32, kr.bool, kr.str, kr.strings, kr.arr_n, kr.i32_array):
        with pytest.raises(GGUFKeyError, match="'llama.missing' is missing"):
            get("{arch}.missing")


def test_a_scalar_getter_may_skip_arrays():
    kr = KeyReader("x", {"x.attention.sliding_window_pattern": np.array([1, 0]), "x.n": 6})
    assert kr.u32_if_scalar(keys.ATTENTION_SLIDING_WINDOW_PATTERN, 4) == 4
    assert kr.u32_if_scalar("{arch}.n", 4) == 6
    with pytest.raises(GGUFKeyError):
        kr.u32(keys.ATTENTION_SLIDING_WINDOW_PATTERN)


def test_hparams_say_in_one_line_what_model_it_is():
    assert str(read()) == (
        "<HParams llama: n_layer 4, n_embd 64, n_head 8, n_head_kv 8, n_vocab 100, n_ctx_train 128>"
    )
