"""From a step to what is done: legal on both sides, whatever memory holds by now.

What the reference would abort on, or answers differently by a listed difference, is avoided here by a rule that is
named where it is applied (see UPSTREAM.md), never by a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .actions import Action, Call, Saved, Tokens
from .refusals import refused
from .steps import Step
from .view import View

Random = np.random.Generator
FEW, SOME, MANY = (1, 1), (2, 8), (9, 40)


def resolve(step: Step, view: View, saved: list[Saved]) -> list[Action]:
    """The actions of a step; none where it makes no sense now."""
    rng = np.random.default_rng(step.seed)
    if step.verb == "load":
        return load(view, rng, saved)
    return RESOLVERS[step.verb](view, rng)


# decoding


def decode(view: View, rng: Random) -> list[Action]:
    """One to three sequences, interleaved somehow; now and then embeddings, or tokens that sequences share."""
    batch = draw_batch(view, rng)
    if view.reuses_cells_late(batch.arguments()):
        batch = first_part(batch, min(view.pair.setup.n_ubatch, len(batch.tokens)))
        if view.reuses_cells_late(batch.arguments()):
            return []
    return [Action("decode", (batch,))]


def again(view: View, rng: Random) -> list[Action]:
    """A batch of the same shape as the last one, behind it: its graph is used again unless something forbids it."""
    last = view.last_batch
    if last is None or last.embd_seed is not None:
        return []
    following = {s: view.next(s) for ids in last.seq_id for s in ids}
    queue = []
    for ids in last.seq_id:
        if len({following[s] for s in ids}) > 1 or (len(ids) > 1 and not can_couple(view, ids)):
            return []
        queue.append((ids, following[ids[0]]))
        following.update({s: following[s] + 1 for s in ids})
    tokens = [int(t) for t in rng.integers(0, view.pair.n_vocab, len(queue))]
    batch = Tokens(tokens, [p for _, p in queue], last.seq_id, last.logits)
    return [] if view.reuses_cells_late(batch.arguments()) else [Action("decode", (batch,))]


def draw_batch(view: View, rng: Random) -> Tokens:
    n_parts = min(view.n_seq, int(rng.choice([1, 2, 3], p=[0.6, 0.25, 0.15])))
    chosen = [int(s) for s in rng.permutation(view.n_seq)[:n_parts]]
    low, high = [FEW, SOME, MANY][int(rng.choice(3, p=[0.35, 0.35, 0.3]))]
    if view.has_window and rng.random() < 0.15:
        low, high = 60, 120
    parts = {s: int(rng.integers(low, high + 1)) for s in chosen}
    if rng.random() < 0.5:
        parts = dict.fromkeys(parts, parts[chosen[0]])
    start = {s: start_of(view, rng, s) for s in chosen}
    queue: list[tuple[list[int], int]] = []
    if can_couple(view, chosen) and rng.random() < 0.4:
        first = start[chosen[0]]
        start = dict.fromkeys(chosen, first)
        ids = [int(s) for s in rng.permutation(chosen)]
        n = parts[chosen[0]]
        queue = [(ids, first + i) for i in range(n)]
        start = dict.fromkeys(chosen, first + n)
        parts = {s: int(rng.integers(0, 5)) for s in chosen}
    tails = interleaved(rng, [[([s], start[s] + i) for i in range(parts[s])] for s in chosen])
    return finish(view, rng, queue + tails)


def start_of(view: View, rng: Random, seq_id: int) -> int:
    last = view.last(seq_id)
    if last is None:
        return int(rng.choice(view.kind.first))
    jump = int(rng.integers(0, 3)) if view.n_pos > 1 and rng.random() < 0.3 else 0
    return last + 1 + jump


def can_couple(view: View, seq_ids: list[int]) -> bool:
    """Only in one stream, and only while the sequences hold the same positions, on both sides."""
    if len(seq_ids) < 2 or view.has_streams or view.memory_kind == "recurrent":
        return False
    return len({view.held(s) for s in seq_ids}) == 1 and not any(
        view.is_cut_deep(s) or view.is_one_sided(s) for s in seq_ids
    )


def interleaved(rng: Random, rows: list[list[tuple[list[int], int]]]) -> list[tuple[list[int], int]]:
    """Block after block, round robin, or shuffled; each row keeps its own order."""
    how = int(rng.integers(3))
    if how == 0:
        return [token for row in rows for token in row]
    order = [i for i, row in enumerate(rows) for _ in row]
    if how == 1:
        order = [
            i for n in range(max(map(len, rows), default=0)) for i, row in enumerate(rows) if n < len(row)
        ]
    else:
        order = [int(i) for i in rng.permutation(order)]
    left = [iter(row) for row in rows]
    return [next(left[i]) for i in order]


def finish(view: View, rng: Random, queue: list[tuple[list[int], int]]) -> Tokens:
    n = len(queue)
    ids = [int(t) for t in rng.integers(0, view.pair.n_vocab, n)]
    outputs: list[str | list[int]] = [
        "all",
        "last",
        "none",
        sorted(int(i) for i in np.flatnonzero(rng.random(n) < 0.4)),
    ]
    logits = outputs[int(rng.choice(4, p=[0.5, 0.15, 0.1, 0.25]))]
    seq_id = [s for s, _ in queue]
    pos = [p for _, p in queue]
    if rng.random() < 0.9:
        return Tokens(ids, pos, seq_id, logits)
    rows: list[int] | list[list[int]] = pos
    if view.n_pos > 1:
        rows = [pos, *(([int(p) for p in rng.integers(0, 9, n)]) for _ in range(2)), [0] * n]
    return Tokens(ids, rows, seq_id, logits, int(rng.integers(1000)), view.pair.models.reference.n_embd)


def first_part(batch: Tokens, n: int) -> Tokens:
    """The first `n` tokens with the ids of the first token: one ubatch in every memory."""
    keep = [i for i, ids in enumerate(batch.seq_id) if ids == batch.seq_id[0]][:n]
    pos = batch.pos
    rows = [[row[i] for i in keep] for row in pos] if isinstance(pos[0], list) else [pos[i] for i in keep]
    return Tokens(
        [batch.tokens[i] for i in keep],
        rows,
        [batch.seq_id[i] for i in keep],
        batch.logits if isinstance(batch.logits, str) else "all",
        batch.embd_seed,
        batch.n_embd,
    )


def encode(view: View, rng: Random) -> list[Action]:
    """A text that every sequence attends to; nothing where there is no encoder."""
    if not view.pair.has_encoder:
        return []
    n = int(rng.integers(1, view.pair.setup.n_ubatch + 1))
    ids = [int(t) for t in rng.integers(0, view.pair.n_vocab, n)]
    return [Action("encode", (Tokens(ids, list(range(n)), [list(range(view.n_seq))] * n, "all"),))]


# sequence operations


def seq_rm(view: View, rng: Random) -> list[Action]:
    """All, the end, the middle or the beginning of a sequence, or of every sequence."""
    seq_id: int | None = int(rng.integers(view.n_seq))
    assert seq_id is not None
    if view.has_state:
        return state_rm(view, rng, seq_id)
    if rng.random() < 0.1:
        last = max(view.highest(s) for s in range(view.n_seq))
        return [Action("seq_rm", (None, *range_in(rng, last)))]
    return [Action("seq_rm", (seq_id, *range_in(rng, view.highest(seq_id))))]


def state_rm(view: View, rng: Random, seq_id: int) -> list[Action]:
    """A recurrent state goes whole or not at all.

    A part of it is False here; upstream says True to a range that ends before the state's position, and drops the cells
    of the attention part. Upstream does not reset tails when it removes all sequences at once, and aborts later.
    """
    how = rng.random()
    if how < 0.15:
        return [Action("seq_rm", (None, None, None), tuple(rm_of(s) for s in range(view.n_seq)))]
    last = view.state_pos(seq_id)
    if how < 0.6 or last is None:
        return [Action("seq_rm", (seq_id, None, None if rng.random() < 0.5 else view.highest(seq_id) + 1))]
    if last == 0 or how < 0.7:
        return [Action("seq_rm", (seq_id, view.highest(seq_id) + 1, None))]
    return [Action("seq_rm", (seq_id, int(rng.integers(1, last + 1)), None))]


def rm_of(seq_id: int) -> Call:
    return "seq_rm", (seq_id, None, None)


def seq_cp(view: View, rng: Random) -> list[Action]:
    """Whole, or in one stream a part; the target is emptied first or not.

    It is where it has a cell of the source already: upstream counts that cell's position twice, and never forgets it.
    """
    src, dst = (int(s) for s in rng.permutation(view.n_seq)[:2])
    emptied = rng.random() < 0.5 or view.shares_cells(src, dst)
    before = [Action("seq_rm", (dst, None, None))] if emptied else []
    last = view.highest(src)
    if not view.has_streams and not view.has_state:
        return [*before, Action("seq_cp", (src, dst, *range_in(rng, last)))]
    if rng.random() < 0.3 and last >= 0:
        # upstream takes an open range only (streams), or any range for the whole (states)
        return [*before, Action("seq_cp", (src, dst, None, last + 1), (("seq_cp", (src, dst, None, None)),))]
    return [*before, Action("seq_cp", (src, dst, None, None))]


def seq_keep(view: View, rng: Random) -> list[Action]:
    return [Action("seq_keep", (int(rng.integers(view.n_seq)),))]


def seq_add(view: View, rng: Random) -> list[Action]:
    """Up or down; below 0 a cell is freed. A recurrent state stays at 0 or above: upstream keeps it at a negative
    position."""
    if not may_shift(view):
        return []
    seq_id = int(rng.integers(view.n_seq))
    p0, p1 = range_in(rng, view.highest(seq_id))
    delta = int(rng.choice([-1, 1]) * rng.integers(1, 12))
    state = view.state_pos(seq_id)
    if state is not None and state + delta < 0:
        delta = -delta
    return [Action("seq_add", (seq_id, p0, p1, delta))]


def seq_div(view: View, rng: Random) -> list[Action]:
    if not may_shift(view):
        return []
    seq_id = int(rng.integers(view.n_seq))
    return [Action("seq_div", (seq_id, *range_in(rng, view.highest(seq_id)), int(rng.integers(1, 5))))]


def may_shift(view: View) -> bool:
    """Not with M-RoPE (upstream aborts), nor with quantised keys that are not rotated (upstream crashes)."""
    quantised = view.pair.setup.type_k.startswith("q") and view.has_attention
    return view.kind.shifts and not (quantised and not view.reference_parts[0].attn_rot_k)


def clear(view: View, rng: Random) -> list[Action]:
    """After an update: upstream keeps stream copies that wait, and does them on the empty cells."""
    return [Action("update"), Action("clear", (bool(rng.random() < 0.5),))]


def update(view: View, rng: Random) -> list[Action]:
    return [Action("update")]


def range_in(rng: Random, last: int) -> tuple[int | None, int | None]:
    """All, the end, the beginning or the middle of positions 0 .. last."""
    a, b = sorted(int(p) for p in rng.integers(0, last + 2, 2)) if last >= 0 else (0, 1)
    near = max(0, last - int(rng.integers(0, 12)))
    ranges: list[tuple[int | None, int | None]] = [
        (None, None),
        (near, None),
        (a, None),
        (None, b + 1),
        (a, b + 1),
    ]
    return ranges[int(rng.integers(len(ranges)))]


# state


def save(view: View, rng: Random) -> list[Action]:
    """After an update: it is done first here, and not at all there."""
    seq_id = None if rng.random() < 0.4 else int(rng.integers(view.n_seq))
    return [Action("update"), Action("save", (seq_id,))]


def load(view: View, rng: Random, saved: list[Saved]) -> list[Action]:
    """A saved state, a sequence's perhaps under another id. After an update: see `clear`.

    Upstream leaves a part as it is for which nothing was saved, so it is emptied there first. Of a whole state with
    several streams it keeps the last one only: such a state is loaded here alone.
    """
    if not saved:
        return []
    index = int(rng.integers(len(saved)))
    chosen = saved[index]
    seq_id = None if chosen.seq_id is None else int(rng.integers(view.n_seq))
    before: tuple[Call, ...] | None = None
    if chosen.has_empty_part:
        before = (("clear", (True,)),) if seq_id is None else (rm_of(seq_id),)
    if seq_id is None and chosen.n_streams > 1:
        before = ()
    return [Action("update"), Action("load", (index, seq_id), before)]


RESOLVERS: Mapping[str, Callable[[View, Random], list[Action]]] = {
    "decode": decode,
    "again": again,
    "encode": encode,
    "seq_rm": seq_rm,
    "seq_cp": seq_cp,
    "seq_keep": seq_keep,
    "seq_add": seq_add,
    "seq_div": seq_div,
    "clear": clear,
    "update": update,
    "save": save,
    "refused": refused,
}
