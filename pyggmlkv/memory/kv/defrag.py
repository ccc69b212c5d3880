"""Defrag on live memory: moves planned by `defrag_plan`, run as graphs of views and copies, then noted in the cells.

Rows are copied bit by bit, so nothing that is stored changes; a run that is stopped half-way has only written to holes,
and no cell has moved. Upstream: older llama-kv-cache.cpp, build_graph_defrag, defrag_prepare, update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from pyggmlkv.backend.runner import Runner
from pyggmlkv.binding import ComputeGraph, Tensor, TensorArena, ops
from pyggmlkv.memory.cells import Cells, defrag_plan
from pyggmlkv.memory.cells.defrag_plan import DefragPlan, plan_defrag
from pyggmlkv.memory.kv.storage import KVStorage
from pyggmlkv.memory.seq_ops import CellStreams
from pyggmlkv.memory.slots import N_KV_PAD

NODES_A_COPY = 3
"""A view of the source, a view of the target, the copy."""


@dataclasses.dataclass(frozen=True, slots=True)
class DefragReport:
    """What a defrag did. `n_moves` counts block moves, the unit of `max_moves`; `n_cells` the cells in them.

    `done`: no hole is left below the last used cell. Fragmentation is the share of holes below the last used cell,
    before and after. `bytes_moved` counts K and V of every layer.
    """

    n_moves: int = 0
    n_cells: int = 0
    n_graphs: int = 0
    bytes_moved: int = 0
    done: bool = True
    fragmentation_before: float = 0.0
    fragmentation_after: float = 0.0


def merged(reports: Iterable[DefragReport]) -> DefragReport:
    """Reports of several parts as one: counts added, done if all are, fragmentation of the worst part."""
    all_of = list(reports)
    return DefragReport(
        sum(r.n_moves for r in all_of),
        sum(r.n_cells for r in all_of),
        sum(r.n_graphs for r in all_of),
        sum(r.bytes_moved for r in all_of),
        all(r.done for r in all_of),
        max((r.fragmentation_before for r in all_of), default=0.0),
        max((r.fragmentation_after for r in all_of), default=0.0),
    )


def moves_a_graph(storage: KVStorage, max_nodes: int) -> int:
    """Block moves that a graph of `max_nodes` nodes and leafs holds, at least one."""
    return max(1, _copies_a_graph(storage, max_nodes) // max(1, _n_tensors(storage)))


def defrag(
    streams: CellStreams, storage: KVStorage, runner: Runner, max_moves: int | None = None
) -> DefragReport:
    """Moves used cells to the front of their streams, at most `max_moves` blocks in all (None: until done).

    Raises:
        UnsupportedOpError: a device cannot copy rows of this type; nothing was changed.
        KeyboardInterrupt: finished graphs stay, the one that was stopped changed nothing.
    """
    before = holes(streams.cells)
    n_moves = n_cells = n_graphs = nbytes = 0
    done = True
    for s, cells in enumerate(streams.cells):
        plan = plan_defrag(cells, None if max_moves is None else max_moves - n_moves)
        for part in _parts(plan, moves_a_graph(storage, runner.max_nodes)):
            nbytes += _copy_rows(storage, runner, s, part)
            cells.move(part.src, part.dst)
            streams.heads[s] = cells.n_used
            n_graphs += 1
        n_moves += plan.n_moves
        n_cells += len(plan.src)
        done &= plan.done
    return DefragReport(n_moves, n_cells, n_graphs, nbytes, done, before, holes(streams.cells))


def holes(cells: Iterable[Cells]) -> float:
    """Share of the cells below the last used one, over all streams, that hold nothing."""
    n = sum(c.used_max_p1 for c in cells)
    return 1.0 - sum(c.n_used for c in cells) / n if n else 0.0


def fragmentation(streams: CellStreams, n_pad: int) -> float:
    """Worst stream's share of unused cells among those that attention reads; what `defrag_threshold` is compared with.

    Padding counts as used, and streams that read less than 2048 cells count as whole.  Upstream: defrag_sched.
    """
    pad = max(n_pad, N_KV_PAD)
    return max(
        defrag_plan.fragmentation(c.n_used, min(c.size, -(-c.used_max_p1 // pad) * pad), pad)
        for c in streams.cells
    )


def _copies_a_graph(storage: KVStorage, max_nodes: int) -> int:
    """Copies of one tensor's block that a graph holds; room for the cache's own tensors and their views is left."""
    own = _n_tensors(storage) * (1 + storage.spec.n_stream)
    return max(1, (max_nodes - min(own, max_nodes // 2)) // NODES_A_COPY)


def _n_tensors(storage: KVStorage) -> int:
    return sum(1 if layer.v is None else 2 for layer in storage.owners)


def _parts(plan: DefragPlan, n: int) -> Iterator[DefragPlan]:
    """The plan cut into runs of `n` blocks, with the cells of each."""
    ends = np.cumsum([size for _, _, size in plan.blocks], dtype=np.int64)
    begin = 0
    for i in range(0, plan.n_moves, n):
        blocks = plan.blocks[i : i + n]
        end = int(ends[i + len(blocks) - 1])
        yield DefragPlan(plan.src[begin:end], plan.dst[begin:end], blocks, plan.done, plan.head)
        begin = end


def _copy_rows(storage: KVStorage, runner: Runner, stream: int, plan: DefragPlan) -> int:
    """Copies the rows of all layers, as many to a graph as the runner takes; bytes copied."""
    tensors = [(layer.k, False) for layer in storage.owners]
    tensors += [(layer.v, storage.spec.v_trans) for layer in storage.owners if layer.v is not None]
    copies = [(t, trans, block) for block in plan.blocks for t, trans in tensors]
    most = _copies_a_graph(storage, runner.max_nodes)
    own = len(tensors) * (1 + storage.spec.n_stream)
    for i in range(0, len(copies), most):
        now = copies[i : i + most]
        size = NODES_A_COPY * len(now) + own
        with TensorArena(size, graph_nodes=size) as ctx:
            graph = ComputeGraph(ctx, size)
            for t, trans, (src, dst, n) in now:
                views = [_view(ctx, t, trans, (stream, cell, n)) for cell in (src, dst)]
                graph.build_forward_expand(ops.cpy(ctx, *views))
            runner.alloc(graph)
            try:
                runner.compute(graph, single=True)
            finally:
                runner.forget()
    row = sum(t.nb[1] for t, _ in tensors)
    return row * sum(n for _, _, n in plan.blocks)


def _view(ctx: TensorArena, t: Tensor, trans: bool, where: tuple[int, int, int]) -> Tensor:
    """Cells [cell, cell + n) of a stream: whole rows, or of a transposed tensor a piece of every column."""
    stream, cell, n = where
    first = stream * t.nb[2]
    if trans:
        return ops.view_2d(ctx, t, n, t.ne[0], t.ne[1] * t.nb[0], first + cell * t.nb[0])
    return ops.view_2d(ctx, t, t.ne[0], n, t.nb[1], first + cell * t.nb[1])
