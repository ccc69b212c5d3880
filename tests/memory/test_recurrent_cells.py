"""State cells of recurrent memory: the naive oracle, the cases from public reports, all-or-nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.errors import BatchError, CacheError, NoSlotError, SequenceError
from pyggmlkv.memory.recurrent.cells import RecurrentCells
from tests.oracle.recurrent_naive import NaiveRecurrent, run_graph


def ubatch(sets: list[list[int]], positions: list[list[int]], equal_seqs: bool = True) -> UBatch:
    """One set of ids per row of `positions`, all rows equally long."""
    n_seq, n_tok = len(sets), len(positions[0])
    ids = [seq_ids for seq_ids in sets for _ in range(n_tok)]
    flat = np.array([s for seq_ids in ids for s in seq_ids], np.int32)
    n_words = 4
    mask = np.zeros((n_seq * n_tok, n_words), np.uint64)
    for i, seq_ids in enumerate(ids):
        for s in seq_ids:
            if s >= 0:
                mask[i, s // 64] |= np.uint64(1 << s % 64)
    unq = np.unique(flat)
    return UBatch(
        equal_seqs=equal_seqs,
        n_tokens=n_seq * n_tok,
        n_seq_tokens=n_tok,
        n_seqs=n_seq,
        n_seqs_unq=len(unq),
        n_pos=1,
        token=np.zeros(n_seq * n_tok, np.int32),
        embd=None,
        pos=np.array(positions, np.int32).reshape(1, -1),
        n_seq_id=np.array([len(i) for i in ids], np.int32),
        seq_id_flat=flat,
        seq_id_offset=np.cumsum([0, *map(len, ids)], dtype=np.int32),
        seq_mask=mask,
        seq_id_unq=unq,
        seq_idx=np.zeros(0, np.int32),
        output=np.zeros(n_seq * n_tok, np.bool_),
    )


def step(cells: RecurrentCells, sets: list[list[int]], n: int = 1) -> Any:
    """Decodes `n` further tokens of each set."""
    starts = [(cells.seq_pos_max(ids[0]) if cells.tail[ids[0]] >= 0 else -1) for ids in sets]
    return cells.find_slot(ubatch(sets, [[s + 1 + k for k in range(n)] for s in starts]))


def image(cells: RecurrentCells) -> tuple[Any, ...]:
    """All of the cells' state, comparable."""
    s = cells.snapshot()
    arrays = (s.table, s.rs_pos, s.seq, s.s_copy)
    return (*(a.tobytes() for a in arrays), s.numbers)


def check_equal(cells: RecurrentCells, naive: NaiveRecurrent) -> None:
    for i, cell in enumerate(naive.cells):
        assert (cells.pos[i], cells.src[i], cells.tail[i]) == (cell.pos, cell.src, cell.tail), i
        assert set(cells.seq_ids(i)) == cell.seqs, i
    assert (cells.head, cells.used) == (naive.head, naive.used)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 70])
