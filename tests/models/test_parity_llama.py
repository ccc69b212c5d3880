"""The package against the reference on llama: the real 135M model and tiny ones, logits bit for bit.

Every case of tests/side_by_side runs over tiny models; the long prompt runs over SmolLM2, settings chosen so
that each value of each setting meets the others in few runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggmlkv
from tests.oracle.libllama import Library
from tests.oracle.numpy_llama import NumpyLlama
from tests.oracle.tiny_models import TinyModel
from tests.side_by_side import CASES, Models, Pair, Setup, run_case

N_PROMPT, N_GREEDY = 300, 64
TINY = ["llama", "llama-tied", "llama-bias", "llama-yarn", "llama-linear", "llama-moe"]
LONG = {
    "ub512-f16": Setup(n_ctx=512),
    "fa-ub512-f16": Setup(n_ctx=512, flash_attn="on"),
    "ub64-f32": Setup(n_ctx=512, n_ubatch=64, type_k="f32", type_v="f32"),
    "fa-ub64-f32": Setup(n_ctx=512, n_ubatch=64, flash_attn="on", type_k="f32", type_v="f32"),
    "ub7-f32": Setup(n_ctx=512, n_ubatch=7, type_k="f32", type_v="f32"),
    "fa-ub7-f16": Setup(n_ctx=512, n_ubatch=7, flash_attn="on"),
}


@pytest.fixture(scope="module")
def smol(reference: Library, smollm2: Path) -> Iterator[Models]:
    with Models(reference, smollm2) as models:
        yield models


@pytest.fixture(scope="module", params=TINY)
def tiny(
    request: pytest.FixtureRequest, reference: Library, tiny_model: Callable[[str], Path]
) -> Iterator[Models]:
    with Models(reference, tiny_model(request.param)) as models:
        yield models


@pytest.fixture(scope="module")
def prompt(smol: Models) -> list[int]:
    """300 tokens of text, by the reference's tokenizer."""
    text = "A batch is split into ubatches; memory plans a slot for each, and a model builds a graph. "
    ids = smol.reference.tokenize(text * 20)
    return ids[:N_PROMPT]


def assert_equal(pair: Pair) -> None:
    """Everything the pair compared was the same, to the bit."""
    found = pair.comparison
    assert found.bits_equal, f"{found.first_difference} (max difference {found.max_abs_diff:g})"
    assert found.state_bytes_equal is not False, found.first_difference


@pytest.mark.parametrize("setup", LONG.values(), ids=LONG.keys())
def test_long_prompt_and_greedy_steps_are_equal(smol: Models, prompt: list[int], setup: Setup) -> None:
    with Pair(smol, setup) as pair:
        rows = pair.decode(prompt)
        assert rows is not None
        tokens = pair.greedy(N_GREEDY, int(rows[-1].argmax()))
        assert_equal(pair)
        assert pair.comparison.rows == N_PROMPT + N_GREEDY
        assert len(tokens) == N_GREEDY


@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_two_threads_are_equal(smol: Models, prompt: list[int], flash_attn: str) -> None:
    """Few steps: two threads that spin for each other are slow where other work shares the machine."""
    with Pair(smol, Setup(n_ctx=512, flash_attn=flash_attn, n_threads=2)) as pair:
        pair.decode(prompt[:64])
        pair.greedy(2, prompt[64])
        assert_equal(pair)


