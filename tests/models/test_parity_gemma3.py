"""The real Gemma-3-270M against the reference, beyond its window of 512: prompt, steps, shift, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.oracle.libllama import Library
from tests.side_by_side import Models, Pair, Setup

N_PROMPT = 600
ROWS = [0, 510, 511, 512, 513, N_PROMPT - 1]

SETUPS = {
    "ub256-fa": Setup(n_ctx=768, n_ubatch=256, flash_attn="on"),
    "ub200": Setup(n_ctx=768, n_ubatch=200),
    "ub512-fa-q8": Setup(n_ctx=768, flash_attn="on", type_k="q8_0", type_v="q8_0"),
}


@pytest.fixture(scope="module")
def models(reference: Library, gemma3_270m: Path) -> Iterator[Models]:
    with Models(reference, gemma3_270m) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompt(models: Models) -> list[int]:
    text = "A batch is split into ubatches; memory plans a slot for each, and a model builds a graph. "
    return models.reference.tokenize(text * 40)[:N_PROMPT]


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
def test_beyond_the_window_is_equal(models: Models, prompt: list[int], setup: Setup) -> None:
    with Pair(models, setup) as pair:
        rows = pair.decode(prompt, logits=ROWS)
        assert rows is not None
        pair.greedy(4, int(rows[-1].argmax()))
        pair.memory("seq_rm", 0, 550, 580)
        pair.memory("seq_add", 0, 580, None, -30)
        pair.greedy(4, prompt[7])
        pair.compare_positions(1)
        assert pair.memory_kind == "iswa"
        assert pair.comparison.rows == len(ROWS) + 8
        assert pair.comparison.bits_equal, pair.comparison.first_difference
