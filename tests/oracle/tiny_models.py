"""Writes tiny random models for any architecture the reference knows.

The reference is asked which tensors, in which shapes, a model with the recipe's metadata has; the values are
drawn here, by name and seed, and the file is written with the `gguf` package. So architectures that the
reference's own saver refuses work like the others, and weights are random enough (norms not all one, biases
not zero) that a mistake shows.
Upstream: llama.cpp, llama_model_init_from_user.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from .libllama import Library
from .libllama.model import tensors_wanted
from .tiny_recipes import BASE, NEVER, RECIPES, Recipe, Value

Floats = npt.NDArray[np.float32]
Shape = tuple[int, ...]
KEPT_F32 = re.compile(
    r"norm|conv(1d)?\.weight|ssm_a$|ssm_d$|rope_|ffn_gate_inp|attn_rel_b|exp_probs_b|\.bias$|ssm_x|ssm_dt"
)


@dataclasses.dataclass(frozen=True, slots=True)
class TinyModel:
    """A recipe by name, and what to change about it. keys: metadata without the architecture's prefix."""

    recipe: str
    seed: int = 1
    weight_type: str = "f32"
    keys: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    drop: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        """A name that no other choice shares."""
        recipe = RECIPES[self.recipe]
        text = repr((self, BASE, NEVER, recipe))
        return f"{self.recipe}-{self.weight_type}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.gguf"


def write(library: Library, model: TinyModel, folder: Path) -> Path:
    """The model's file in `folder`, written unless it is there."""
    path = folder / model.file_name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    recipe = RECIPES[model.recipe]
    keys = metadata(recipe, model.keys)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        probe = Path(scratch) / "keys.gguf"
        write_file(probe, recipe.arch, keys, {}, "f32")
        wanted = rearranged(dict(tensors_wanted(library, probe)), recipe)
        left_out = re.compile("|".join((*NEVER, *recipe.drop, *model.drop)))
        tensors = {
            name: draw(name, ne, model.seed) for name, ne in wanted.items() if not left_out.search(name)
        }
        whole = Path(scratch) / "whole.gguf"
        write_file(whole, recipe.arch, keys, tensors, model.weight_type)
        whole.replace(path)
    return path


def metadata(recipe: Recipe, changes: Mapping[str, Value]) -> dict[str, Value]:
    """Keys with the architecture's prefix."""
    merged = {**{k: v for k, v in BASE.items() if k not in recipe.without}, **recipe.keys, **changes}
    return {f"{recipe.arch}.{key}": value for key, value in merged.items()}


def rearranged(wanted: Mapping[str, Shape], recipe: Recipe) -> dict[str, Shape]:
    """Shapes with Q, K and V fused, or gate and up experts split, where real files have them so."""
    out: dict[str, Shape] = {}
    for name, ne in wanted.items():
        if recipe.fused_qkv and (found := re.search(r"attn_[qkv]\.", name)):
            whole = name.replace(found[0], "attn_qkv.")
            out[whole] = (*ne[:-1], out.get(whole, (0,))[-1] + ne[-1])
        elif recipe.split_experts and "gate_up_exps" in name:
            for half in ("gate_exps", "up_exps"):
                out[name.replace("gate_up_exps", half)] = (ne[0], ne[1] // 2, ne[2])
        else:
            out[name] = ne
    return out


def draw(name: str, ne: Shape, seed: int) -> Floats:
    """Values of one tensor, NumPy order, the same for the same name, shape and seed."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    shape = tuple(reversed(ne))
    normal = rng.standard_normal(shape, np.float32)
    for pattern, values in (
        (r"ssm_a$", lambda: -rng.uniform(0.2, 4.0, shape)),
        (r"ssm_dt\.bias", lambda: rng.uniform(-4.0, -1.0, shape)),
        (r"ssm_d$", lambda: 1 + 0.2 * normal),
        (r"rope_(freqs|factors)", lambda: np.sort(rng.uniform(1.0, 4.0, shape))),
        (r"norm.*\.weight$", lambda: 1 + 0.2 * normal),
        (r"bias$|exp_probs_b", lambda: 0.2 * normal),
        (r"sinks|rel_b", lambda: normal),
        (r"conv(1d)?\.weight$", lambda: 0.5 * normal),
        (r"^token_embd\.weight$", lambda: 0.25 * normal),
        (r"^output\.weight$", lambda: 4.0 * normal / np.sqrt(ne[0])),
        (r"attn_(q|k|qkv)\.weight$|ffn_gate_inp", lambda: 1.5 * normal / np.sqrt(ne[0])),
    ):
        if re.search(pattern, name):
            return np.asarray(values(), np.float32)
    return np.asarray(normal / np.sqrt(ne[0]), np.float32)


def write_file(
    path: Path, arch: str, keys: Mapping[str, Value], tensors: Mapping[str, Floats], weight_type: str
) -> None:
    """A GGUF file without a vocabulary."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for key, value in keys.items():
        add_key(writer, key, value)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType[weight_type.upper()]
        if values.ndim < 2 or KEPT_F32.search(name) or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_key(writer: Any, key: str, value: Value) -> None:
    """One metadata value, typed by what it is in Python."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
