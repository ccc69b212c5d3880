"""`pyggmlkv info MODEL`: what a model file holds, without loading its weights."""

from __future__ import annotations

import argparse

from pyggmlkv.cli import arguments, output

NAME = "info"
HELP = "show what a model file holds: metadata, hyperparameters, tensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")


def run(args: argparse.Namespace) -> int:
    from pyggmlkv.gguf import describe

    found = describe(args.model)
    output.print_json(found)
    return 0
