"""Files that no graph can be built for: every architecture refuses them, naming the tensor or the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pyggmlkv import Model
from pyggmlkv.errors import ArchitectureError, GGUFKeyError, GGUFTensorError
from pyggmlkv.models.registry import MODULES
from tests.oracle.tiny_models import TinyModel, draw, metadata, write_file
from tests.oracle.tiny_recipes import RECIPES, Value

MISSING = {
    "bloom": "blk.1.attn_qkv.bias",
    "gemma2": "blk.3.post_ffw_norm.weight",
    "gemma3": "blk.0.attn_q_norm.weight",
    "gpt-oss": "blk.2.attn_sinks.weight",
    "llama": "token_embd.weight",
    "llama-moe": "blk.0.ffn_gate_inp.weight",
    "llama4": "blk.1.ffn_gate_shexp.weight",
    "phi3": "blk.1.ffn_up.weight",
    "qwen3": "output_norm.weight",
}
WRONG_KEYS: list[tuple[str, Mapping[str, Value], str]] = [
    ("llama4", {"attention.sliding_window": 0}, "llama4.attention.sliding_window"),
    ("llama4", {"expert_count": 0, "expert_used_count": 0}, "llama4.expert_count"),
    ("qwen3", {"rope.dimension_count": 32}, "qwen3.rope.dimension_count"),
    ("gpt-oss", {"rope.dimension_count": 32}, "gpt-oss.rope.dimension_count"),
    ("gemma2", {"attention.value_length": 32}, "gemma2.attention.value_length"),
    ("bloom", {"attention.key_length": 32}, "bloom.attention.value_length"),
]
MISSING_KEYS = {
    "bloom": "attention.layer_norm_epsilon",
    "gemma2": "attention.layer_norm_rms_epsilon",
    "gpt-oss": "attention.sliding_window",
    "llama4": "interleave_moe_layer_step",
    "phi3": "attention.layer_norm_rms_epsilon",
}


@pytest.mark.parametrize(("recipe", "name"), MISSING.items(), ids=MISSING.keys())
def test_missing_tensor_is_named(tiny_model: Callable[[TinyModel], Path], recipe: str, name: str) -> None:
    path = tiny_model(TinyModel(recipe, drop=(rf"^{name}$",)))
    with pytest.raises(GGUFTensorError, match=f"'{name}'.*missing") as caught:
        Model.load(path)
    assert caught.value.facts["tensor"] == name


def keys_only(folder: Path, recipe: str, changes: Mapping[str, Value], without: str = "") -> Path:
    """A file of metadata; nothing looks for tensors before the keys are right."""
    keys = metadata(RECIPES[recipe], changes)
    keys.pop(f"{RECIPES[recipe].arch}.{without}", None)
    path = folder / "keys.gguf"
    write_file(
        path, RECIPES[recipe].arch, keys, {"token_embd.weight": draw("token_embd.weight", (8, 8), 1)}, "f32"
    )
    return path


@pytest.mark.parametrize(("recipe", "changes", "key"), WRONG_KEYS, ids=[key for *_, key in WRONG_KEYS])
def test_key_that_no_graph_can_be_built_for_is_named(
    tmp_path: Path, recipe: str, changes: Mapping[str, Value], key: str
) -> None:
    with pytest.raises(GGUFKeyError, match=f"'{key}': expected") as caught:
        Model.load(keys_only(tmp_path, recipe, changes))
    assert caught.value.facts["key"] == key


@pytest.mark.parametrize(("recipe", "key"), MISSING_KEYS.items(), ids=MISSING_KEYS.keys())
def test_missing_key_is_named(tmp_path: Path, recipe: str, key: str) -> None:
    with pytest.raises(GGUFKeyError, match=f"{recipe}.{key}' is missing"):
        Model.load(keys_only(tmp_path, recipe, {}, without=key))


def test_architecture_that_is_not_there_is_refused_with_a_list_of_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write_file(path, "nobody", {"nobody.block_count": 1}, {"a.weight": draw("a.weight", (8, 8), 1)}, "f32")
    with pytest.raises(ArchitectureError, match="'nobody'") as caught:
        Model.load(path)
    assert all(arch in str(caught.value) for arch in MODULES)


def test_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    recipe = RECIPES["llama"]
    tensors = {"token_embd.weight": draw("token_embd.weight", (256, 64), 1)}
    path = tmp_path / "shape.gguf"
    write_file(path, "llama", metadata(recipe, {}), tensors, "f32")
    with pytest.raises(
        GGUFTensorError, match=r"'token_embd.weight' has shape \[256, 64\], expected \[256, 128\]"
    ):
        Model.load(path)
