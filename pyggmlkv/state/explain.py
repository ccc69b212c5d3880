"""What a saved state says about itself, without the model that it belongs to.

The format names no memory kinds and leaves out how many layers have V, or r and s: those are found by trying the few
ways in which the bytes can be read until one ends exactly at the end. Serves `python -m pyggmlkv state FILE`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from pyggmlkv.errors import StateError
from pyggmlkv.state.blocks import CellMeta, TensorSpec
from pyggmlkv.state.cell_meta import CellRule, IdRule, read_cells
from pyggmlkv.state.cursor import Cursor
from pyggmlkv.state.format import read_arch, read_file_header, read_outputs, read_seq_header
from pyggmlkv.state.layouts import (
    LAYOUTS,
    SEQ_FILE_MAGIC,
    SEQ_MAGIC,
    SESSION_MAGIC,
    Container,
    Layout,
    LayoutName,
    layout_of,
)
from pyggmlkv.state.parts import MIN_CELL_BYTES

Facts: TypeAlias = dict[str, Any]
MAX_SEQ, MAX_LAYERS, MAX_PARTS, MAX_TYPE = 256, 4096, 4, 1024


@dataclasses.dataclass(slots=True)
class _Search:
    """One attempt to read the parts; keeps the failure that came furthest."""

    data: memoryview
    layout: Layout
    single: bool
    furthest: StateError | None = None

    def parts(self, offset: int, depth: int = 0) -> list[Facts] | None:
        """The parts from `offset` to the end, or None when no reading fits."""
        if offset == len(self.data):
            return [] if depth else None
        if depth == MAX_PARTS:
            return None
        for reading in (self._kv(offset, False), self._kv(offset, True), self._recurrent(offset)):
            for part, end in self._tried(reading):
                rest = self.parts(end, depth + 1)
                if rest is not None:
                    return [part, *rest]
        return None

    def _tried(self, reading: Iterator[tuple[Facts, int]]) -> Iterator[tuple[Facts, int]]:
        try:
            yield from reading
        except StateError as error:
            if self.furthest is None or _offset(error) > _offset(self.furthest):
                self.furthest = error

    def _kv(self, offset: int, has_ext: bool) -> Iterator[tuple[Facts, int]]:
        c = Cursor(self.data, offset)
        c.where = "kv"
        if has_ext and not self.layout.streams:
            return
        n_stream = c.count(MAX_SEQ, 4, "n_stream") if self.layout.streams else 1
        if n_stream == 0:
            c.fail("n_stream", "1 or more", 0, at=offset)
        ids: IdRule = "set" if not self.single else "one" if self.layout.seq_ids else "none"
        facts: Facts = {"kind": "kv", "offset": offset, "n_stream": n_stream, "m_rope": has_ext}
        rule = CellRule(ids, MAX_SEQ if ids == "set" else 2**31, has_ext)
        for streams, end in self._streams(c.offset, 0, n_stream, rule):
            used = [s for s in streams if s["n_cells"]]
            if has_ext and not used:
                continue
            yield {**facts, "nbytes": end - offset, "streams": streams}, end

    def _streams(
        self, offset: int, s: int, n_stream: int, rule: CellRule
    ) -> Iterator[tuple[list[Facts], int]]:
        if s == n_stream:
            yield [], offset
            return
        c = Cursor(self.data, offset)
        c.where = f"kv, stream {s}"
        n = c.count(2**32 - 1, MIN_CELL_BYTES, "cell count")
        if n == 0 and self.layout.streams:
            stream = [({"stream": s, "n_cells": 0}, c.offset)]
        else:
            cells = _cell_facts(read_cells(c, n, rule))
            tensors = self._tensors(c.offset, n, ("k", "v"), c.where)
            stream = [({"stream": s, **cells, **facts}, end) for facts, end in tensors]
        for facts, end in stream:
            for rest, last in self._streams(end, s + 1, n_stream, rule):
                yield [facts, *rest], last

    def _recurrent(self, offset: int) -> Iterator[tuple[Facts, int]]:
        c = Cursor(self.data, offset)
        c.where = "recurrent"
        n = c.count(1 if self.single else MAX_SEQ, MIN_CELL_BYTES, "cell count")
        cells = _cell_facts(read_cells(c, n, CellRule("none" if self.single else "set", MAX_SEQ)))
        for facts, end in self._tensors(c.offset, n, ("r", "s"), "recurrent"):
            del facts["v_trans"]
            yield {"kind": "recurrent", "offset": offset, "nbytes": end - offset, **cells, **facts}, end

    def _tensors(
        self, offset: int, n: int, names: tuple[str, str], where: str
    ) -> Iterator[tuple[Facts, int]]:
        """All readings of the two tensor lists; K comes from every layer, V, r and s from some."""
        c = Cursor(self.data, offset)
        c.where = where
        v_trans, n_layer = c.count(1, 0, "v_trans"), c.count(MAX_LAYERS, 0, "n_layer")
        first: list[Facts] = []
        recurrent = names[0] == "r"
        ends = [c.offset]
        for _ in range(n_layer):
            try:
                first.append(_tensor(c, n, names[0], False))
            except StateError:
                if not recurrent:
                    raise
                break
            ends.append(c.offset)
        counts = range(len(first), 0, -1) if recurrent else (n_layer,)
        for count in counts:
            second: list[Facts] = []
            c.offset = ends[count]
            at = [c.offset]
            failure: StateError | None = None
            for _ in range(count):
                try:
                    second.append(_tensor(c, n, names[1], bool(v_trans)))
                except StateError as error:
                    failure = error
                    break
                at.append(c.offset)
            for m in (count,) if recurrent else range(len(second), -1, -1):
                if m < len(at):
                    facts = {"v_trans": bool(v_trans), "n_layer": n_layer}
                    yield {**facts, names[0]: first[:count], names[1]: second[:m]}, at[m]
            if failure is not None:
                self._note(failure)

    def _note(self, error: StateError) -> None:
        if self.furthest is None or _offset(error) > _offset(self.furthest):
            self.furthest = error


def _offset(error: StateError) -> int:
    offset = error.facts.get("offset", 0)
    return offset if isinstance(offset, int) else 0


def _tensor(c: Cursor, n: int, name: str, transposed: bool) -> Facts:
    type_number = c.u32(f"{name} type")
    if type_number >= MAX_TYPE:
        c.fail(f"{name} type", f"below {MAX_TYPE}", type_number, at=c.offset - 4)
    if transposed:
        element_size, n_embd = c.u32(f"{name} element size"), c.u32(f"{name} n_embd")
        if not 1 <= element_size <= 64:
            c.fail(f"{name} element size", "1 to 64", element_size, at=c.offset - 8)
        spec = TensorSpec(type_number, n_embd * element_size, n_embd, element_size)
        facts: Facts = {"n_embd": n_embd, "element_size": element_size}
    else:
        spec = TensorSpec(type_number, c.u64(f"{name} row size"))
        facts = {"row_size": spec.row_size}
    if n == 0 and spec.row_size > 2**40:
        c.fail(f"{name} row size", "a plausible size", spec.row_size, at=c.offset - 8)
    c.take(n * spec.row_size, f"{name} rows")
    return {"type": type_number, **facts, "nbytes": n * spec.row_size}


def _cell_facts(cells: CellMeta) -> Facts:
    facts: Facts = {"n_cells": len(cells)}
    if not len(cells):
        return facts
    facts["pos_min"], facts["pos_max"] = int(cells.pos.min()), int(cells.pos.max())
    pos = np.repeat(cells.pos, np.diff(cells.seq_offset))
    facts["sequences"] = {}
    for seq_id in np.unique(cells.seq_flat).tolist():
        mine = pos[cells.seq_flat == seq_id]
        facts["sequences"][str(seq_id)] = {
            "n_cells": len(mine),
            "pos_min": int(mine.min()),
            "pos_max": int(mine.max()),
        }
    return facts


def explain(
    data: bytes | bytearray | memoryview,
    *,
    container: Container | None = None,
    layout: LayoutName | None = None,
    type_names: Mapping[int, str] | None = None,
) -> Facts:
    """A JSON-able account of a saved state: container, tokens, parts, cells per sequence, tensors per layer.

    `container` and `layout` None: recognised. `type_names`: ggml's type numbers to names, to add `type_name`. A
    damaged memory part gives `problem` (message, offset) and no `parts`.

    Raises: StateError: not a saved state at all.
    """
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    container = container or _recognise(view)
    layouts = LAYOUTS if layout is None else (layout_of(layout),)
    best: Facts | None = None
    failure: StateError | None = None
    for age in layouts:
        try:
            facts, parts, error = _explain_as(view, container, age)
        except StateError as header_error:
            failure = failure or header_error
            continue
        if parts is not None:
            _name_types(parts, type_names or {})
            return {**facts, "parts": parts}
        if best is None or _offset(error) > best["problem"]["offset"]:
            best = {**facts, "problem": {"message": str(error), "offset": _offset(error)}}
    if best is None:
        raise failure or StateError("state: no layout fits")
    return best


def _recognise(view: memoryview) -> Container:
    magic = Cursor(view).u32("magic")
    known: dict[int, Container] = {
        SESSION_MAGIC: "context_file",
        SEQ_FILE_MAGIC: "sequence_file",
        SEQ_MAGIC: "sequence",
    }
    return known.get(magic, "context")


def _explain_as(
    view: memoryview, container: Container, layout: Layout
) -> tuple[Facts, list[Facts] | None, StateError]:
    c = Cursor(view)
    facts: Facts = {"container": container, "layout": layout.name, "nbytes": len(view)}
    single = container in ("sequence", "sequence_file")
    if container.endswith("_file"):
        facts["tokens"] = read_file_header(c, container).tolist()
    if not single:
        facts["arch"] = read_arch(c, None)
        if layout.outputs:
            outputs = read_outputs(c)
            facts["outputs"] = {
                "n_outputs": len(outputs.ids),
                "n_logits": len(outputs.logits),
                "n_embeddings": len(outputs.embeddings),
            }
    elif container == "sequence" and layout.seq_header:
        facts["seq_id"] = read_seq_header(c)
    if c.left == 0:
        return facts, [], StateError("state: no memory", offset=c.offset)
    search = _Search(view, layout, single)
    parts = search.parts(c.offset)
    return facts, parts, search.furthest or StateError("state: bytes after the last part", offset=len(view))


def _name_types(parts: list[Facts], names: Mapping[int, str]) -> None:
    for part in parts:
        for holder in part.get("streams", [part]):
            for tensor in (t for key in "kvrs" for t in holder.get(key, ())):
                if tensor["type"] in names:
                    tensor["type_name"] = names[tensor["type"]]
