"""Tokenizers on small vocabularies made by hand: what can be known without a reference."""

from __future__ import annotations

import builtins
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pyggmlkv.errors import GGUFKeyError, MissingExtraError, TextError
from pyggmlkv.text import Tokenizer
from pyggmlkv.text.bpe import BYTE_TO_CHARACTER

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
LETTERS = [c for b, c in BYTE_TO_CHARACTER.items() if b != 0x04]


def metadata(**changes: object) -> dict[str, object]:
    """A byte-level vocabulary without a token for byte 0x04, with a few merges and special tokens."""
    tokens = ["<eos>", "<bos>", "<think>", "<thinking>", *LETTERS, "ab", "Ġa", "abc"]
    kinds = [CONTROL, CONTROL, USER, CONTROL] + [NORMAL] * (len(tokens) - 4)
    values: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.merges": ["a b", "Ġ a", "ab c"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    return values | {f"tokenizer.{k.replace('__', '.')}": v for k, v in changes.items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(metadata())


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.vocab.tokens[i] for i in ids]


def test_merges_apply_in_the_order_of_the_file(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, tokenizer.encode("abc ab a", add_special=False)) == ["abc", "Ġ", "ab", "Ġa"]


def test_the_begin_token_comes_first_and_can_be_left_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a")[0] == tokenizer.bos
    assert tokenizer.encode("a", add_special=False) == tokenizer.encode("a")[1:]


def test_control_tokens_are_read_only_on_request_and_user_tokens_always(tokenizer: Tokenizer) -> None:
    text = "<eos><think>"
    assert texts(tokenizer, tokenizer.encode(text, False, parse_special=True)) == ["<eos>", "<think>"]
    assert texts(tokenizer, tokenizer.encode(text, False, parse_special=False)) == [*"<eos>", "<think>"]


def test_the_longer_special_token_wins(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, tokenizer.encode("<thinking>", False)) == ["<thinking>"]


def test_a_byte_without_a_token_is_dropped_and_nothing_merges_across_it(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, tokenizer.encode("a\x04b", False)) == ["a", "b"]


def test_decode_gives_the_text_back_without_control_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc, 世界 <think>")
    assert tokenizer.decode(ids) == "abc, 世界 <think>"
    assert tokenizer.decode(ids, special=True) == "<bos>abc, 世界 <think>"


def test_decode_replaces_bytes_that_are_no_character(tokenizer: Tokenizer) -> None:
    first_byte = tokenizer.encode("世", False)[:1]
    assert tokenizer.decode(first_byte) == "\ufffd"


def test_streaming_waits_for_whole_characters(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    parts = [stream.push(i) for i in tokenizer.encode("a世🎉", False)]
    assert parts == ["a", "", "", "世", "", "", "", "🎉"]
    assert stream.finish() == ""


def test_streaming_ends_half_a_character_with_a_replacement(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    stream.push(tokenizer.encode("世", False)[0])
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@pytest.mark.parametrize("token", [-1, 10_000])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(TextError, match="outside the vocabulary"):
        tokenizer.decode([token])


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="character 2"):
        tokenizer.encode("ab\ud800")


def test_the_eos_id_and_known_texts_end_a_generation() -> None:
    tokens = ["<eos>", "<|im_end|>", "x"]
    made = Tokenizer.from_metadata(
        metadata(
            ggml__tokens=tokens,
            ggml__token_type=None,
            ggml__merges=[],
            ggml__eos_token_id=0,
            ggml__bos_token_id=2,
        )
    )
    assert made.eog == {0, 1}


def test_an_unknown_pre_tokenizer_is_named() -> None:
    with pytest.raises(TextError, match="'nobody'.*smollm"):
        Tokenizer.from_metadata(metadata(ggml__pre="nobody"))


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(TextError, match="'t5'.*gpt2"):
        Tokenizer.from_metadata(metadata(ggml__model="t5"))


@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_a_missing_key_is_named(key: str) -> None:
    values = metadata()
    del values[key]
    with pytest.raises(GGUFKeyError, match=key):
        Tokenizer.from_metadata(values)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> ModuleType:
        if name.startswith("tokenizers"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr("importlib.import_module", lambda name: refuse(name))
    with pytest.raises(MissingExtraError, match=r"pip install 'pyggmlkv\[text\]'"):
        Tokenizer.from_metadata(metadata())


def spm_metadata() -> dict[str, object]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "ab", "▁a", "ba"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 6]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -1.0, -2.0, -3.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("ab", ["▁", "ab"]),
        ("aab", ["▁a", "ab"]),
        ("aba", ["▁", "ab", "a"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("</s>a", ["</s>", "▁a"]),
    ],
)
def test_spm_merges_by_score_and_falls_back_to_bytes(text: str, expected: list[str]) -> None:
    made = Tokenizer.from_metadata(spm_metadata())
    assert texts(made, made.encode(text)) == ["<s>", *expected]


def test_spm_decoding_takes_the_added_space_away() -> None:
    made = Tokenizer.from_metadata(spm_metadata())
    assert made.decode(made.encode("ab é", add_special=False)) == "ab é"
