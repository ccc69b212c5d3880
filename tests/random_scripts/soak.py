"""Many scripts over one kind, in contexts that are opened once a setting and used again.

Every script begins with empty memories. Used by the tests and by `python -m tests.random_scripts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.oracle.libllama import Library
from tests.oracle.tiny_models import TinyModel
from tests.side_by_side import Models, Pair, Setup

from .kinds import KINDS, Kind
from .play import Outcome, play
from .shrink import report, shrink
from .steps import Step, draw_script

PathOf = Callable[[TinyModel], Path]


@dataclasses.dataclass(slots=True)
class Tally:
    """What the scripts of a kind came to."""

    n_scripts: int = 0
    n_actions: int = 0
    n_rows: int = 0
    n_refused: int = 0
    n_loads: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.n_scripts += 1
        self.n_actions += len(outcome.done)
        self.n_rows += outcome.n_rows
        self.n_refused += outcome.n_refused
        self.n_loads += outcome.n_loads


def run_kind(
    library: Library,
    path_of: PathOf,
    name: str,
    numbers: Iterable[int],
    n_steps: int,
    *,
    most_failures: int = 1,
) -> Tally:
    """Plays script after script, until so many have failed."""
    kind, tally = KINDS[name], Tally()
    models: dict[str, Models] = {}
    pairs: dict[tuple[str, Setup], Pair] = {}
    try:
        for number in numbers:
            model, setup = kind.case(number)
            key = model.file_name
            if key not in models:
                models[key] = Models(library, path_of(model))
            if (key, setup) not in pairs:
                pairs[key, setup] = Pair(models[key], setup)
            script = draw_script(number, n_steps)
            outcome = play(pairs[key, setup], kind, script)
            tally.add(outcome)
            if outcome.differ:
                pairs.pop((key, setup)).close()
                tally.failures.append(
                    _small(models[key], kind, setup, (name, number, model.recipe), outcome, script)
                )
            if len(tally.failures) >= most_failures:
                break
        return tally
    finally:
        for pair in pairs.values():
            pair.close()
        for opened in models.values():
            opened.close()


def _small(
    models: Models, kind: Kind, setup: Setup, what: tuple[str, int, str], outcome: Outcome, script: list[Step]
) -> str:
    def again(steps: list[Step]) -> Outcome:
        with Pair(models, setup) as pair:
            return play(pair, kind, steps)

    name, number, recipe = what
    return report(name, number, f"{recipe}, {setup.label}", outcome, shrink(script, again))
