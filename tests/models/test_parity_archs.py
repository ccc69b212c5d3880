"""Every architecture against the reference: a tiny random model of each, every case, logits bit for bit.

A new architecture is a row of `ARCHS`. The cases are those of tests/side_by_side: flash attention on and off,
splits, element types, sequences unified and in streams, shifts and removals, all beyond the sliding windows of 8.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv.types import FlashAttn
from tests.oracle.libllama import ContextParams, Library
from tests.oracle.tiny_models import TinyModel
from tests.oracle.tiny_recipes import Value
from tests.side_by_side import CASES, Comparison, Models, Pair, Setup, run_case

TinyModels = Callable[[str | TinyModel], Path]


@dataclasses.dataclass(frozen=True, slots=True)
class Arch:
    """A tiny model, and the kind of memory that it must get."""

    model: TinyModel
    memory: str


GROUPS: Mapping[str, Value] = {"expert_count": 8, "expert_group_count": 4, "expert_group_used_count": 2}
TEMPERATURE: Mapping[str, Value] = {"attention.temperature_scale": 0.1, "attention.temperature_length": 16}
ARCHS = {
    "bloom": Arch(TinyModel("bloom"), "kv"),
    "deepseek2": Arch(TinyModel("deepseek2"), "kv"),
    "deepseek2-groups": Arch(TinyModel("deepseek2", keys=GROUPS), "kv"),
    "deepseek2-heads": Arch(TinyModel("deepseek2-heads"), "kv"),
    "deepseek2-temperature": Arch(TinyModel("deepseek2", keys=TEMPERATURE), "kv"),
    "gemma2": Arch(TinyModel("gemma2"), "iswa"),
    "gemma3": Arch(TinyModel("gemma3"), "iswa"),
    "gemma3-no-window": Arch(TinyModel("gemma3", keys={"attention.sliding_window": 0}), "kv"),
    "gpt-oss": Arch(TinyModel("gpt-oss"), "iswa"),
    "jamba": Arch(TinyModel("jamba"), "hybrid"),
    "jamba-moe": Arch(TinyModel("jamba-moe"), "hybrid"),
    "lfm2": Arch(TinyModel("lfm2"), "hybrid"),
    "lfm2-window": Arch(TinyModel("lfm2", keys={"attention.sliding_window": 8}), "hybrid-iswa"),
    "llama-moe": Arch(TinyModel("llama-moe"), "kv"),
    "llama4": Arch(TinyModel("llama4"), "iswa"),
    "mamba": Arch(TinyModel("mamba"), "recurrent"),
    "mamba-normed": Arch(TinyModel("mamba", keys={"ssm.dt_b_c_rms": True}), "recurrent"),
    "mamba2": Arch(TinyModel("mamba2"), "recurrent"),
    "phi3-long": Arch(TinyModel("phi3"), "kv"),
    "phi3-short": Arch(TinyModel("phi3", keys={"rope.scaling.original_context_length": 512}), "kv"),
    "phi3-window": Arch(TinyModel("phi3", keys={"attention.sliding_window": 8}), "kv"),
    "qwen2vl": Arch(TinyModel("qwen2vl"), "kv"),
    "qwen2vl-sections": Arch(TinyModel("qwen2vl", keys={"rope.dimension_sections": [12, 8, 8, 4]}), "kv"),
    "qwen3": Arch(TinyModel("qwen3"), "kv"),
    "t5": Arch(TinyModel("t5"), "kv"),
    "t5-biases": Arch(TinyModel("t5-biases"), "kv"),
    "t5-relu": Arch(TinyModel("t5", drop=("ffn_gate",)), "kv"),
}
PLAIN = ("bloom", "gemma2", "gemma3", "gpt-oss", "llama-moe", "llama4", "phi3-long", "qwen3")
"""One row an architecture, without encoder and with one position a token."""


@pytest.fixture(scope="module", params=ARCHS)
def arch(request: pytest.FixtureRequest) -> Arch:
    return ARCHS[request.param]


@pytest.fixture(scope="module")
def models(arch: Arch, reference: Library, tiny_model: TinyModels) -> Iterator[Models]:
    with Models(reference, tiny_model(arch.model)) as opened:
        yield opened


def assert_equal(found: Comparison) -> None:
    assert found.rows > 0
    assert found.bits_equal, f"{found.first_difference} (max difference {found.max_abs_diff:g})"
    assert found.state_bytes_equal is not False, found.first_difference


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_equal(models: Models, arch: Arch, case: str) -> None:
    result = run_case(models, case)
    if result.comparison is None:
        pytest.skip(result.note)
    assert result.memory == arch.memory
    assert_equal(result.comparison)


@pytest.mark.parametrize("weight_type", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", PLAIN)
def test_weight_types_are_equal(
    reference: Library, tiny_model: TinyModels, name: str, weight_type: str
) -> None:
    model = dataclasses.replace(ARCHS[name].model, weight_type=weight_type)
    with (
        Models(reference, tiny_model(model)) as opened,
        Pair(opened, Setup(n_ubatch=16)) as pair,
    ):
        pair.decode(list(range(40)))
        pair.greedy(4, 3)
        assert_equal(pair.comparison)


@pytest.mark.parametrize("name", PLAIN)
def test_embeddings_as_input_are_equal(reference: Library, tiny_model: TinyModels, name: str) -> None:
    rows = np.random.default_rng(5).standard_normal((20, 256), np.float32)
    with Models(reference, tiny_model(ARCHS[name].model)) as opened, Pair(opened, Setup()) as pair:
        pair.reference.decode(embd=rows, logits="all")
        pair.ours.decode(pyggmlkv.Batch(embd=rows, logits="all"))
        pair.comparison.add(pair.ours.logits, pair.reference.logits, "decode of 20 embeddings")
        pair.greedy(3, 1)
        assert_equal(pair.comparison)


def plain(name: str) -> str:
    """Tensors without a name have a number, which counts more on one side than on the other."""
    return re.sub(r"(node|leaf)_[0-9]+", "unnamed", name)


def names_asked(node: pyggmlkv.binding.Tensor) -> list[str]:
    """A node's inputs that are no weights, then itself: what the reference asks its callback about."""
    leaves = [t.name for t in node.src if t is not None and t.op == "NONE"]
    return list(
        dict.fromkeys([name for name in leaves if not name.endswith((".weight", ".bias"))] + [node.name])
    )


@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_graphs_have_the_references_nodes_in_its_order(models: Models, flash_attn: FlashAttn) -> None:
    asked: list[str] = []

    def note(name: str) -> bool:
        asked.append(name)
        return False

    capture = ContextParams(n_ctx=256, n_threads=1, flash_attn=flash_attn, capture=note)
    with models.reference.context(capture) as reference:
        if models.reference.has_encoder:
            reference.encode(list(range(20)))
        asked.clear()
        reference.decode(list(range(12)))
    with pyggmlkv.Context(models.ours, n_ctx=256, n_threads=1, flash_attn=flash_attn) as ctx:
        if models.ours.has_encoder:
            ctx.encode(pyggmlkv.Batch(list(range(20)), logits="all"))
        ctx.decode(pyggmlkv.Batch(list(range(12))))
        assert ctx._graphs is not None and ctx._graphs._last is not None
        ours = [name for node in ctx._graphs._last.graph.nodes for name in names_asked(node)]
    assert [plain(name) for name in ours] == [plain(name) for name in asked]