@pytest.mark.parametrize("seed", range(6))
def test_random_scripts_give_the_cells_and_copies_of_the_naive_model(size: int, seed: int) -> None:
    rng = random.Random(1000 * size + seed)
    cells, naive = RecurrentCells(size, strict=False), NaiveRecurrent(size)
    data: list[tuple[int, ...]] = [()] * size
    told: dict[int, tuple[int, ...]] = {}
    token = 0
    for _ in range(150):
        a, b = rng.randrange(size), rng.randrange(size)
        op = rng.choice(["decode"] * 5 + ["rm", "cut", "cp", "keep", "add"])
        if op == "rm":
            assert cells.seq_rm(a) and naive.seq_rm(a, -1, -1)
            told.pop(a, None)
        elif op == "cut":
            p0 = rng.randrange(1, 12)
            assert cells.seq_rm(a, p0) == naive.seq_rm(a, p0, -1)
        elif op == "cp":
            cells.seq_cp(a, b)
            naive.seq_cp(a, b)
            if a in told or a == b:
                told.update({b: told[a]} if a in told else {})
            else:
                told.pop(b, None)
        elif op == "keep" and rng.random() < 0.2:
            cells.seq_keep(a)
            naive.seq_keep(a)
            told = {s: t for s, t in told.items() if s == a}
        elif op == "add":
            d = rng.randrange(0, 4)
            cells.seq_add(a, None, None, d)
            naive.seq_add(a, 0, 2**31 - 1, d)
        elif op == "decode":
            ids = rng.sample(range(size), rng.randrange(1, min(size, 6) + 1))
            sets = [[s] for s in ids]
            if len(ids) > 1 and rng.random() < 0.15:
                sets = [[ids[0], ids[1]], *sets[2:]]
            n = rng.randrange(1, 4)
            tokens = [[token + 10 * s + k for k in range(n)] for s in range(len(sets))]
            token += 1000
            starts = [cells.seq_pos_max(s[0]) for s in sets]
            pos = [[(-1 if p is None else p) + 1 + k for k in range(n)] for p in starts]
            before = image(cells)
            (planned,) = cells.prepare([ubatch(sets, pos)])
            assert image(cells) == before
            cells.apply(planned)
            want = naive.find_slot(sets, pos)
            assert planned.s_copy.tolist() == want == cells.s_copy.tolist()
            assert (planned.head, planned.n_rs) == (naive.head, naive.n)
            assert (-1 if planned.rs_z is None else planned.rs_z) == naive.rs_z
            states = run_graph(data, planned.head, naive.rs_z, len(sets), want, tokens)
            for ids_of, state, new in zip(sets, states, tokens, strict=True):
                assert state == told.get(ids_of[0], ()) + tuple(new), "a sequence went on from a wrong state"
                told.update(dict.fromkeys(ids_of, state))
        check_equal(cells, naive)


def test_a_step_in_place_keeps_its_cells_and_reads_each_from_itself() -> None:
    cells = RecurrentCells(4)
    first = step(cells, [[0], [1], [2]], 5)
    assert (first.head, first.n_rs, first.rs_z, first.s_copy.tolist()) == (0, 3, 0, [0, 0, 0])
    second = step(cells, [[0], [1], [2]])
    assert (second.head, second.n_rs, second.rs_z, second.s_copy.tolist()) == (0, 3, None, [0, 1, 2])


def test_gather_swaps_cells_into_batch_order_and_copies_follow() -> None:
    cells = RecurrentCells(4)
    step(cells, [[0], [1], [2], [3]])
    slot = step(cells, [[3], [1]])
    assert (slot.head, slot.n_rs, slot.s_copy.tolist()) == (1, 3, [3, 1, 2])
    assert cells.tail.tolist() == [0, 2, 3, 1]


def test_a_shared_state_is_copied_when_one_of_its_sequences_decodes() -> None:
    cells = RecurrentCells(3)
    step(cells, [[0]], 4)
    cells.seq_cp(0, 1)
    assert cells.tail[:2].tolist() == [0, 0] and cells.used == 1
    slot = step(cells, [[1]])
    assert (slot.head, slot.s_copy.tolist(), cells.tail[:2].tolist()) == (1, [0], [0, 1])
    assert (cells.seq_pos_max(0), cells.seq_pos_max(1)) == (3, 4)


@pytest.mark.parametrize("order", [[0, 1, 0, 1], [0, 0, 1, 1]], ids=["alternating", "in-runs"])
def test_case_32_every_step_names_its_own_row(order: list[int]) -> None:
    cells, data = RecurrentCells(2), [(), ()]
    told: dict[int, tuple[int, ...]] = {0: (), 1: ()}
    for token, seq in enumerate(order * 3):
        slot = step(cells, [[seq]])
        z = -1 if slot.rs_z is None else slot.rs_z
        (told_now,) = run_graph(data, slot.head, z, 1, slot.s_copy.tolist(), [[token]])
        told[seq] = (*told[seq], token)
        assert told_now == told[seq]