def test_greedy_tokens_are_equal_when_each_side_follows_its_own(smol: Models, prompt: list[int]) -> None:
    with Pair(smol, Setup(n_ctx=512, flash_attn="on")) as pair:
        said: list[list[int]] = []
        for side in (pair.reference, pair.ours):
            out = prompt[:20]
            for step in range(24):
                ids = out if step == 0 else out[-1:]
                if side is pair.reference:
                    pair.reference.decode(ids)
                else:
                    pair.ours.decode(pyggmlkv.Batch(ids))
                out = [*out, int(side.logits[-1].argmax())]
            said.append(out)
        assert said[0] == said[1]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_two_interleaved_sequences_are_equal(smol: Models, prompt: list[int], unified: bool) -> None:
    setup = Setup(n_ctx=512, n_seq_max=2, kv_unified=unified, n_ubatch=32, flash_attn="on")
    n = 40
    with Pair(smol, setup) as pair:
        order = [i % 2 for i in range(2 * n)]
        ids = [prompt[i // 2 + 50 * (i % 2)] for i in range(2 * n)]
        pair.decode(ids, pos=[i // 2 for i in range(2 * n)], seq_id=order)
        for step in range(8):
            pair.decode([prompt[100 + step], prompt[150 + step]], seq_id=[0, 1])
        pair.compare_positions(2)
        assert_equal(pair)


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("type_k", ["f16", "f32"])
def test_context_shift_in_the_middle_is_equal(
    smol: Models, prompt: list[int], flash_attn: str, type_k: str
) -> None:
    with Pair(smol, Setup(n_ctx=256, flash_attn=flash_attn, type_k=type_k)) as pair:
        pair.decode(prompt[:120], logits="last")
        assert pair.memory("seq_rm", 0, 40, 60)
        pair.memory("seq_add", 0, 60, None, -20)
        pair.greedy(16, prompt[120])
        pair.compare_positions(1)
        assert_equal(pair)
        assert pair.reference.memory.seq_pos_max(0) == 120 - 20 + 16 - 1


def test_bf16_keys_shift_where_the_reference_aborts(tiny_model: Callable[[str], Path]) -> None:
    """The reference's CPU has no RoPE on bf16; against our own f32 keys, within what bf16 keeps (2^-8)."""
    rows = []
    with pyggmlkv.Model.load(tiny_model("llama")) as model:
        for type_k in ("bf16", "f32"):
            with pyggmlkv.Context(model, n_ctx=256, flash_attn="off", type_k=type_k) as ctx:
                ctx.decode(pyggmlkv.Batch(list(range(60))))
                assert ctx.memory is not None
                ctx.memory.seq_rm(0, 10, 30)
                ctx.memory.seq_add(0, 30, None, -20)
                ctx.decode(pyggmlkv.Batch([7, 8, 9], logits="all"))
                rows.append(ctx.logits)
    error = np.square(rows[0] - rows[1]).sum() / np.square(rows[1]).sum()
    assert 0 < error < 1e-3


@pytest.mark.parametrize("case", CASES)
def test_tiny_models_are_equal_in_every_case(tiny: Models, case: str) -> None:
    result = run_case(tiny, case)
    found = result.comparison
    assert result.memory == "kv"
    assert found is not None, result.note
    assert found.bits_equal, f"{found.first_difference} (max difference {found.max_abs_diff:g})"
    assert found.state_bytes_equal is not False, found.first_difference


@pytest.mark.parametrize("weight_type", ["f16", "bf16", "q8_0", "q4_0"])
def test_weight_types_are_equal(
    reference: Library, tiny_model: Callable[[TinyModel], Path], weight_type: str
) -> None:
    with Models(reference, tiny_model(TinyModel("llama", weight_type=weight_type))) as models:
        found = run_case(models, "greedy").comparison
        assert found is not None
        assert found.bits_equal, f"{found.first_difference} (max difference {found.max_abs_diff:g})"


@pytest.mark.parametrize("recipe", ["llama", "llama-bias", "llama-linear"])
@pytest.mark.parametrize("split", [[40], [7, 1, 20, 12], [1] * 40], ids=["whole", "parts", "cached"])
def test_agrees_with_numpy(tiny_model: Callable[[str], Path], recipe: str, split: list[int]) -> None:
    path = tiny_model(recipe)
    tokens = [int(t) for t in np.random.default_rng(11).integers(0, 128, 40)]
    rows = []
    settings: dict[str, Any] = {"n_ctx": 256, "flash_attn": "off", "type_k": "f32", "type_v": "f32"}
    with pyggmlkv.Model.load(path) as model, pyggmlkv.Context(model, **settings) as ctx:
        for n, start in zip(split, np.cumsum([0, *split]), strict=False):
            ctx.decode(pyggmlkv.Batch(tokens[start : start + n], logits="all"))
            rows.append(ctx.logits.copy())
    np.testing.assert_allclose(np.concatenate(rows), NumpyLlama(path).forward(tokens), atol=1e-4)


def test_graph_reuse_changes_no_bit_and_really_happens(
    reference: Library, tiny_model: Callable[[str], Path]
) -> None:
    with Models(reference, tiny_model("llama")) as models:
        rows, reused = [], []
        for graph_reuse in (True, False):
            with Pair(models, Setup(), graph_reuse=graph_reuse) as pair:
                pair.decode(list(range(10)), logits="last")
                pair.greedy(20, 3)
                assert_equal(pair)
                rows.append(pair.ours.logits.tobytes())
                reused.append((pair.ours.n_graphs_reused, pair.reference.perf.n_reused))
    assert rows[0] == rows[1]
    assert reused[0][0] == reused[0][1] >= 18
    assert reused[1][0] == 0
