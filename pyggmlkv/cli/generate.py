"""`pyggmlkv generate MODEL -p PROMPT`: continues a text, streaming it as it comes."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from pyggmlkv.cli import arguments, output
from pyggmlkv.errors import UsageError
from pyggmlkv.generate import ContextShift, Generation
from pyggmlkv.generate import generate as generate_tokens
from pyggmlkv.sampling import Sampler, SamplerSettings

if TYPE_CHECKING:
    from pyggmlkv.text import Tokenizer

NAME = "generate"
HELP = "continue a text with a model, streaming it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    arguments.add_prompt(parser)
    arguments.add_context(parser)
    add = parser.add_argument
    add("-n", "--n-predict", type=arguments.count, default=128, metavar="N", help="tokens to generate (128)")
    add("--temp", type=float, default=0.0, help="temperature; 0 is greedy (0)")
    add("--top-k", type=arguments.count, default=40, help="keep the K most likely; 0 keeps all (40)")
    add("--top-p", type=float, default=0.95, help="keep the most likely up to this sum (0.95)")
    add("--seed", type=int, default=None, help="seed for sampling; unset draws a new one")
    add("--context-shift", action="store_true", help="drop old cells and go on when the context is full")
    add("--keep", type=arguments.count, default=0, metavar="N", help="positions a context shift keeps (0)")
    add("--ignore-eos", action="store_true", help="go on after an end token")


def run(args: argparse.Namespace) -> int:
    import pyggmlkv
    from pyggmlkv.text import Tokenizer

    sampler = Sampler(SamplerSettings(args.temp, args.top_k, args.top_p, args.seed))
    shift = ContextShift(n_keep=args.keep) if args.context_shift else False
    if args.keep and not args.context_shift:
        raise UsageError("--keep has a meaning only with --context-shift")
    with pyggmlkv.Model.load(args.model) as model:
        tokenizer = Tokenizer.from_metadata(model.metadata)
        prompt = arguments.prompt_tokens(args, tokenizer)
        with arguments.make_context(model, args) as ctx:
            stop = frozenset() if args.ignore_eos else tokenizer.eog
            generation = generate_tokens(ctx, prompt, args.n_predict, sampler, shift, stop)
            text = stream(generation, tokenizer, echo=not args.json)
    if args.json:
        output.print_json(result(generation, text))
    else:
        print(output.styled(summary(generation), "dim"), file=sys.stderr)
    return 0


def stream(generation: Generation, tokenizer: Tokenizer, echo: bool) -> str:
    """Runs the generation; prints the text as it comes when `echo`. Returns the text."""
    decoder, parts = tokenizer.stream(), []
    for token in generation:
        parts.append(decoder.push(token))
        if echo:
            print(parts[-1], end="", flush=True)
    parts.append(decoder.finish())
    if echo:
        print(parts[-1])
    return "".join(parts)


def result(generation: Generation, text: str) -> dict[str, object]:
    """What `--json` prints."""
    timings = generation.timings
    return {
        "text": text,
        "prompt_tokens": list(generation.prompt),
        "tokens": generation.tokens,
        "stop_reason": generation.stop_reason,
        "context_shifts": generation.n_shifts,
        "timings": {
            "prompt_n": timings.n_prompt,
            "prompt_seconds": round(timings.prompt_seconds, 6),
            "prompt_per_second": round(timings.prompt_per_second, 2),
            "decode_n": timings.n_decode,
            "decode_seconds": round(timings.decode_seconds, 6),
            "decode_per_second": round(timings.decode_per_second, 2),
        },
    }


def summary(generation: Generation) -> str:
    """One line on how fast it was and why it ended."""
    t = generation.timings
    shifts = f", {generation.n_shifts} context shifts" if generation.n_shifts else ""
    return (
        f"[prompt {t.n_prompt} tokens at {t.prompt_per_second:.0f}/s, then {len(generation.tokens)} tokens at "
        f"{t.decode_per_second:.0f}/s{shifts}, stopped by: {generation.stop_reason}]"
    )