@pytest.mark.parametrize("empty", ["rm", "clear", "takeover", "rm-all"])
def test_case_17_a_new_sequence_reads_a_zeroed_row(empty: str) -> None:
    cells = RecurrentCells(2, n_seq_max=2)
    step(cells, [[0]], 10)
    if empty == "clear":
        cells.clear()
    else:
        assert cells.seq_rm(None if empty == "rm-all" else 0)
    seq = 1 if empty == "takeover" else 0
    slot = step(cells, [[seq]], 3)
    assert slot.rs_z is not None and slot.s_copy.tolist() == [slot.rs_z]
    assert cells.seq_pos_max(seq) == 2


CUTS: list[tuple[tuple[int | None, ...], bool]] = [
    ((0, 10, None), False),
    ((0, 15, None), False),
    ((0, 0, 8), False),
    ((0, 3, 8), False),
    ((0, 16, None), True),
    ((0, 4, 4), True),
    ((1, None, None), True),
    ((None, 4, 8), False),
    ((None, 16, None), True),
    ((None, 5, 5), True),
    ((-1, 4, 8), False),
    ((0, 10, -1), False),
    ((0, -1, 8), False),
]


@pytest.mark.parametrize(("args", "result"), CUTS, ids=str)
def test_case_16_a_cut_is_refused_or_removes_nothing_and_changes_nothing(
    args: tuple[int | None, ...], result: bool
) -> None:
    cells = RecurrentCells(4)
    step(cells, [[0]], 16)
    before = image(cells)
    assert cells.seq_rm(*args) is result
    assert image(cells) == before


@pytest.mark.parametrize(
    "args",
    [(0, None, None), (0, 0, None), (0, 0, 16), (0, -1, -1), (None, None, None), (-1, 0, None)],
    ids=str,
)
def test_whole_removal_always_works(args: tuple[int | None, ...]) -> None:
    cells = RecurrentCells(4, n_rs_seq=2)
    step(cells, [[0], [1]], 16)
    assert cells.seq_rm(*args)
    assert cells.seq_pos_max(0) is None and cells.tail[0] == -1
    assert cells.used == (1 if args[0] == 0 else 0)


def test_case_27_all_sequences_are_removed_by_none() -> None:
    cells = RecurrentCells(70)
    step(cells, [[0], [65], [3]], 2)
    cells.seq_cp(65, 66)
    assert cells.seq_rm(None)
    assert cells.used == 0 and not cells.seq.any() and (cells.tail == -1).all() and cells.head == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.seq_rm(-2),
        lambda c: c.seq_rm(4),
        lambda c: c.seq_cp(-1, 0),
        lambda c: c.seq_cp(0, 4),
        lambda c: c.seq_keep(-1),
        lambda c: c.seq_add(-1, 0, None, 1),
        lambda c: c.seq_add(0, 0, None, 2**31),
        lambda c: c.seq_div(4, 0, None, 2),
        lambda c: c.seq_div(0, 0, None, 0),
        lambda c: c.seq_pos_max(-1),
        lambda c: c.seq_cp(0, 1, 0, 8),
        lambda c: c.seq_cp(0, 1, 4, None),
        lambda c: c.find_slot(ubatch([[4]], [[0]])),
        lambda c: c.find_slot(ubatch([[-1]], [[0]])),
        lambda c: c.find_slot(ubatch([[0], [1, 5]], [[16], [0]])),
        lambda c: c.find_slot(ubatch([[0], [1, 0]], [[16], [0]])),
        lambda c: c.find_slot(ubatch([[0]], [[16]], equal_seqs=False)),
        lambda c: c.restore_all(
            np.array([1, 2], np.int32), np.array([1, 1], np.int32), np.array([0, 1, 2], np.int32)
        ),
        lambda c: c.restore_all(np.array([1], np.int32), np.array([4], np.int32), np.array([0, 1], np.int32)),
        lambda c: c.restore_seq(9, 3),
    ],
)
def test_a_refused_call_is_a_typed_error_and_changes_nothing(call: Any) -> None:
    cells = RecurrentCells(4, n_rs_seq=1)
    step(cells, [[0]], 16)
    before = image(cells)
    with pytest.raises((SequenceError, BatchError)):
        call(cells)
    assert image(cells) == before


