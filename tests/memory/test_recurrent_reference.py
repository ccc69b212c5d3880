"""State cells against the reference's own, step by step, over random scripts on a tiny recurrent model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pyggmlkv.batch import Batch, BatchAllocator, BatchLimits
from pyggmlkv.memory.recurrent.cells import RecurrentCells
from tests.oracle.libllama import ContextParams, Library, RefContext, RefModel

N_SEQ, N_UBATCH = 5, 8


@pytest.fixture(scope="module")
def context(reference: Library, tiny_model: Callable[[str], Path]) -> Iterator[RefContext]:
    with RefModel(reference, tiny_model("mamba")) as model:
        params = ContextParams(n_ctx=512, n_seq_max=N_SEQ, n_ubatch=N_UBATCH, n_threads=1, n_threads_batch=1)
        with model.context(params) as ctx:
            yield ctx


def check_equal(cells: RecurrentCells, ctx: RefContext) -> None:
    want, info = ctx.memory.cells(0), ctx.memory.parts[0]
    assert cells.pos.tolist() == want.pos.tolist()
    assert cells.src.tolist() == want.x.tolist()
    assert cells.tail.tolist() == want.y.tolist()
    assert [cells.seq_ids(i) for i in range(N_SEQ)] == [want.sequences(i) for i in range(N_SEQ)]
    assert (cells.head, cells.used) == (want.head, info.used)
    used = np.flatnonzero(cells.seq.any(axis=1))
    rows = [(int(cells.pos[i]), cells.seq_ids(i)) for i in used]
    assert rows == [(int(cells.pos[c]), cells.seq_ids(c)) for c in cells.state_rows()[0]]


@pytest.mark.parametrize("seed", range(12))
def test_random_scripts_give_the_reference_cells(context: RefContext, seed: int) -> None:
    rng, memory = random.Random(seed), context.memory
    memory.clear()
    cells = RecurrentCells(N_SEQ)
    allocator = BatchAllocator(1)
    limits = BatchLimits(n_vocab=128, n_embd=256, n_seq_max=N_SEQ)
    for _ in range(25):
        a, b = rng.randrange(N_SEQ), rng.randrange(N_SEQ)
        op = rng.choice(["decode"] * 4 + ["rm", "cut", "cp", "keep", "add", "div"])
        if op == "decode":
            ids = rng.sample(range(N_SEQ), rng.randrange(1, 4))
            seq_id = [s for s in ids for _ in range(rng.randrange(1, 6))]
            rng.shuffle(seq_id)
            tokens = [rng.randrange(128) for _ in seq_id]
            allocator.init(Batch(tokens, seq_id=seq_id, logits="last"), limits, cells)
            allocator.split_reset()
            for slot in cells.prepare(list(iter(lambda: allocator.split_equal(N_UBATCH, True), None))):
                cells.apply(slot)
            context.decode(tokens, seq_id=seq_id)
        elif op == "rm":
            assert cells.seq_rm(a) == memory.seq_rm(a)
        elif op == "cut":
            p0 = rng.randrange(1, 20)
            assert cells.seq_rm(a, p0) == memory.seq_rm(a, p0)
        elif op == "cp":
            cells.seq_cp(a, b)
            memory.seq_cp(a, b)
        elif op == "keep" and rng.random() < 0.3:
            cells.seq_keep(a)
            memory.seq_keep(a)
        elif op == "add":
            cells.seq_add(a, None, None, 3)
            memory.seq_add(a, None, None, 3)
        elif op == "div":
            cells.seq_div(a, None, None, 2)
            memory.seq_div(a, None, None, 2)
        check_equal(cells, context)


def test_a_sequence_restored_from_a_saved_state_gets_the_reference_cell(context: RefContext) -> None:
    memory = context.memory
    memory.clear()
    cells = RecurrentCells(N_SEQ)
    context.decode([1, 2, 3, 4], seq_id=[2, 0, 0, 2])
    saved = memory.cells(0)
    offset = np.cumsum([0, *(len(saved.sequences(i)) for i in range(2))], dtype=np.int32)
    flat = np.array([s for i in range(2) for s in saved.sequences(i)], np.int32)
    assert context.state_set(context.state_get())
    cells.restore_all(saved.pos[:2], flat, offset)
    check_equal(cells, context)
    for seq_id in (4, 0):
        assert context.state_set(context.state_get(2), seq_id)
        cells.restore_seq(seq_id, cells.seq_pos_max(2))
        check_equal(cells, context)
