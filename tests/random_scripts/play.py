"""Plays a script on both sides and stops at the first difference.

A refusal here must be one that was foreseen, or be the reference's as well; nothing may then have changed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import pyggmlkv
from pyggmlkv.errors import NoSlotError, PyggmlkvError
from tests.oracle.libllama import OracleError
from tests.side_by_side import Pair

from .actions import Action, Saved
from .compare import differences, snapshot
from .kinds import Kind
from .resolve import resolve
from .steps import Step
from .view import View


@dataclasses.dataclass(slots=True)
class Outcome:
    """What was done, as Python, and what differed after the last of it; empty for a script that is all equal."""

    done: list[str] = dataclasses.field(default_factory=list)
    differ: list[str] = dataclasses.field(default_factory=list)
    n_rows: int = 0
    n_refused: int = 0
    n_loads: int = 0


def play(pair: Pair, kind: Kind, script: list[Step]) -> Outcome:
    """The script over a pair of contexts whose memories are emptied first."""
    player = Player(View(pair, kind))
    player.perform(Action("update"))
    player.run([Action("clear", (True,)), *resolve(Step("encode", 1), player.view, [])])
    for step in script:
        if player.outcome.differ or player.ended:
            break
        player.run(resolve(step, player.view, player.saved))
    return player.outcome


class Player:
    """One script under way."""

    def __init__(self, view: View) -> None:
        self.view, self.outcome, self.ended = view, Outcome(), False
        self.saved: list[Saved] = []

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            self.outcome.done.append(str(action))
            try:
                self.outcome.differ += self.do(action)
            except (PyggmlkvError, OracleError) as error:
                self.outcome.differ.append(f"{type(error).__name__}: {error}")
            if self.outcome.differ or self.ended:
                return

    def do(self, action: Action) -> list[str]:
        if action.refused is not None:
            return self.refuse(action)
        found = self.perform(action)
        return found if found or self.ended else differences(self.view)

    def perform(self, action: Action) -> list[str]:
        pair = self.view.pair
        if action.verb in ("decode", "encode"):
            return self.decode(action)
        if action.verb == "save":
            return self.save(action.arguments[0])
        if action.verb == "load":
            return self.load(action)
        if action.verb == "update":
            pair.ours.memory.update()  # type: ignore[union-attr]
            pair.reference.memory.update()
            return []
        mine = getattr(pair.ours.memory, action.verb)(*action.arguments)
        calls = ((action.verb, action.arguments),) if action.reference is None else action.reference
        theirs = [getattr(pair.reference.memory, verb)(*arguments) for verb, arguments in calls]
        return [] if all(mine == said for said in theirs) else [f"says {mine}, there {theirs}"]

    # batches

    def decode(self, action: Action) -> list[str]:
        """A slot that is not found must not be found there either; upstream has then done pending updates.

        With several streams upstream gives some of them another's search head back: the end of the script.
        """
        pair, arguments = self.view.pair, action.arguments[0].arguments()
        before = snapshot(self.view)
        try:
            getattr(pair.ours, action.verb)(pyggmlkv.Batch(**arguments))
        except NoSlotError as error:
            return self.no_slot(action, error, before)
        getattr(pair.reference, action.verb)(**arguments)
        self.view.last_batch = action.arguments[0] if action.verb == "decode" else self.view.last_batch
        if action.verb == "encode":
            return _rows(pair.ours.embeddings, pair.reference.embeddings, "embeddings")
        if pair.reference.n_outputs == 0:
            return [] if len(pair.ours.logits) == 0 else [f"{len(pair.ours.logits)} rows, none asked for"]
        self.outcome.n_rows += pair.reference.n_outputs
        return _rows(pair.ours.logits, pair.reference.logits, "logits")

    def no_slot(self, action: Action, error: NoSlotError, before: list[Any]) -> list[str]:
        pair = self.view.pair
        if snapshot(self.view) != before:
            return [f"memory changed although: {error}"]
        self.outcome.n_refused += 1
        try:
            pair.reference.decode(**action.arguments[0].arguments())
        except OracleError:
            self.ended = self.view.has_streams
            pair.ours.memory.update()  # type: ignore[union-attr]
            return []
        return [f"the reference decodes, here: {error}"]

    # refusals

    def refuse(self, action: Action) -> list[str]:
        pair, before = self.view.pair, snapshot(self.view)
        self.outcome.n_refused += 1
        said = self.ask(action)
        if said is not None:
            return [f"not refused as it should be ({action.why}): {said}"]
        if snapshot(self.view) != before:
            return [f"refused ({action.why}), but memory changed"]
        if action.reference is None:
            try:
                pair.reference.decode(**action.arguments[0].arguments())
            except OracleError:
                return differences(self.view)
            return [f"the reference does not refuse ({action.why})"]
        return []

    def ask(self, action: Action) -> str | None:
        """None when it is refused in the way foreseen."""
        pair = self.view.pair
        try:
            if action.verb == "decode":
                pair.ours.decode(pyggmlkv.Batch(**action.arguments[0].arguments()))
                said: Any = "decoded"
            else:
                said = getattr(pair.ours.memory, action.verb)(*action.arguments)
        except PyggmlkvError as error:
            right = isinstance(action.refused, type) and isinstance(error, action.refused)
            return None if right else f"{type(error).__name__}: {error}"
        return None if action.refused is False and said is False else f"says {said}"

    # states

    def save(self, seq_id: int | None) -> list[str]:
        """Equal bytes on both sides."""
        data, view = self.view.pair.ours.state_get(seq_id), self.view
        attention = [
            p for p, i in zip(view.parts, view.reference_parts, strict=True) if i.kind != "recurrent"
        ]
        used = [[len(c.find(seq_id)) for c in part.streams.cells] for part in attention]
        n_streams = [np.count_nonzero(row) for row in used]
        self.saved.append(Saved(seq_id, data, max(n_streams, default=1), 0 in n_streams))
        return [] if data == view.pair.reference.state_get(seq_id) else ["saved states differ"]

    def load(self, action: Action) -> list[str]:
        """The same bytes into both. Where there is no room, upstream has emptied what it was to fill: the end."""
        pair, (index, seq_id) = self.view.pair, action.arguments
        data = self.saved[index].data
        before = snapshot(self.view)
        try:
            pair.ours.state_set(data, seq_id)
        except NoSlotError as error:
            self.ended = True
            self.outcome.n_refused += 1
            if snapshot(self.view) != before:
                return [f"memory changed although: {error}"]
            return (
                [] if pair.reference.state_set(data, seq_id) == 0 else [f"the reference loads, here: {error}"]
            )
        self.outcome.n_loads += 1
        if action.reference == ():
            self.ended = True
            return [] if pair.ours.state_get(seq_id) == data else ["a loaded state is saved otherwise"]
        for verb, arguments in action.reference or ():
            getattr(pair.reference.memory, verb)(*arguments)
        n = pair.reference.state_set(data, seq_id)
        return [] if n == len(data) else [f"the reference read {n} of {len(data)} bytes"]


def _rows(ours: Any, theirs: Any, what: str) -> list[str]:
    if ours.shape != theirs.shape:
        return [f"{what}: shape {ours.shape}, there {theirs.shape}"]
    if ours.tobytes() == theirs.tobytes():
        return []
    bad = np.flatnonzero((ours.view(np.uint32) != theirs.view(np.uint32)).any(axis=1))
    gap = float(np.nanmax(np.abs(ours - theirs)))
    return [f"{what}: {len(bad)} of {len(ours)} rows differ, first row {int(bad[0])}, largest gap {gap:g}"]
