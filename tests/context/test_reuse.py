"""A step whose shape is unchanged reuses its graph; one whose shape changed does not; both give the same bits."""

from __future__ import annotations

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch


def steps(ctx: pyggmlkv.Context, seqs: list[int]) -> list[bytes]:
    out = []
    for i, seq_id in enumerate(seqs):
        ctx.decode(Batch([i + 1], seq_id=seq_id))
        out.append(ctx.logits.tobytes())
    return out


@pytest.mark.parametrize(
    "seqs", [[0, 1] * 6, [0, 0, 1, 1] * 3, [0] * 12], ids=["alternating", "pairs", "one"]
)
@pytest.mark.parametrize("unified", [True, False])
def test_a_kept_graph_serves_another_sequence_with_its_own_rows(
    model: pyggmlkv.Model, seqs: list[int], unified: bool
) -> None:
    def run(reuse: bool) -> tuple[list[bytes], pyggmlkv.Context]:
        ctx = pyggmlkv.Context(
            model, n_ctx=128, n_seq_max=2, kv_unified=unified, n_threads=1, graph_reuse=reuse
        )
        return steps(ctx, seqs), ctx

    kept, ctx = run(True)
    fresh, other = run(False)
    assert kept == fresh
    assert other.n_graphs_reused == 0
    assert ctx.n_graphs_reused + ctx.n_graphs_built == len(seqs)
    assert ctx.n_graphs_reused >= (
        len(seqs) - 1 if unified or len(set(seqs)) == 1 else len(seqs) // 2 - 1
    ) * (unified or seqs[0] == seqs[1])


def test_what_changes_a_graph_builds_a_new_one(model: pyggmlkv.Model) -> None:
    ctx = pyggmlkv.Context(model, n_ctx=512, n_threads=1)
    ctx.decode(Batch([1, 2, 3]))
    assert (ctx.n_graphs_built, ctx.n_graphs_reused) == (1, 0)
    ctx.decode(Batch([4, 5, 6]))
    assert (ctx.n_graphs_built, ctx.n_graphs_reused) == (1, 1)
    ctx.decode(Batch([7, 8, 9], logits="all"))
    assert ctx.n_graphs_built == 2
    ctx.decode(Batch([7, 8], logits="all"))
    assert ctx.n_graphs_built == 3
    ctx.decode(Batch([1]))
    ctx.decode(Batch(embd=np.zeros((1, model.hparams.n_embd), np.float32)))
    assert ctx.n_graphs_built == 5


def test_a_graph_is_built_anew_where_n_kv_grows_and_after_a_shift(model: pyggmlkv.Model) -> None:
    ctx = pyggmlkv.Context(model, n_ctx=512, n_threads=1)
    ctx.decode(Batch(np.arange(250) % 100))
    ctx.decode(Batch([1]))
    built = ctx.n_graphs_built
    for i in range(20):
        ctx.decode(Batch([i]))
    assert ctx.n_graphs_built == built + 1
    ctx.memory.seq_rm(0, 10, 20)
    ctx.memory.seq_add(0, 20, None, -10)
    ctx.decode(Batch([1]))
    assert ctx.n_graphs_built == built + 2


def test_rows_that_a_caller_kept_stay_as_they_were(model: pyggmlkv.Model) -> None:
    ctx = pyggmlkv.Context(model, n_ctx=64, n_threads=1)
    ctx.decode(Batch([1, 2, 3]))
    kept = ctx.logits
    copy = kept.copy()
    ctx.decode(Batch([9]))
    ctx.close()
    assert (kept == copy).all()


def test_compute_buffers_do_not_grow_after_construction(model: pyggmlkv.Model) -> None:
    ctx = pyggmlkv.Context(model, n_ctx=512, n_seq_max=3, kv_unified=True, n_ubatch=64, n_threads=1)
    before = ctx.memory_breakdown()
    rng = np.random.default_rng(3)
    for i in range(12):
        n = int(rng.integers(1, 40))
        ctx.decode(Batch(rng.integers(0, 128, n), seq_id=i % 3, logits="all"))
    ctx.memory.seq_rm(0, 0, 5)
    ctx.memory.seq_add(0, 5, None, -5)
    ctx.decode(Batch([1]))
    assert ctx.memory_breakdown() == before
