"""Steps that must be refused here, with a typed error and nothing changed; the reference would abort or obey.

Only the last two are asked of the reference too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pyggmlkv.errors import BatchError, PyggmlkvError, SequenceError, ShiftError

from .actions import Action, Tokens
from .view import View

Random = np.random.Generator
Maker = Callable[[View, Random], Action | None]
BEYOND = 256
"""No memory takes this sequence id."""


def refused(view: View, rng: Random) -> list[Action]:
    """One refusal that this memory, as it is now, must make."""
    for index in rng.permutation(len(MAKERS)):
        if (action := MAKERS[int(index)](view, rng)) is not None:
            return [action]
    return []


def _no(verb: str, arguments: tuple[object, ...], error: type[PyggmlkvError] | bool, why: str) -> Action:
    return Action(verb, arguments, (), error, why)


def _tokens(pos: list[int], seq_id: list[list[int]], token: int = 1) -> Tokens:
    return Tokens([token] * len(pos), pos, seq_id, "all")


def id_out_of_range(view: View, rng: Random) -> Action:
    calls: list[tuple[str, tuple[object, ...]]] = [
        ("seq_rm", (BEYOND, None, None)),
        ("seq_cp", (0, BEYOND, None, None)),
        ("seq_keep", (BEYOND,)),
    ]
    verb, arguments = calls[int(rng.integers(len(calls)))]
    return _no(verb, arguments, SequenceError, "there is no such sequence")


def division_by_zero(view: View, rng: Random) -> Action | None:
    if not view.kind.shifts:
        return None
    return _no("seq_div", (0, None, None, 0), SequenceError, "the divisor is 0")


def position_twice(view: View, rng: Random) -> Action | None:
    if view.n_pos > 1:
        return None
    pos = view.next(0)
    return _no("decode", (_tokens([pos, pos], [[0], [0]]),), BatchError, "a position twice")


def part_of_a_stream(view: View, rng: Random) -> Action | None:
    last = view.last(0)
    if not view.has_streams or last is None or view.is_cut_deep(0):
        return None
    return _no("seq_cp", (0, 1, None, last), SequenceError, "a copy between streams takes all")


def part_of_a_state(view: View, rng: Random) -> Action | None:
    last = view.state_pos(0)
    if last is None or last < 1:
        return None
    if rng.random() < 0.5:
        return _no("seq_rm", (0, 0, last), False, "a state cannot forget its beginning")
    return _no("seq_cp", (0, 1, 1, None), SequenceError, "a state cannot be copied in part")


def shift_in_two_dimensions(view: View, rng: Random) -> Action | None:
    if view.kind.shifts:
        return None
    verb, arguments = [("seq_add", (0, None, None, 2)), ("seq_div", (0, None, None, 2))][int(rng.integers(2))]
    return _no(verb, arguments, ShiftError, "positions have several dimensions")


def shared_between_streams(view: View, rng: Random) -> Action | None:
    if not (view.has_streams or view.memory_kind == "recurrent") or view.held(0) != view.held(1):
        return None
    return _no("decode", (_tokens([view.next(0)], [[0, 1]]),), PyggmlkvError, "sequences of two streams")


def gap(view: View, rng: Random) -> Action | None:
    if view.n_pos > 1 or view.last(0) is None or view.is_cut_deep(0):
        return None
    return Action("decode", (_tokens([view.next(0) + 2], [[0]]),), None, BatchError, "a gap")


def no_such_token(view: View, rng: Random) -> Action:
    batch = _tokens([view.next(0)], [[0]], view.pair.n_vocab)
    return Action("decode", (batch,), None, BatchError, "no such token")


MAKERS: tuple[Maker, ...] = (
    id_out_of_range,
    division_by_zero,
    position_twice,
    part_of_a_stream,
    part_of_a_state,
    shift_in_two_dimensions,
    shared_between_streams,
    gap,
    no_such_token,
)
