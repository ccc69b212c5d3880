"""`make demo`: SmolLM2-135M writes past its context window, and the map of the cells shows how room is made.

Knows how to show things; the work is done by the same public names that everyone calls.
"""

from __future__ import annotations

import shutil
import sys
from typing import Literal

import pyggmlkv
from pyggmlkv.cli import output
from pyggmlkv.cli.fetch import progress_bar
from pyggmlkv.errors import PyggmlkvError
from pyggmlkv.fetch import fetch
from pyggmlkv.generate import ContextShift, Generation, generate
from pyggmlkv.sampling import Sampler, SamplerSettings
from pyggmlkv.text import Tokenizer

MODEL = "smollm2-135m"
N_CTX = 128
N_PREDICT = 200
PROMPT = "Once upon a time, in a village at the edge of the sea, there lived a clockmaker who"
SETTINGS = SamplerSettings(temp=0.9, top_k=40, top_p=0.9, seed=1)


def main() -> int:
    """Runs the demo; returns an exit code."""
    try:
        run()
    except KeyboardInterrupt:
        print()
        return 130
    except PyggmlkvError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def run() -> None:
    """Fetch, load, write, show."""
    with progress_bar() as progress:
        path = fetch(MODEL, progress)
    with pyggmlkv.Model.load(path) as model, pyggmlkv.Context(model, n_ctx=N_CTX) as ctx:
        tokenizer = Tokenizer.from_metadata(model.metadata)
        prompt = tokenizer.encode(PROMPT)
        show_heading(model, ctx, len(prompt))
        page = Page(ctx, len(prompt))
        generation = generate(
            ctx,
            prompt,
            N_PREDICT,
            Sampler(SETTINGS),
            ContextShift(n_keep=len(prompt), on_shift=page.on_shift),
        )
        page.write(PROMPT, "bold")
        decoder = tokenizer.stream()
        for token in generation:
            page.write(decoder.push(token))
        page.write(decoder.finish())
        page.end_line()
        show_result(ctx, generation)


def show_heading(model: pyggmlkv.Model, ctx: pyggmlkv.Context, n_prompt: int) -> None:
    """What runs here, in three lines."""
    name = model.metadata.get("general.name", model.arch)
    print(output.styled("pyggmlkv", "bold", "cyan") + " - a model writes past its context window\n")
    output.print_columns(
        [
            ("model", f"{name}: {model.n_params / 1e6:.0f} M parameters, {output.size(model.nbytes)}"),
            ("cache", f"{ctx.n_ctx} cells: {ctx.memory}"),
            (
                "plan",
                f"{n_prompt} prompt tokens are kept, {N_PREDICT} more are written, room is made by shifting",
            ),
        ],
        indent=2,
    )
    print()


def show_result(ctx: pyggmlkv.Context, generation: Generation) -> None:
    """How it went, in numbers."""
    t = generation.timings
    print("\n" + output.styled("the cache at the end", "bold"))
    print_map(ctx)
    speed = f"{t.decode_per_second:.1f} tokens/s"
    print(
        f"\n{len(generation.tokens)} tokens written in a context of {ctx.n_ctx} cells with {generation.n_shifts} shifts; "
        f"{ctx.n_graphs_reused} steps reused their graph, {ctx.n_graphs_built} built one"
    )
    print(
        f"prompt {t.prompt_per_second:.1f} tokens/s, then " + output.styled(speed, "bold", "green"),
        flush=True,
    )


class Page:
    """The text as it streams, wrapped to the terminal, interrupted by the maps of the first shift."""

    def __init__(self, ctx: pyggmlkv.Context, n_keep: int) -> None:
        self._ctx = ctx
        self._n_keep = n_keep
        self._column = 0
        self._width = min(shutil.get_terminal_size((96, 24)).columns, 96)

    def write(self, text: str, *styles: str) -> None:
        """Prints a piece; a line ends at the last space that fits."""
        for i, word in enumerate(text.split("\n")):
            if i:
                self.end_line()
            if self._column + len(word) > self._width and word.startswith(" "):
                self.end_line()
            if not self._column:
                word = word.removeprefix(" ")
            sys.stdout.write(output.styled(word, *styles) if word else "")
            self._column += len(word)
        sys.stdout.flush()

    def end_line(self) -> None:
        """Goes to a new line unless at the start of one."""
        if self._column:
            print()
        self._column = 0

    def on_shift(self, when: Literal["before", "after"], number: int) -> None:
        """The first shift is shown in full, later ones are marked in the text."""
        if number > 1:
            if when == "after":
                self.write(" [shift]", "dim")
            return
        if when == "before":
            self.end_line()
            print("\n" + output.styled(f"the context is full: all {self._ctx.n_ctx} cells are used", "bold"))
        else:
            print(
                output.styled(
                    f"the first {self._n_keep} positions stay, a block is dropped, the rest moves down",
                    "bold",
                )
            )
            print("  (keys marked ^ wait for their K-shift: the next step turns them to their new positions)")
        print_map(self._ctx)
        if when == "after":
            print()


def print_map(ctx: pyggmlkv.Context) -> None:
    """The map of the cells, indented; used and waiting cells stand out where colour is shown."""
    if ctx.memory is None:
        return
    heading, *lines = ctx.memory.render().splitlines()
    print("  " + output.styled(heading, "dim"))
    for line in lines:
        print("  " + (_coloured(line) if output.has_colour() else line))


def _coloured(line: str) -> str:
    if line.startswith("stream"):
        return line
    if set(line) <= {" ", "^"}:
        return output.styled(line, "yellow")
    label, cells = line[:9], line[9:]
    parts = [output.styled(run, "dim" if run[0] == "." else "cyan") for run in _runs(cells)]
    return output.styled(label, "dim") + "".join(parts)


def _runs(cells: str) -> list[str]:
    """Free and used cells in turns, so that a colour is set once a run."""
    runs: list[str] = []
    for cell in cells:
        if runs and (runs[-1][0] == ".") == (cell == "."):
            runs[-1] += cell
        else:
            runs.append(cell)
    return runs


if __name__ == "__main__":
    sys.exit(main())
