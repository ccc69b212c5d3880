"""A vocabulary as a model file stores it: tokens, their kinds, the special ids, and cutting text at special tokens.

Knows metadata only; how the text between special tokens becomes ids is the business of bpe.py and spm.py.
Upstream: llama-vocab.cpp, llama_vocab::impl::load and tokenizer_st_partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from pyggmlkv.errors import GGUFKeyError, TextError

Metadata: TypeAlias = Mapping[str, object]


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type` values."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class VocabDefaults:
    """What a tokenizer model assumes where the file is silent."""

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False


# Texts that end a turn or a document, whatever the file's ids say.
_END_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
)
_END_OF_GENERATION = frozenset(
    (
        *_END_OF_TURN,
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[EOS]", "<eos>"),
        *("<turn|>", "<|tool_response>", "[e~["),
    )
)
# Texts of the fill-in-the-middle tokens, where the file gives no id. The last three end a generation.
_FILL_IN_THE_MIDDLE = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>")
    + ("<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>")
    + ("<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>")
    + ("<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_ALWAYS_SHOWN = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))


class Vocab:
    """Tokens and their kinds; ids are positions in `tokens`."""

    def __init__(self, metadata: Metadata, defaults: VocabDefaults) -> None:
        self.tokens = [
            text or f"[EMPTY_{i}]" for i, text in enumerate(_strings(metadata, "tokenizer.ggml.tokens"))
        ]
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        self.kinds = _kinds(metadata, len(self.tokens))
        self.add_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", defaults.add_bos)
        self.add_eos = _flag(metadata, "tokenizer.ggml.add_eos_token", defaults.add_eos)
        self.add_space_prefix = _flag(metadata, "tokenizer.ggml.add_space_prefix", defaults.add_space_prefix)
        self.bos = self._special_id(metadata, "bos", defaults.bos)
        self.eos = self._special_id(metadata, "eos", defaults.eos)
        self.unk = self._special_id(metadata, "unknown", defaults.unk)
        self.pad = self._special_id(metadata, "padding", None)
        self.eot = self._special_id(metadata, "eot", None)
        if self.eot is None:
            self.eot = next((self.ids[t] for t in _END_OF_TURN if t in self.ids), None)
        self.fim = self._fill_in_the_middle(metadata)
        self.eog = self._end_of_generation(metadata)
        self._mark_control_looking()
        special = (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
        by_length = sorted(
            (i for i, kind in enumerate(self.kinds) if kind in special),
            key=lambda i: -len(self.tokens[i].encode()),
        )
        self._special = [(self.tokens[i], i) for i in by_length]
        self._user_defined = [(t, i) for t, i in self._special if self.kinds[i] == TokenKind.USER_DEFINED]

    def __len__(self) -> int:
        return len(self.tokens)

    def is_special(self, token: int) -> bool:
        """True for control and unknown tokens, which decoding leaves out unless asked."""
        return self.kinds[token] in (TokenKind.CONTROL, TokenKind.UNKNOWN)

    def check_id(self, token: int) -> int:
        """The id itself. Raises: TextError when it is outside the vocabulary."""
        if not 0 <= token < len(self.tokens):
            raise TextError(
                f"token id {token} is outside the vocabulary of {len(self.tokens)} tokens", token=token
            )
        return token

    def split_special(self, text: str, parse_special: bool) -> list[str | int]:
        """Cuts `text` at special tokens: strings stay text, integers are the special tokens found.

        Longer tokens are looked for first, over the whole text. Tokens that the model's makers defined for text
        (`USER_DEFINED`) are always found, control tokens only with `parse_special`.
        """
        pieces: list[str | int] = [text] if text else []
        for special, token in self._special if parse_special else self._user_defined:
            if special not in text:
                continue
            cut: list[str | int] = []
            for piece in pieces:
                cut += [piece] if isinstance(piece, int) else _cut(piece, special, token)
            pieces = cut
        return pieces

    def _special_id(self, metadata: Metadata, name: str, default: int | None) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        for candidate in (value, default):
            if isinstance(candidate, int) and 0 <= candidate < len(self.tokens):
                return int(candidate)
        return None

    def _fill_in_the_middle(self, metadata: Metadata) -> dict[str, int]:
        """Ids of the fill-in-the-middle tokens that this vocabulary has."""
        found: dict[str, int] = {}
        for name, texts in _FILL_IN_THE_MIDDLE.items():
            given = self._special_id(metadata, name, None)
            if given is None:
                given = next((self.ids[t] for t in texts if t in self.ids), None)
                if given is not None:
                    self.kinds[given] = TokenKind.CONTROL
            if given is not None:
                found[name] = given
        return found

    def _end_of_generation(self, metadata: Metadata) -> frozenset[int]:
        found = {i for t, i in self.ids.items() if t in _END_OF_GENERATION}
        eom = self._special_id(metadata, "eom", None)
        found |= {i for name, i in self.fim.items() if name in ("fim_pad", "fim_rep", "fim_sep")}
        found |= {i for i in (self.eos, self.eot, eom) if i is not None}
        texts = {self.tokens[i] for i in found}
        calls = "<|call|>" in texts or "<|calls|>" in texts
        if calls and ("<|return|>" in texts or "<|flush|>" in texts):
            found.discard(self.ids.get("<|end|>", -1))
        if "<|tool_response>" in texts:
            found.discard(self.ids.get("</s>", -1))
        return frozenset(found)

    def _mark_control_looking(self) -> None:
        for i in self.eog:
            if self.tokens[i] in _END_OF_GENERATION:
                self.kinds[i] = TokenKind.CONTROL
        for text in _ALWAYS_SHOWN & self.ids.keys():
            self.kinds[self.ids[text]] = TokenKind.USER_DEFINED


def _cut(text: str, special: str, token: int) -> list[str | int]:
    out: list[str | int] = []
    for i, part in enumerate(text.split(special)):
        if i:
            out.append(token)
        if part:
            out.append(part)
    return out


def _strings(metadata: Metadata, key: str) -> Sequence[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise GGUFKeyError(
            f"{key} is missing or not a list of strings: this file has no such vocabulary", key=key
        )
    return value


def _kinds(metadata: Metadata, n: int) -> list[int]:
    value = metadata.get("tokenizer.ggml.token_type")
    if value is None:
        return [int(TokenKind.NORMAL)] * n
    kinds = [int(v) for v in value]  # type: ignore[attr-defined]
    if len(kinds) < n:
        raise GGUFKeyError(
            f"tokenizer.ggml.token_type has {len(kinds)} entries for {n} tokens", given=len(kinds), n=n
        )
    return kinds[:n]


def _flag(metadata: Metadata, key: str, default: bool) -> bool:
    value = metadata.get(key, default)
    return bool(value)
