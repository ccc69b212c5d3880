"""Live memories without a model: rows written by a small graph, and read back by (sequence, position)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyggmlkv import Batch, KVCache, SlidingKVCache, plan
from pyggmlkv.binding import ComputeGraph, Tensor, TensorArena
from pyggmlkv.memory.kv.step import KVStep

Place = tuple[int, int]


def row_of(il: int, pos: int, n: int, side: str) -> np.ndarray:
    """The row that `write` stores for a position: different in every layer and on both sides."""
    return np.random.default_rng([il, pos, ord(side)]).standard_normal(n).astype(np.float32)


def write(memory: KVCache | SlidingKVCache, batch: Batch, n_ubatch: int = 512) -> None:
    """Takes `batch` into memory: every owning layer's K and V rows, step by step, committed."""
    for step in plan(memory, batch, n_ubatch):
        step.apply()
        pairs = (
            [(memory, step)]
            if isinstance(memory, KVCache)
            else [(memory.base, step.base), (memory.swa, step.swa)]
        )
        for cache, part in pairs:
            write_step(cache, part)
        step.commit()


def write_step(cache: KVCache, step: KVStep) -> None:
    """Runs a graph that writes one applied step's rows."""
    n = step.ubatch.n_tokens
    if not cache.storage.owners:
        return
    with TensorArena(256, graph_nodes=256) as ctx:
        graph = ComputeGraph(ctx, 256)
        k_idxs, v_idxs = ctx.new_tensor("i64", n), ctx.new_tensor("i64", step.n_v_idxs)
        rows: list[tuple[Tensor, int, int, str]] = []
        for layer in cache.storage.owners:
            spec = layer.spec
            k = ctx.new_tensor("f32", spec.head_dim_k, spec.n_head_kv, n)
            rows.append((k, spec.il, spec.n_embd_k_gqa, "k"))
            graph.build_forward_expand(step.cpy_k(ctx, k, k_idxs, spec.il))
            if layer.v is not None:
                v = ctx.new_tensor("f32", spec.head_dim_v, spec.n_head_kv, n)
                rows.append((v, spec.il, spec.n_embd_v_gqa, "v"))
                graph.build_forward_expand(step.cpy_v(ctx, v, v_idxs, spec.il))
        for t in (k_idxs, v_idxs, *(row[0] for row in rows)):
            t.set_input()
        cache.runner.alloc(graph)
        for t, il, width, side in rows:
            data = [row_of(il, int(p), width, side) for p in step.ubatch.pos[0]]
            t.set(np.stack(data).reshape(n, t.ne[1], t.ne[0]))
        for t, fill in ((k_idxs, step.fill_k_idxs), (v_idxs, step.fill_v_idxs)):
            if t is v_idxs and all(layer.v is None for layer in cache.storage.owners):
                continue
            out = np.empty(t.ne[0], np.int64)
            fill(out)
            t.set(out)
        cache.runner.compute(graph)
        cache.runner.forget()


def stored(cache: KVCache, il: int) -> dict[Place, tuple[bytes, bytes, int, tuple]]:
    """(sequence, position) -> raw K row, raw V row, pending shift, 2-D place, of every stream."""
    k = cache.k(il, dequantize=False)
    v = (
        cache.v(il, dequantize=False)
        if cache.storage.layers[il].v is not None
        else np.zeros((*k.shape[:2], 0))
    )
    out: dict[Place, tuple[bytes, bytes, int, tuple]] = {}
    for s, cells in enumerate(cache.streams.cells):
        for i in np.flatnonzero(cells.pos >= 0).tolist():
            ext = (
                ()
                if cells.ext_x is None or cells.ext_y is None
                else (int(cells.ext_x[i]), int(cells.ext_y[i]))
            )
            found = (k[s, i].tobytes(), v[s, i].tobytes(), int(cells.shift[i]), ext)
            for seq_id in cells.seq_ids(i):
                place = (seq_id, int(cells.pos[i]))
                assert place not in out, f"two cells hold {place}"
                out[place] = found
    return out


def alternating(n: int, seqs: Sequence[int] = (0, 1)) -> Batch:
    """`n` positions of each sequence, written turn by turn."""
    return Batch(
        [0] * (n * len(seqs)),
        pos=np.repeat(np.arange(n), len(seqs)),
        seq_id=[s for _ in range(n) for s in seqs],
    )
