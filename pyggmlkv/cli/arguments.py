"""Arguments that several commands share: the model, the prompt, the context; and what they turn into."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyggmlkv.errors import UsageError

if TYPE_CHECKING:
    from pyggmlkv import Context, Model
    from pyggmlkv.text import Tokenizer


def count(text: str) -> int:
    """A whole number, 0 or more."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, a GGUF file."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a GGUF file (see `pyggmlkv fetch`)")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """`-p` or `-f`, and whether the chat template is put around it."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-p", "--prompt", help="the text to continue")
    source.add_argument("-f", "--file", type=Path, help="read the text from a file; - is standard input")
    parser.add_argument("--chat", action="store_true", help="put the model's chat template around the prompt")


def add_context(parser: argparse.ArgumentParser) -> None:
    """What a context is made with."""
    add = parser.add_argument
    add("-c", "--n-ctx", type=count, default=None, metavar="C", help="cells of the context (the model's own)")
    add("-b", "--n-batch", type=count, default=2048, metavar="N", help="tokens a batch (2048)")
    add("-u", "--n-ubatch", type=count, default=512, metavar="N", help="tokens a ubatch (512)")
    add("-t", "--threads", type=count, default=None, metavar="N", help="threads (as many as physical cores)")
    add("--flash-attn", choices=("auto", "on", "off"), default="auto", help="flash attention (auto)")
    add("--type-k", default="f16", metavar="TYPE", help="element type of cached keys (f16)")
    add("--type-v", default="f16", metavar="TYPE", help="element type of cached values (f16)")


def prompt_tokens(args: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    """Token ids of the prompt that `add_prompt` described."""
    text = args.prompt
    if text is None:
        stdin = str(args.file) == "-"
        text = sys.stdin.read() if stdin else _text_of(args.file)
    if not args.chat:
        return tokenizer.encode(text)
    if tokenizer.chat_template is None:
        raise UsageError("--chat: this model's file has no chat template")
    text = tokenizer.chat_template.apply([{"role": "user", "content": text}])
    # Templates write the begin token themselves where the model wants one.
    return tokenizer.encode(text, add_special=not _starts_with_bos(text, tokenizer))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: not a text in UTF-8 (byte {error.start} is no part of a character)"
        ) from None


def _starts_with_bos(text: str, tokenizer: Tokenizer) -> bool:
    return tokenizer.bos is not None and text.startswith(tokenizer.vocab.tokens[tokenizer.bos])


def make_context(model: Model, args: argparse.Namespace) -> Context:
    """A context with what `add_context` read; counts of 0 are the default."""
    import pyggmlkv

    return pyggmlkv.Context(
        model,
        n_ctx=args.n_ctx or None,
        n_batch=args.n_batch or 2048,
        n_ubatch=args.n_ubatch or 512,
        n_threads=args.threads or None,
        n_threads_batch=args.threads or None,
        flash_attn=args.flash_attn,
        type_k=args.type_k,
        type_v=args.type_v,
    )
