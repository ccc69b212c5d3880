"""Pre-tokenizers by name: how text is cut into words before byte pairs are merged.

Pure data: one row per `tokenizer.ggml.pre`, written as regular expressions for the `tokenizers` library. Each pattern
cuts the pieces that the one before it left; what a pattern does not match stays a piece of its own.
Upstream: llama-vocab.cpp, llm_tokenizer_bpe and the table of pre-tokenizer names.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyggmlkv.errors import TextError

_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BREAKS}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family of BPE vocabularies cuts text.

    `ignore_merges`: a whole word that is a token is taken as it is. `add_bos`: the default where the file is silent.
    `clean_spaces`: decoding drops a space before `? ! . ,` and around apostrophes.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    clean_spaces: bool = True


_DIGITS_THEN_GPT2 = PreTokenizer((_DIGIT, _GPT2))
_SMOLLM = PreTokenizer((_DIGIT, _GPT2), clean_spaces=False)
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_QWEN = PreTokenizer((_QWEN2,), clean_spaces=False)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "smollm": _SMOLLM,
    "command-r": _SMOLLM,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "exaone": _DIGITS_THEN_GPT2,
    "minerva-7b": _DIGITS_THEN_GPT2,
    "gpt-2": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "mpt": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "jais": _PLAIN_GPT2,
    "exaone4": _PLAIN_GPT2,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama-bpe": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "falcon-h1": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE,
    "lfm2": _LLAMA_BPE,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "hunyuan": _QWEN,
    "stablelm2": PreTokenizer((_QWEN2,)),
    "megrez": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), clean_spaces=False),
    "falcon": _FALCON,
    "default": _DEFAULT,
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer that a file asks for; an empty name is upstream's `default`.

    Raises: TextError for a name without a row here.
    """
    found = PRE_TOKENIZERS.get(name or "default")
    if found is None:
        raise TextError(
            f"tokenizer.ggml.pre is {name!r}, which has no row here; known: {', '.join(sorted(PRE_TOKENIZERS))}",
            pre=name,
        )
    return found
