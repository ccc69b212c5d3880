"""Which cells a query may see, and the KQ masks that say so: 0 or -|distance| where visible, -inf elsewhere.

Decides by positions and sequence sets only, never by a cell's index. Rows of a sequence differ in few
columns, so one row is written and copied, and only columns at the edges are corrected row by row. Upstream:
llama-hparams.h, is_masked_swa; llama-kv-cache.cpp, set_input_kq_mask; llama-graph.cpp, attn_no_cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.errors import ShapeError
from pyggmlkv.memory.config import SwaType
from pyggmlkv.types import I32, I64, U64, Bool

if TYPE_CHECKING:
    from pyggmlkv.memory.seq_ops import CellStreams

Mask: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = slice | I64
T = TypeVar("T", int, I64)

FAR = 1 << 31
"""Beyond every position."""
MAX_SPAN = 1 << 20
"""ALiBi distances are looked up in a table while they stay below this."""
MAX_RUNS = 16
"""Columns in more runs than this are written by index instead of run by run."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """How far a query sees: "standard" `n_swa` positions, its own included; "chunked" its chunk of `n_swa`;
    "symmetric" `n_swa // 2` to each side; "none" everything.
    """

    swa_type: SwaType = "none"
    n_swa: int = 0

    def first_visible(self, pos: T) -> T:
        """Lowest position that a query at `pos` sees; may be negative."""
        if self.swa_type == "standard":
            return pos - self.n_swa + 1
        if self.swa_type == "chunked":
            return pos // self.n_swa * self.n_swa
        return pos - self.n_swa // 2 if self.swa_type == "symmetric" else pos * 0 - FAR

    def last_visible(self, pos: T) -> T:
        """Highest position that a query at `pos` sees, causality aside."""
        return pos + self.n_swa // 2 if self.swa_type == "symmetric" else pos * 0 + FAR

    def is_masked(self, pos_key: int, pos_query: int) -> bool:
        """Whether the window hides `pos_key` from `pos_query`.  Upstream: is_masked_swa."""
        return not self.first_visible(pos_query) <= pos_key <= self.last_visible(pos_query)


NO_WINDOW = SlidingWindow()


@dataclass(frozen=True, slots=True)
class MaskRule:
    """What hides a key from a query of its own sequence; with `use_alibi`, visible entries are distances."""

    causal: bool = True
    window: SlidingWindow = NO_WINDOW
    use_alibi: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Keys:
    """Keys of one sequence among the columns: `has` (n_kv,), `pos` (n_kv,) and lo .. hi of those it has."""

    has: Bool
    pos: I32
    lo: int
    hi: int
    ext: tuple[I32, I32] | None


@dataclass(frozen=True, slots=True, eq=False)
class _Queries:
    """Tokens of one sequence: positions (n,) and, for the 2-D rule, x and y (n,)."""

    pos: I64
    ext: tuple[I32, I32] | None


def fill_kq_mask(
    out: Mask, streams: CellStreams, ubatch: UBatch, causal: bool = True, *, use_alibi: bool = False
) -> None:
    """Mask of a ubatch over the first n_kv cells of its streams, each token in its first sequence.

    `out`: [n_kv, n_tokens / n_stream, 1, n_stream] f32 or f16, (n_stream, 1, n_tokens / n_stream, n_kv); any
    contiguous array of n_tokens rows will do.  Raises: ShapeError.
    """
    rows = _rows_of(out, ubatch.n_tokens)
    rule = MaskRule(causal, streams.window, use_alibi)
    is_2d = causal and ubatch.is_pos_2d
    for seq_id, mine in _groups(ubatch):
        cells = streams.cells[streams.seq_to_stream[seq_id]]
        lo, hi, n = cells.seq_pos_min(seq_id), cells.seq_pos_max(seq_id), rows.shape[1]
        if lo is None or hi is None:
            rows[mine] = -np.inf
            continue
        ext = None
        if is_2d and cells.ext_x is not None and cells.ext_y is not None:
            ext = cells.ext_x[:n], cells.ext_y[:n]
        keys = _Keys(cells.seq_has(seq_id, n), cells.pos[:n], lo, hi, ext)
        pos = ubatch.pos[:, mine]
        queries = _Queries(pos[0].astype(np.int64), (pos[2], pos[1]) if ext else None)
        _fill(rows, mine, keys, queries, rule)


def fill_no_cache_mask(out: Mask, ubatch: UBatch, rule: MaskRule) -> None:
    """Mask of tokens against tokens, for graphs without a cache; tokens meet in their first sequence.

    `out`: [n_tokens, n_tokens] f32 or f16.  Raises: ShapeError.  Upstream: llm_graph_input_attn_no_cache.
    """
    rows = _rows_of(out, ubatch.n_tokens)
    first, pos = ubatch.seq_id_first, ubatch.pos[0]
    for seq_id, mine in _groups(ubatch):
        own = pos[mine]
        keys = _Keys(first == seq_id, pos, int(own.min()), int(own.max()), None)
        _fill(rows, mine, keys, _Queries(own.astype(np.int64), None), rule)


def fill_cross_mask(out: Mask, seq_mask_enc: U64, ubatch: UBatch) -> None:
    """Mask of decoder tokens over encoder rows: visible where they share a sequence.

    `seq_mask_enc` (n_enc, n_words): sequence sets of the encoded tokens; `out`: [n_enc, n_tokens] f32 or f16.
    Raises: ShapeError.  Upstream: llm_graph_input_attn_cross.
    """
    rows = _rows_of(out, ubatch.n_tokens)
    sets = ubatch.seq_mask
    one_set = bool((sets == sets[0]).all())
    visible = np.zeros((1 if one_set else len(sets), len(seq_mask_enc)), np.bool_)
    for k in range(min(sets.shape[1], seq_mask_enc.shape[1])):
        visible |= (sets[: len(visible), k, None] & seq_mask_enc[:, k]) != 0
    rows.fill(-np.inf)
    np.copyto(rows, 0, where=visible)


def _rows_of(out: Mask, n_tokens: int) -> Mask:
    if not out.flags.c_contiguous or out.size != n_tokens * out.shape[-1]:
        raise ShapeError(
            f"mask: array {out.shape} given, a contiguous one of {n_tokens} rows (tokens) expected",
            shape=out.shape,
            n_tokens=n_tokens,
        )
    return out.reshape(n_tokens, -1)


def _groups(ubatch: UBatch) -> Iterator[tuple[int, Rows]]:
    """Tokens by their first sequence; rows as a slice where they are neighbours."""
    first = ubatch.seq_id_first
    if ubatch.n_tokens == 1 or (first == first[0]).all():
        yield int(first[0]), slice(0, ubatch.n_tokens)
        return
    order = np.argsort(first, kind="stable")
    ids, starts = np.unique(first[order], return_index=True)
    for seq_id, mine in zip(ids.tolist(), np.split(order, starts[1:]), strict=True):
        begin, end = int(mine[0]), int(mine[-1]) + 1
        yield seq_id, slice(begin, end) if end - begin == mine.size else mine


def _fill(out: Mask, rows: Rows, keys: _Keys, queries: _Queries, rule: MaskRule) -> None:
    """Writes the rows of one sequence: the columns all queries agree on at once, the edges by themselves."""
    q_min, q_max = int(queries.pos.min()), int(queries.pos.max())
    window = rule.window
    lo_all, lo_any = window.first_visible(q_max), window.first_visible(q_min)
    hi_all, hi_any = window.last_visible(q_min), window.last_visible(q_max)
    if rule.causal:
        hi_all, hi_any = min(hi_all, q_min - (keys.ext is not None)), min(hi_any, q_max)
    always = _within(keys, lo_all, hi_all)
    ever = always if (lo_all, hi_all) == (lo_any, hi_any) else _within(keys, lo_any, hi_any)
    if rule.use_alibi:
        _write_distances(out, rows, keys, queries, ever)
    else:
        _write_base(out, rows, always)
    if ever is always:
        return
    edge = np.flatnonzero(ever & ~always)
    if edge.size:
        _write_edge(out, rows, edge, _visible(edge, keys, queries, rule), rule)


def _within(keys: _Keys, lo: int, hi: int) -> Bool:
    hit = keys.has
    if lo > keys.lo:
        hit = hit & (keys.pos >= lo)
    if hi < keys.hi:
        hit = hit & (keys.pos <= hi)
    return hit


def _visible(edge: I64, keys: _Keys, queries: _Queries, rule: MaskRule) -> Bool:
    """(n_queries, n_edge): the whole rule for some columns, all of them cells of the sequence."""
    pos, query = keys.pos[edge], queries.pos[:, None]
    low, high = (
        rule.window.first_visible(queries.pos)[:, None],
        rule.window.last_visible(queries.pos)[:, None],
    )
    seen: Bool = pos >= low if rule.window.swa_type != "none" else np.ones((len(query), len(edge)), np.bool_)
    if rule.window.swa_type == "symmetric":
        seen &= pos <= high
    if rule.causal:
        seen &= pos <= query
        if keys.ext is not None and queries.ext is not None:
            (x, y), (qx, qy) = keys.ext, queries.ext
            x, y, qx, qy = x[edge], y[edge], qx[:, None], qy[:, None]
            seen &= (pos != query) | (y < qy) | ((y == qy) & (x <= qx))
    return seen


def _write_base(out: Mask, rows: Rows, visible: Bool) -> None:
    first = out[rows.start if isinstance(rows, slice) else int(rows[0])]
    first.fill(-np.inf)
    np.copyto(first, 0, where=visible)
    if isinstance(rows, slice):
        if rows.stop - rows.start > 1:
            out[rows.start + 1 : rows.stop] = first
    else:
        out[rows[1:]] = first


def _write_distances(out: Mask, rows: Rows, keys: _Keys, queries: _Queries, ever: Bool) -> None:
    """-|key - query| in the `ever` columns, -inf in the others."""
    index = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
    if len(index) >= MAX_RUNS and _write_table(out, index, keys, queries.pos, ever):
        return
    hidden = ~ever
    with np.errstate(over="ignore"):
        for i, query in zip(index, queries.pos.tolist(), strict=True):
            out[i] = -np.abs(keys.pos - np.int32(query))
            np.copyto(out[i], -np.inf, where=hidden)


def _write_table(out: Mask, index: Sequence[int], keys: _Keys, query: I64, ever: Bool) -> bool:
    """Same where cells with consecutive positions lie together: pieces of one table, moved from row to row.

    False, and nothing written, where there are too many such runs.
    """
    cols = np.flatnonzero(ever)
    pos = keys.pos[cols].astype(np.int64)
    cuts = np.flatnonzero((np.diff(cols) != 1) | (np.diff(pos) != 1)) + 1
    span = max(keys.hi, int(query.max())) - min(keys.lo, int(query.min()))
    if cuts.size >= MAX_RUNS or span > MAX_SPAN:
        return False
    with np.errstate(over="ignore"):
        table = np.negative(np.abs(np.arange(-span, span + 1))).astype(np.float32).astype(out.dtype)
    begins, ends = np.r_[0, cuts], np.r_[cuts, cols.size]
    runs = list(
        zip(cols[begins].tolist(), (ends - begins).tolist(), (pos[begins] + span).tolist(), strict=True)
    )
    for i, q in zip(index, query.tolist(), strict=True):
        row = out[i]
        row.fill(-np.inf)
        for col, n, at in runs:
            row[col : col + n] = table[at - q : at - q + n]
    return True


def _write_edge(out: Mask, rows: Rows, edge: I64, visible: Bool, rule: MaskRule) -> None:
    """Plain masks hold -inf in these columns and get zeros; ALiBi masks hold distances and get -inf."""
    value, where = (-np.inf, ~visible) if rule.use_alibi else (0, visible)
    cuts = np.flatnonzero(np.diff(edge) != 1) + 1
    if isinstance(rows, slice) and cuts.size < MAX_RUNS:
        starts = [0, *cuts.tolist(), edge.size]
        for a, b in itertools.pairwise(starts):
            np.copyto(out[rows, int(edge[a]) : int(edge[a]) + b - a], value, where=where[:, a:b])
        return
    grid = np.ix_(np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows, edge)
    out[grid] = np.where(where, np.asarray(value, out.dtype), out[grid])
