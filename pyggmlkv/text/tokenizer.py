"""The tokenizer people use: text to ids and back, streaming, special ids, chat template.

Built from a file's metadata; one module per tokenizer model does the cutting. Ids equal llama_tokenize's.
Upstream: llama-vocab.cpp, llama_vocab::impl::tokenize and detokenize.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Protocol

from pyggmlkv.errors import TextError
from pyggmlkv.text.bpe import BPE
from pyggmlkv.text.chat import ChatTemplate
from pyggmlkv.text.spm import SPM
from pyggmlkv.text.streaming import StreamDecoder
from pyggmlkv.text.vocab import Metadata, Vocab


class TokenizerModel(Protocol):
    """What a tokenizer model gives: ids of a text fragment, bytes of an id."""

    vocab: Vocab
    clean_spaces: bool

    def encode(self, text: str, after_special: bool) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...


_MODELS: dict[str, Callable[[Metadata], TokenizerModel]] = {"gpt2": BPE, "llama": SPM}


class Tokenizer:
    """Text to token ids and back, as the model file defines it."""

    def __init__(self, model: TokenizerModel, chat_template: str | None = None) -> None:
        self._model = model
        self._chat_source = chat_template
        self.vocab = model.vocab

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Tokenizer:
        """Builds the tokenizer a GGUF file describes.

        Raises: TextError for a tokenizer model not implemented here; GGUFKeyError for missing vocabulary keys;
        MissingExtraError when `pyggmlkv[text]` is not installed.
        """
        name = str(metadata.get("tokenizer.ggml.model", "none"))
        make = _MODELS.get(name)
        if make is None:
            raise TextError(
                f"tokenizer.ggml.model is {name!r}; implemented: {', '.join(sorted(_MODELS))}. Pass token ids instead.",
                model=name,
            )
        template = metadata.get("tokenizer.chat_template")
        return cls(make(metadata), template if isinstance(template, str) else None)

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return len(self.vocab)

    @property
    def bos(self) -> int | None:
        """Begin-of-sequence id."""
        return self.vocab.bos

    @property
    def eos(self) -> int | None:
        """End-of-sequence id."""
        return self.vocab.eos

    @property
    def eog(self) -> frozenset[int]:
        """Ids that end a generation: end of sequence, of turn, of message."""
        return self.vocab.eog

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The file's chat template, or None when it has none."""
        if self._chat_source is None:
            return None
        bos, eos = (self.vocab.tokens[i] if i is not None else "" for i in (self.bos, self.eos))
        return ChatTemplate(self._chat_source, bos, eos)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special`: add what the model expects around a text (usually a begin token). `parse_special`: read
        special tokens written out in the text, such as `<|im_start|>`; switch off for text from strangers.
        Raises: TextError for text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as cause:
            raise TextError(
                f"text has a lone surrogate at character {cause.start}", start=cause.start
            ) from cause
        vocab = self.vocab
        ids = [vocab.bos] if add_special and vocab.add_bos and vocab.bos is not None else []
        after_special = True
        for piece in vocab.split_special(text, parse_special):
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
            else:
                ids += self._model.encode(piece, after_special)
                after_special = False
        if add_special and vocab.add_eos and vocab.eos is not None:
            ids.append(vocab.eos)
        return ids

    def token_to_piece(self, token: int, special: bool = True) -> bytes:
        """The bytes one token stands for, possibly part of a character; empty for control tokens unless `special`.

        Raises: TextError when the id is outside the vocabulary.
        """
        self.vocab.check_id(token)
        if not special and self.vocab.is_special(token):
            return b""
        return self._model.piece(token)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of `ids`; bytes that make no character become U+FFFD. Control tokens are left out unless `special`.

        Raises: TextError when an id is outside the vocabulary.
        """
        pieces = [self.token_to_piece(int(i), special) for i in ids]
        if pieces and self.vocab.add_space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        data = b"".join(pieces)
        return data.decode("utf-8", "replace")

    def stream(self, special: bool = False) -> StreamDecoder:
        """A decoder that takes one id at a time."""
        return StreamDecoder(lambda token: self.token_to_piece(token, special))
