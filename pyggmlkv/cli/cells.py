"""`pyggmlkv cells MODEL -p PROMPT`: decodes a prompt and shows which cells of the cache it took."""

from __future__ import annotations

import argparse

from pyggmlkv.cli import arguments, output
from pyggmlkv.errors import UsageError

NAME = "cells"
HELP = "decode a prompt and show the map of the cache's cells"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    arguments.add_prompt(parser)
    arguments.add_context(parser)


def run(args: argparse.Namespace) -> int:
    import pyggmlkv
    from pyggmlkv.generate import generate
    from pyggmlkv.text import Tokenizer

    with pyggmlkv.Model.load(args.model) as model:
        prompt = arguments.prompt_tokens(args, Tokenizer.from_metadata(model.metadata))
        with arguments.make_context(model, args) as ctx:
            memory = ctx.memory
            if memory is None:
                raise UsageError(
                    f"a model of architecture {model.arch} has no memory: there are no cells to show"
                )
            for _ in generate(ctx, prompt, n_predict=0):
                pass
            if args.json:
                output.print_json({"memory": str(memory), "prompt_tokens": prompt, "map": memory.render()})
            else:
                print(memory)
                print(memory.render())
    return 0
