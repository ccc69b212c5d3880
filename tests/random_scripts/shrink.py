"""Makes a failing script small, by leaving out steps while it still fails, and says how to see it again."""

from __future__ import annotations

from collections.abc import Callable

from .play import Outcome
from .steps import Step

Play = Callable[[list[Step]], Outcome]


def shrink(script: list[Step], play: Play, tries: int = 80) -> tuple[list[Step], Outcome] | None:
    """A script from which no single step can be left out, and its outcome; None if it does not fail by itself."""
    outcome = play(script)
    if not outcome.differ:
        return None
    size = max(1, len(script) // 2)
    while size and tries:
        at = 0
        while at < len(script) and tries:
            shorter = script[:at] + script[at + size :]
            tries -= 1
            if (found := play(shorter)).differ:
                script, outcome = shorter, found
            else:
                at += size
        size //= 2
    return script, outcome


def report(
    kind: str, number: int, label: str, first: Outcome, small: tuple[list[Step], Outcome] | None
) -> str:
    """For people: the seed, the small script as Python, what differs."""
    shown = first if small is None else small[1]
    head = [f"kind {kind}, script {number} ({label})"]
    if small is None:
        head.append("equal in contexts of its own: it needs the scripts before it in the same contexts")
    again = f"again: python -m tests.random_scripts {kind} --first {number} --scripts 1"
    return "\n".join(
        [*head, *(f"  {line}" for line in shown.done), *(f"! {line}" for line in shown.differ), again]
    )