def test_a_failed_plan_leaves_the_cells_unchanged() -> None:
    cells = RecurrentCells(6, n_seq_max=4)
    step(cells, [[0], [1], [2], [3]], 3)
    cells.seq_rm(1)
    before = image(cells)
    with pytest.raises(SequenceError):
        cells.prepare([ubatch([[1], [3]], [[0], [3]]), ubatch([[2, 0]], [[3]]), ubatch([[4]], [[0]])])
    assert image(cells) == before


def test_no_free_cell_is_reported_and_nothing_changes() -> None:
    cells = RecurrentCells(2)
    step(cells, [[0], [1]])
    cells.tail[1] = -1
    before = image(cells)
    with pytest.raises(NoSlotError, match="2 of 2"):
        cells.find_slot(ubatch([[1]], [[0]]))
    assert image(cells) == before


def test_no_free_cell_for_the_second_sequence_undoes_the_first() -> None:
    cells = RecurrentCells(2)
    step(cells, [[0], [1]])
    cells.seq_rm(0)
    cells.tail[1] = -1
    before = image(cells)
    with pytest.raises(NoSlotError):
        cells.find_slot(ubatch([[0], [1]], [[0], [0]]))
    assert image(cells) == before


@pytest.mark.parametrize("forget", [lambda c: c.seq_rm(None), lambda c: c.seq_keep(1), lambda c: c.seq_rm(0)])
def test_a_pending_rollback_is_forgotten_with_its_sequence(forget: Any) -> None:
    cells = RecurrentCells(2, n_rs_seq=3)
    step(cells, [[0]], 6)
    assert cells.seq_rm(0, 4) and cells.rs_idx[0] == 2
    forget(cells)
    assert not cells.rs_idx.any() and (cells.rs_pos == -1).all()


def test_planned_slots_apply_in_order_and_undo_exactly() -> None:
    cells = RecurrentCells(4)
    step(cells, [[2], [0]], 2)
    before = image(cells)
    plan = cells.prepare([ubatch([[0], [1]], [[2, 3], [0, 1]]), ubatch([[1]], [[2]])])
    for slot in plan:
        cells.apply(slot)
    assert (cells.seq_pos_max(0), cells.seq_pos_max(1), cells.seq_pos_max(2)) == (3, 2, 1)
    for slot in reversed(plan):
        cells.undo(slot)
    assert image(cells) == before


def test_undo_after_a_computed_graph_drops_exactly_the_states_it_may_have_overwritten() -> None:
    cells = RecurrentCells(6)
    step(cells, [[0], [1], [2], [3]], 3)
    slot = step(cells, [[3], [1]])
    assert sorted(cells.undo(slot, computed=True)) == [1, 2, 3]
    assert cells.seq_pos_max(0) == 2 and cells.used == 1


def test_undo_after_a_computed_graph_keeps_a_shared_state_that_was_only_read() -> None:
    cells = RecurrentCells(3)
    step(cells, [[0]], 4)
    cells.seq_cp(0, 1)
    assert cells.undo(step(cells, [[1]]), computed=True) == []
    assert cells.seq_pos_max(0) == cells.seq_pos_max(1) == 3


def test_a_stale_plan_does_not_apply() -> None:
    cells = RecurrentCells(4)
    (slot,) = cells.prepare([ubatch([[0]], [[0]])])
    step(cells, [[1]])
    with pytest.raises(CacheError, match="plan again"):
        cells.apply(slot)


