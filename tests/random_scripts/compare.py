"""Looks at everything both sides hold: cells, heads, positions, stored bytes, saved states.

Bytes are compared, never values with a tolerance. Of empty recurrent cells the last source (`src0`) is left out: it is
an input of the step before, and upstream does not reset it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .view import View


def differences(view: View) -> list[str]:
    """What differs, in words; empty when all is equal.

    States only while no shift or copy waits: saving does those first here, upstream saves keys as they were.
    """
    found = [line for index in range(len(view.parts)) for line in _part(view, index)]
    found += _positions(view)
    if not view.memory.has_update:
        found += _states(view)
    return found


def _part(view: View, index: int) -> Iterator[str]:
    part, info = view.parts[index], view.reference_parts[index]
    if info.kind == "recurrent":
        yield from _recurrent(view, index)
        return
    memory = view.pair.reference.memory
    if (part.spec.kv_size, part.spec.n_stream) != (info.n_cells, info.n_stream):
        yield f"{info.kind}: {part.spec.kv_size} cells in {part.spec.n_stream} streams, there {info.n_cells} in {info.n_stream}"
        return
    for stream, ours in enumerate(part.streams.cells):
        theirs = memory.cells(index, stream)
        what = f"{info.kind} stream {stream}"
        columns = [
            ("pos", ours.pos, theirs.pos),
            ("shift", ours.shift, theirs.shift),
            *_sets(ours.seq, theirs.seq),
        ]
        if ours.ext_x is not None:
            columns += [("ext x", ours.ext_x, theirs.x), ("ext y", ours.ext_y, theirs.y)]
        yield from _columns(what, columns)
        if part.streams.heads[stream] != theirs.head:
            yield f"{what}: head {part.streams.heads[stream]}, there {theirs.head}"
    for slot, layer in enumerate(part.storage.owners):
        il, k, v = memory.storage(index, slot)
        yield from _bytes(f"{info.kind} layer {layer.spec.il} K", layer.k, k)
        yield from _bytes(f"{info.kind} layer {layer.spec.il} V", layer.v, v)
        if il != layer.spec.il:
            yield f"{info.kind}: layer {layer.spec.il} is layer {il} there"


def _recurrent(view: View, index: int) -> Iterator[str]:
    part, memory = view.parts[index], view.pair.reference.memory
    ours, theirs = part.states, memory.cells(index)
    info = memory.parts[index]
    columns = [("pos", ours.pos, theirs.pos), ("src", ours.src, theirs.x), ("tail", ours.tail, theirs.y)]
    yield from _columns("recurrent", [*columns, *_sets(ours.seq, theirs.seq)])
    if (ours.head, ours.used) != (info.head, info.used):
        yield f"recurrent: head {ours.head}, {ours.used} used; there {info.head}, {info.used}"
    for il, (r, s) in part.tensors.items():
        _, r_bytes, s_bytes = memory.storage(index, il)
        yield from _bytes(f"recurrent layer {il} r", r, r_bytes)
        yield from _bytes(f"recurrent layer {il} s", s, s_bytes)


def _sets(ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    """Sequence sets word by word; words beyond this side's are 0 there."""
    out = [("sequences", ours[:, w], theirs[:, w]) for w in range(ours.shape[1])]
    return out + [
        ("sequences", np.zeros(len(theirs), np.uint64), theirs[:, w])
        for w in range(len(out), theirs.shape[1])
    ]


def _columns(what: str, columns: list[tuple[str, Any, Any]]) -> Iterator[str]:
    for name, ours, theirs in columns:
        if not np.array_equal(ours, theirs):
            cells = np.flatnonzero(ours != theirs)
            first = int(cells[0])
            yield f"{what}: {name} of {len(cells)} cells, first cell {first}: {ours[first]}, there {theirs[first]}"


def _bytes(what: str, tensor: Any, theirs: bytes) -> Iterator[str]:
    ours = b"" if tensor is None else tensor.get_bytes()
    if ours == theirs:
        return
    if len(ours) != len(theirs):
        yield f"{what}: {len(ours)} bytes stored, there {len(theirs)}"
        return
    at = np.flatnonzero(np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8))
    yield f"{what}: {len(at)} of {len(ours)} bytes stored differ, the first is byte {int(at[0])}"


def _positions(view: View) -> Iterator[str]:
    """As the reference's, but of a sequence that the window part has lost: then the full part answers here.

    Of one that only one part of a hybrid has, the highest only.
    """
    there = view.pair.reference.memory
    for seq_id in range(view.n_seq):
        if view.is_cut_deep(seq_id):
            continue
        ours, theirs = view.held(seq_id), (there.seq_pos_min(seq_id), there.seq_pos_max(seq_id))
        if view.is_one_sided(seq_id):
            ours, theirs = (None, ours[1]), (None, theirs[1])
        if ours != theirs:
            yield f"sequence {seq_id}: positions {ours}, there {theirs}"


def _states(view: View) -> Iterator[str]:
    for seq_id in (None, *range(view.n_seq)):
        ours, theirs = view.pair.ours.state_get(seq_id), view.pair.reference.state_get(seq_id)
        if ours != theirs:
            whose = "all" if seq_id is None else f"sequence {seq_id}"
            yield f"state of {whose}: {len(ours)} bytes, there {len(theirs)}{_first(ours, theirs)}"


def _first(ours: bytes, theirs: bytes) -> str:
    n = min(len(ours), len(theirs))
    at = np.flatnonzero(np.frombuffer(ours[:n], np.uint8) != np.frombuffer(theirs[:n], np.uint8))
    return f", the first that differs is byte {int(at[0])}" if at.size else ""


def snapshot(view: View) -> list[Any]:
    """Everything this side holds, for `before == after`; sequence extents are asked for, as they are kept lazily."""
    out: list[Any] = []
    for part, info in zip(view.parts, view.reference_parts, strict=True):
        if info.kind == "recurrent":
            cells = part.states
            out += [a.tobytes() for a in (cells.pos, cells.src, cells.tail, cells.seq, cells.rs_idx)]
            out += [cells.head, cells.used, *(t.get_bytes() for pair in part.tensors.values() for t in pair)]
            continue
        for cells in part.streams.cells:
            out += [
                cells.pos.tobytes(),
                cells.shift.tobytes(),
                cells.seq.tobytes(),
                cells.n_used,
                cells.used_max_p1,
            ]
            out += [
                cells.has_shift,
                [(cells.seq_pos_min(s), cells.seq_pos_max(s)) for s in range(view.n_seq)],
            ]
        out += [list(part.streams.heads), list(part.streams.stream_copies)]
        layers = part.storage.owners
        out += [t.get_bytes() for layer in layers for t in (layer.k, layer.v) if t is not None]
    return out
