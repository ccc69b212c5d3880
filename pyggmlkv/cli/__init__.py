"""The command line: one module per command, each with NAME, HELP, `add_arguments` and `run`.

Knows commands, exit codes and where errors go; 0 is success, 1 an error, 2 wrong usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from pyggmlkv.cli import cells, devices, fetch, generate, info, state
from pyggmlkv.errors import PyggmlkvError, UsageError

COMMANDS: tuple[ModuleType, ...] = (info, generate, cells, state, devices, fetch)


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print one JSON value instead of text")
    shared.add_argument("--debug", action="store_true", help="show tracebacks")
    shared.add_argument(
        "-v", "--verbose", action="store_true", help="show the log, ggml's included, on stderr"
    )
    parser = argparse.ArgumentParser(
        prog="pyggmlkv", description="llama.cpp's memory layer, made scriptable."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP, parents=[shared])
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    args = build_parser().parse_args(argv)
    if args.verbose:
        logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s", stream=sys.stderr)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`| head`): nothing more can be said, and Python must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PyggmlkvError, OSError) as error:
        if args.debug:
            raise
        print(f"pyggmlkv {args.command}: {_sentence(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _sentence(error: Exception) -> str:
    """The error in one line; the system's own begin with the file, as ours do."""
    if (
        isinstance(error, OSError)
        and not isinstance(error, PyggmlkvError)
        and error.filename
        and error.strerror
    ):
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
