"""Text in, token ids out, and back: tokenizers built from a model file's own metadata (extra `text`).

Knows metadata only, as a plain mapping; no model, no C library. Upstream: llama-vocab.cpp.
"""

from __future__ import annotations

from pyggmlkv.text.chat import ChatTemplate, Message
from pyggmlkv.text.streaming import StreamDecoder
from pyggmlkv.text.tokenizer import Tokenizer
from pyggmlkv.text.vocab import Vocab

__all__ = ["ChatTemplate", "Message", "StreamDecoder", "Tokenizer", "Vocab"]
