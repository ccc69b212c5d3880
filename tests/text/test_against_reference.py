"""Token ids, end tokens and decoded bytes equal libllama's own, on the real vocabularies of the pinned models."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGUFReader

from pyggmlkv.text import Tokenizer
from tests.oracle.libllama import Library, RefModel
from tests.text.nasty import NASTY

POOL = "".join(NASTY.values())


class Pair:
    """Our tokenizer and the reference's model, of one file. Metadata is read by the `gguf` package."""

    def __init__(self, path: Path, reference: Library) -> None:
        fields = GGUFReader(path).fields
        self.ours = Tokenizer.from_metadata({k: f.contents() for k, f in fields.items()})
        self.theirs = RefModel(reference, path)
        self.their_eog = logged_eog(path, reference)


def logged_eog(path: Path, reference: Library) -> set[int]:
    """The end-of-generation tokens that the reference lists in its log when it loads a vocabulary."""
    params = reference.lib.llama_model_default_params()
    params.vocab_only = True
    with reference.captured_log() as log:
        model = reference.lib.llama_model_load_from_file(str(path).encode(), params)
    reference.lib.llama_model_free(model)
    return {int(i) for i in re.findall(r"load:\s+- (\d+) \('", "".join(log))}


@pytest.fixture(scope="module", params=["smollm2", "gemma3_270m"])
def pair(request: pytest.FixtureRequest, reference: Library) -> Iterator[Pair]:
    made = Pair(request.getfixturevalue(request.param), reference)
    yield made
    made.theirs.close()


@pytest.mark.parametrize("parse_special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("name", NASTY)
def test_ids_are_the_reference_s(pair: Pair, name: str, parse_special: bool) -> None:
    expected = pair.theirs.tokenize(NASTY[name], parse_special=parse_special)
    assert pair.ours.encode(NASTY[name], parse_special=parse_special) == expected


@pytest.mark.parametrize("name", ["empty", "words", "specials"])
def test_ids_without_added_tokens_are_the_reference_s(pair: Pair, name: str) -> None:
    expected = pair.theirs.tokenize(NASTY[name], add_special=False)
    assert pair.ours.encode(NASTY[name], add_special=False) == expected


def test_the_tokens_that_end_a_generation_are_the_reference_s(pair: Pair) -> None:
    assert pair.their_eog and pair.ours.eog == pair.their_eog


def test_ids_of_random_mixtures_are_the_reference_s(pair: Pair) -> None:
    draw = random.Random(20260101)
    for _ in range(500):
        text = "".join(draw.choice(POOL) for _ in range(draw.randint(1, 40)))
        assert pair.ours.encode(text) == pair.theirs.tokenize(text), repr(text)


@pytest.mark.parametrize("name", NASTY)
def test_decoded_text_is_the_reference_s(pair: Pair, name: str) -> None:
    ids = pair.theirs.tokenize(NASTY[name])
    assert pair.ours.decode(ids, special=True) == pair.theirs.detokenize(ids)


def test_streamed_text_is_the_decoded_text(pair: Pair) -> None:
    ids = pair.ours.encode(POOL, add_special=False)
    stream = pair.ours.stream(special=True)
    text = "".join(map(stream.push, ids)) + stream.finish()
    assert text == b"".join(map(pair.ours.token_to_piece, ids)).decode("utf-8", "replace")


def test_every_token_decodes_as_the_reference_does(pair: Pair) -> None:
    step = 1 if pair.ours.n_vocab < 100_000 else 7
    for first in range(0, pair.ours.n_vocab, 64 * step):
        ids = list(range(first, min(first + 64 * step, pair.ours.n_vocab), step))
        assert pair.ours.decode(ids, special=True) == pair.theirs.detokenize(ids), ids
