"""Byte-pair encoding (`tokenizer.ggml.model` = `gpt2`) with the `tokenizers` library, from the file's own merges.

Knows words and merges; special tokens are cut out before it is called. Upstream: llama-vocab.cpp, llm_tokenizer_bpe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyggmlkv.errors import GGUFKeyError
from pyggmlkv.text.extra import require
from pyggmlkv.text.pre_tokenizers import PreTokenizer, pre_tokenizer
from pyggmlkv.text.vocab import Metadata, TokenKind, Vocab, VocabDefaults


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


BYTE_TO_CHARACTER = _byte_characters()
CHARACTER_TO_BYTE = {c: b for b, c in BYTE_TO_CHARACTER.items()}


class BPE:
    """Text fragments to ids and single ids to bytes, for byte-level BPE vocabularies."""

    def __init__(self, metadata: Metadata) -> None:
        self.rules: PreTokenizer = pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "")))
        self.vocab = Vocab(metadata, VocabDefaults(bos=11, eos=11, add_bos=self.rules.add_bos))
        self.clean_spaces = self.rules.clean_spaces
        merges = metadata.get("tokenizer.ggml.merges")
        if not isinstance(merges, list):
            raise GGUFKeyError(
                "tokenizer.ggml.merges is missing or not a list of strings", key="tokenizer.ggml.merges"
            )
        self._tokenizer = _build(self.vocab, merges, self.rules)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Ids of one fragment. Bytes that the vocabulary has no token for are left out, as upstream does."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for."""
        text = self.vocab.tokens[token]
        kind = self.vocab.kinds[token]
        if kind == TokenKind.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind != TokenKind.NORMAL:
            return b"" if kind == TokenKind.UNUSED else text.encode()
        try:
            return bytes([CHARACTER_TO_BYTE[c] for c in text])
        except KeyError:
            return b"".join(_piece_of(c, text) for c in text)


def _piece_of(character: str, text: str) -> bytes:
    byte = CHARACTER_TO_BYTE.get(character)
    if byte is not None:
        return bytes([byte])
    return f"[UNK_BYTE_0x{character.encode().hex()}{text}]".encode()


def _build(vocab: Vocab, merges: Sequence[str], rules: PreTokenizer) -> Any:
    tokenizers = require("tokenizers", "text")
    pre = tokenizers.pre_tokenizers
    pairs: dict[tuple[str, str], None] = {}
    for merge in merges:
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut > 0 and left in vocab.ids and right in vocab.ids and left + right in vocab.ids:
            pairs.setdefault((left, right))
    model = tokenizers.models.BPE(vocab.ids, list(pairs), ignore_merges=rules.ignore_merges)
    tokenizer = tokenizers.Tokenizer(model)
    steps = [pre.Split(tokenizers.Regex(p), "isolated") for p in rules.patterns]
    steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=False))
    # A byte without a token is dropped, but its neighbours must not merge across it: cut there first.
    missing = [c for c in BYTE_TO_CHARACTER.values() if c not in vocab.ids]
    if missing:
        any_missing = "[" + "".join(f"\\x{{{ord(c):x}}}" for c in missing) + "]"
        steps.append(pre.Split(tokenizers.Regex(any_missing), "removed"))
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    return tokenizer