def test_case_13_an_interleaved_batch_in_small_ubatches_reads_each_state_once() -> None:
    left, cells, data = {0: 7, 1: 3, 2: 5}, RecurrentCells(3), [()] * 3
    told: dict[int, tuple[int, ...]] = dict.fromkeys(left, ())
    rng = random.Random(13)
    while any(left.values()):
        ids = [s for s in rng.sample(list(left), rng.randrange(1, 4)) if left[s]]
        if not ids:
            continue
        n = min(left[s] for s in ids)
        slot = step(cells, [[s] for s in ids], n)
        new = [[100 * s + len(told[s]) + k for k in range(n)] for s in ids]
        run_graph(
            data, slot.head, -1 if slot.rs_z is None else slot.rs_z, len(ids), slot.s_copy.tolist(), new
        )
        for s, tokens in zip(ids, new, strict=True):
            told[s] += tuple(tokens)
            left[s] -= n
    for s, tokens in told.items():
        assert data[cells.tail[s]] == tokens == tuple(100 * s + k for k in range(len(tokens)))


@pytest.mark.parametrize("p0", [11, 12, 13, 15])
def test_a_rollback_reads_the_snapshot_of_the_last_kept_token(p0: int) -> None:
    cells = RecurrentCells(2, n_rs_seq=4)
    step(cells, [[1]], 16)
    if p0 == 11:
        assert cells.seq_rm(1, p0) is False
        return
    assert cells.seq_rm(1, p0)
    assert cells.seq_pos_max(1) == p0 - 1
    slot = step(cells, [[1]])
    assert slot.s_copy.tolist() == [(16 - p0) * 2 + 0]
    assert step(cells, [[1]]).s_copy.tolist() == [0]


def test_rollbacks_add_up() -> None:
    cells = RecurrentCells(1, n_rs_seq=4)
    step(cells, [[0]], 8)
    assert cells.seq_rm(0, 6) and cells.seq_rm(0, 5)
    assert (cells.rs_idx[0], cells.seq_pos_max(0)) == (3, 4)
    assert cells.seq_rm(0, 3) is False
    assert cells.state_rows(0)[1].tolist() == [3]


def test_a_rollback_past_what_the_last_ubatch_wrote_is_refused() -> None:
    cells = RecurrentCells(1, n_rs_seq=4)
    step(cells, [[0]], 8)
    step(cells, [[0]], 2)
    before = image(cells)
    assert cells.seq_rm(0, 8) is False
    assert image(cells) == before
    assert cells.seq_rm(0, 9)


def test_a_rollback_counts_positions_not_tokens() -> None:
    cells = RecurrentCells(1, n_rs_seq=4)
    cells.find_slot(ubatch([[0]], [[3, 4, 5, 5, 5, 8, 9]]))
    assert cells.seq_rm(0, 8)
    assert (cells.rs_idx[0], cells.seq_pos_max(0)) == (2, 5)


def test_a_shared_state_is_not_rolled_back_for_one_sequence() -> None:
    cells = RecurrentCells(2, n_rs_seq=4)
    step(cells, [[0]], 8)
    cells.seq_cp(0, 1)
    assert cells.seq_rm(1, 6) is False
    assert cells.seq_pos_max(0) == 7


def test_a_pending_rollback_is_shared_by_a_copy_and_dies_with_its_cell() -> None:
    cells = RecurrentCells(3, n_rs_seq=4)
    step(cells, [[1]], 8)
    assert cells.seq_rm(1, 6)
    cells.seq_cp(1, 0)
    slot = step(cells, [[0]])
    assert slot.s_copy.tolist() == [2 * 3 + 0]
    assert step(cells, [[1]]).s_copy.tolist() == [2 * 3 + 0]
    cells.seq_keep(0)
    assert cells.rs_idx.tolist() == [0, 0, 0]


def test_a_bystander_in_the_run_loses_its_snapshots_only_when_it_moves() -> None:
    cells = RecurrentCells(3, n_rs_seq=2)
    step(cells, [[0], [1], [2]], 4)
    step(cells, [[0], [2]])
    assert cells.seq_rm(1, 3) is False
    cells = RecurrentCells(3, n_rs_seq=2)
    step(cells, [[0], [1], [2]], 4)
    step(cells, [[0]])
    assert cells.seq_rm(1, 3)


def test_positions_move_and_divide_with_their_snapshots() -> None:
    cells = RecurrentCells(2, n_rs_seq=2)
    step(cells, [[0]], 8)
    cells.seq_add(0, 0, None, 5)
    assert cells.seq_pos_max(0) == 12 and cells.rs_pos[0].tolist() == [11, 10]
    cells.seq_div(0, 0, 13, 2)
    assert cells.seq_pos_max(0) == 6 and cells.rs_pos[0].tolist() == [5, 5]
    cells.seq_add(0, 0, 6, 100)
    assert cells.seq_pos_max(0) == 6


def test_a_state_pushed_below_zero_is_freed() -> None:
    cells = RecurrentCells(2)
    step(cells, [[0], [1]], 3)
    cells.seq_cp(1, 0)
    cells.seq_add(1, 0, None, -3)
    assert cells.seq_pos_max(0) is None and cells.seq_pos_max(1) is None and cells.used == 0


@pytest.mark.parametrize("strict", [True, False])
def test_the_lenient_answers_are_upstreams(strict: bool) -> None:
    cells = RecurrentCells(2, n_rs_seq=2, strict=strict)
    step(cells, [[0]], 8)
    step(cells, [[0]])
    assert cells.seq_rm(0, 0, 4) is not strict
    assert cells.seq_rm(0, 7) is not strict
    assert cells.seq_rm(0, 2) is False


def test_a_whole_restore_refills_the_cells_from_the_first_on() -> None:
    cells = RecurrentCells(4)
    step(cells, [[3], [2]], 2)
    cells.restore_all(
        np.array([9, 4], np.int32), np.array([1, 3, 0], np.int32), np.array([0, 2, 3], np.int32)
    )
    assert cells.tail.tolist() == [1, 0, -1, 0] and cells.pos.tolist() == [9, 4, -1, -1]
    assert (cells.head, cells.used, cells.src.tolist()) == (0, 2, [0, 1, -1, -1])
    assert step(cells, [[3]]).s_copy.tolist() == [0]


def test_a_sequence_restore_takes_a_cell_and_keeps_its_bytes() -> None:
    cells = RecurrentCells(3)
    step(cells, [[0], [1]], 2)
    cell = cells.restore_seq(1, 30)
    assert cell is not None and cells.tail[1] == cell and cells.seq_pos_max(1) == 30
    assert step(cells, [[1]]).s_copy.tolist() == [cell]
    assert cells.restore_seq(1, None) is None and cells.seq_pos_max(1) is None
    assert cells.seq_pos_max(0) == 1


def test_state_rows_follow_pending_rollbacks() -> None:
    cells = RecurrentCells(3, n_rs_seq=3)
    step(cells, [[0], [1]], 5)
    cells.seq_rm(1, 3)
    cells.seq_cp(0, 2)
    got = [a.tolist() for a in cells.state_rows()]
    assert got == [[0, 1], [0, 2 * 3 + 1]]
    assert [a.tolist() for a in cells.state_rows(2)] == [[0], [0]]


def test_the_full_slot_is_the_worst_case_and_changes_nothing() -> None:
    cells = RecurrentCells(5)
    before = image(cells)
    slot = cells.full_slot()
    assert (slot.head, slot.n_rs, slot.rs_z) == (0, 5, 0)
    assert image(cells) == before
