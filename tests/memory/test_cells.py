"""Cells, slots and sequence operations against a model of sets and loops, in any order of calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyggmlkv.errors import NoSlotError
from pyggmlkv.memory import slots
from pyggmlkv.memory.cells import Cells
from pyggmlkv.memory.cells.defrag_plan import plan_defrag
from pyggmlkv.memory.mask import SlidingWindow
from pyggmlkv.memory.seq_ops import CellStreams, StreamsSpec
from tests.memory.ubatches import run, ubatch
from tests.oracle.cells_naive import NaiveStreams

SIZE, N_SEQ = 24, 3
SEQ = st.integers(0, N_SEQ - 1)
POS = st.none() | st.integers(0, 40)
WINDOWS = st.sampled_from([("none", 0), ("standard", 5), ("chunked", 4), ("symmetric", 6)])


def snapshot(cells: Cells) -> list:
    out = []
    for i in range(cells.size):
        ids = tuple(cells.seq_ids(i))
        xy = (int(cells.ext_x[i]), int(cells.ext_y[i])) if cells.ext_x is not None else (0, 0)
        pos, shift = int(cells.pos[i]), int(cells.shift[i])
        out.append((pos, shift, ids, xy) if pos >= 0 else None)
        assert pos >= 0 or (not ids and shift == 0 and xy == (0, 0)), f"cell {i} is empty but not clean"
    return out


class Memory(RuleBasedStateMachine):
    """One memory driven twice. Ids are spread over two words, so that no word is special."""

    spread = 1
    n_stream = 1
    two_d = False

    @initialize(window=WINDOWS, shift=st.sampled_from(["upstream", "pure"]))
    def start(self, window: tuple[str, int], shift: str) -> None:
        n_seq = N_SEQ if self.n_stream > 1 else 1 + (N_SEQ - 1) * self.spread
        n_pos = 4 if self.two_d else 1
        spec = StreamsSpec(SIZE, n_seq, self.n_stream, n_pos, SlidingWindow(*window), shift)
        self.fast = CellStreams(spec)
        self.slow = NaiveStreams(SIZE, n_seq, self.n_stream, window, 1 if shift == "pure" else -1)

    def id(self, seq: int) -> int:
        return seq if self.n_stream > 1 else seq * self.spread

    def tokens(self, seqs: set[int], n: int, gap: int = 0) -> list[tuple]:
        ids = tuple(self.id(s) for s in sorted(seqs))
        last = [self.slow.pos_max(i) for i in ids]
        pos = max((-1 if p is None else p) for p in last) + 1 + gap
        return [(pos + k, ids, (k % 3, k // 3)) if self.two_d else (pos + k, ids) for k in range(n)]

    def check_slot(self, tokens: list[tuple], cont: bool = False) -> tuple[object, list]:
        u = ubatch(tokens, self.fast.spec.n_seq_max)
        found = slots.find_slot(self.fast, u, cont)
        streams = sorted({self.slow.stream(t[1][0]) for t in tokens}) if self.n_stream > 1 else [0]
        want = [self.slow.find_slot(s, len(tokens) // len(streams), cont) for s in streams]
        if None in want:
            assert found is None
            return u, []
        assert found is not None
        assert found.idxs.tolist() == want
        assert list(found.strm) == streams
        return u, list(zip(streams, want, strict=True))

    @rule(seqs=st.sets(SEQ, min_size=1), n=st.integers(1, 9), gap=st.integers(0, 2), cont=st.booleans())
    def decode(self, seqs: set[int], n: int, gap: int, cont: bool) -> None:
        if self.n_stream > 1:
            tokens = [t for s in sorted(seqs) for t in self.tokens({s}, n, gap)]
        else:
            tokens = self.tokens(seqs, n, gap)
        u, where = self.check_slot(tokens, cont)
        if not where:
            return
        slot = slots.find_slot(self.fast, u, cont)
        journal = slots.Journal(self.fast)
        before = self.state()
        slots.apply_ubatch(self.fast, slot, u, journal)
        journal.undo()
        assert self.state() == before
        slots.apply_ubatch(self.fast, slot, u)
        for k, (stream, idxs) in enumerate(where):
            self.slow.apply(stream, idxs, tokens[k * len(idxs) : (k + 1) * len(idxs)])

    @rule(seq=SEQ, n=st.integers(1, 8), k=st.integers(1, 4))
    def plan_changes_nothing(self, seq: int, n: int, k: int) -> None:
        before = self.state()
        size = self.fast.spec.n_seq_max
        first = self.tokens({seq}, n)
        batches = [ubatch([(t[0] + j * n, *t[1:]) for t in first], size) for j in range(k)]
        try:
            slots.prepare(self.fast, batches)
        except NoSlotError as error:
            assert error.facts["needed"] == n
        assert self.state() == before

    @rule(seq=st.none() | SEQ, p0=POS, p1=POS)
    def seq_rm(self, seq: int | None, p0: int | None, p1: int | None) -> None:
        seq = None if seq is None else self.id(seq)
        assert self.fast.seq_rm(seq, p0, p1)
        self.slow.seq_rm(seq, p0, p1)

    @rule(src=SEQ, dst=SEQ, p0=POS, p1=POS)
    def seq_cp(self, src: int, dst: int, p0: int | None, p1: int | None) -> None:
        if self.n_stream > 1:
            p0 = p1 = None
        self.fast.seq_cp(self.id(src), self.id(dst), p0, p1)
        self.slow.seq_cp(self.id(src), self.id(dst), p0, p1)

    @rule(seq=SEQ)
    def seq_keep(self, seq: int) -> None:
        self.fast.seq_keep(self.id(seq))
        self.slow.seq_keep(self.id(seq))

    @precondition(lambda self: not self.two_d)
    @rule(seq=SEQ, p0=POS, p1=POS, delta=st.integers(-9, 5))
    def seq_add(self, seq: int, p0: int | None, p1: int | None, delta: int) -> None:
        self.fast.seq_add(self.id(seq), p0, p1, delta)
        self.slow.seq_add(self.id(seq), p0, p1, delta)

    @precondition(lambda self: not self.two_d)
    @rule(seq=SEQ, p0=POS, p1=POS, d=st.integers(1, 3))
    def seq_div(self, seq: int, p0: int | None, p1: int | None, d: int) -> None:
        self.fast.seq_div(self.id(seq), p0, p1, d)
        self.slow.seq_div(self.id(seq), p0, p1, d)

    @rule()
    def reset_shift(self) -> None:
        self.fast.reset_shift()
        self.slow.reset_shift()

    @rule(max_moves=st.none() | st.integers(1, 2))
    def defrag(self, max_moves: int | None) -> None:
        for s, cells in enumerate(self.fast.cells):
            plan = plan_defrag(cells, max_moves)
            cells.move(plan.src, plan.dst)
            naive = self.slow.cells[s]
            for a, b in zip(plan.src.tolist(), plan.dst.tolist(), strict=True):
                assert naive[b] is None
                naive[b], naive[a] = naive[a], None

    def state(self) -> object:
        totals = [
            (
                c.n_used,
                c.used_max_p1,
                c.has_shift,
                [(c.seq_pos_min(s), c.seq_pos_max(s)) for s in range(c.n_seq_max)],
            )
            for c in self.fast.cells
        ]
        arrays = [(c.pos.tobytes(), c.shift.tobytes(), c.seq.tobytes()) for c in self.fast.cells]
        return totals, arrays, list(self.fast.heads), list(self.fast.stream_copies)

    @invariant()
    def same(self) -> None:
        assert self.fast.heads == self.slow.heads
        assert self.fast.stream_copies == self.slow.copies
        for s, cells in enumerate(self.fast.cells):
            assert snapshot(cells) == self.slow.snapshot(s)
            assert cells.n_used == self.slow.used(s)
            assert cells.used_max_p1 == self.slow.used_max_p1(s)
            assert cells.has_shift or not cells.shift.any()
        for seq in range(N_SEQ):
            i = self.id(seq)
            cells = self.fast.of(i)
            assert cells.seq_n_cells(i) == len(self.slow.positions(i))
            # asking would make unknown ends known: look at what is kept
            assert cells._extents.lo[i] in (None, self.slow.pos_min(i))
            assert cells._extents.hi[i] in (None, self.slow.pos_max(i))

    @rule(seq=SEQ)
    def ends(self, seq: int) -> None:
        i = self.id(seq)
        assert self.fast.seq_pos_min(i) == self.slow.pos_min(i)
        assert self.fast.seq_pos_max(i) == self.slow.pos_max(i)


class ManyWords(Memory):
    spread = 100


class ManyStreams(Memory):
    n_stream = N_SEQ


class TwoD(Memory):
    two_d = True


MACHINE = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
for machine in (Memory, ManyWords, ManyStreams, TwoD):
    machine.TestCase.settings = MACHINE
TestUnified = Memory.TestCase
TestUnifiedOverSeveralWords = ManyWords.TestCase
TestStreams = ManyStreams.TestCase
TestTwoDimensional = TwoD.TestCase


def filled(size: int, n: int, n_seq_max: int = 4, window: SlidingWindow | None = None) -> CellStreams:
    streams = CellStreams(StreamsSpec(size, n_seq_max, window=window or SlidingWindow()))
    u = run(0, n, 0, n_seq_max)
    slots.apply_ubatch(streams, slots.find_slot(streams, u), u)
    return streams


@pytest.mark.parametrize("n_pos", [1, 4], ids=["plain", "mrope"])
def test_memory_is_at_most_16_bytes_a_cell_plus_the_sequence_words(n_pos: int) -> None:
    cells = Cells(1000, 256, n_pos)
    assert cells.nbytes <= 1000 * (16 + 8 * 4)


@pytest.mark.parametrize("name", ["pos", "shift", "seq", "ext_x", "ext_y"])
def test_arrays_are_read_only(name: str) -> None:
    cells = Cells(4, 1, 4)
    with pytest.raises(ValueError, match="read-only"):
        getattr(cells, name)[0] = 1


def test_window_that_slides_one_by_one_keeps_its_lowest_position() -> None:
    streams = filled(48, 40, window=SlidingWindow("standard", 32))
    for pos in range(40, 400):
        u = run(pos, 1)
        slots.apply_ubatch(streams, slots.find_slot(streams, u), u)
        mine = streams.cells[0].pos[streams.cells[0].seq_has(0)]
        assert streams.seq_pos_min(0) == mine.min()
        assert mine.size == streams.cells[0].seq_n_cells(0) == streams.cells[0].n_used


def with_queue() -> Cells:
    """Positions 0 .. 15 of which 0 is gone, and a queue of the lowest ones from the scan for the new lowest."""
    cells = filled(16, 16).cells[0]
    cells.remove(np.array([0]))
    assert cells.seq_pos_min(0) == 1
    return cells


def test_lowest_position_is_found_below_a_queue() -> None:
    cells = with_queue()
    cells.remove(np.array([1]))
    cells.put(np.array([0]), np.array([0], np.int32), np.ones((1, 1), np.uint64))
    assert cells.seq_pos_min(0) == 0


def test_lowest_position_is_found_behind_removed_entries_of_a_queue() -> None:
    cells = with_queue()
    cells.remove(np.array([3, 1, 2]))
    assert cells.seq_pos_min(0) == 4


def test_lowest_position_is_found_after_a_move_behind_a_queue() -> None:
    cells = with_queue()
    cells.move(np.array([2]), np.array([0]))
    cells.remove(np.array([1]))
    assert cells.seq_pos_min(0) == 2


def test_lowest_position_is_found_after_positions_moved_behind_a_queue() -> None:
    cells = with_queue()
    cells.seq_add(0, 8, None, -8)
    cells.remove(cells.find(0, 0, 2))
    assert cells.seq_pos_min(0) == 2
    assert sorted(cells.pos[cells.find(0)].tolist()) == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]


def test_same_position_twice_is_counted_twice() -> None:
    cells = Cells(4, 1)
    cells.put(np.array([0, 2]), np.array([5, 5], np.int32), np.ones((1, 2), np.uint64))
    cells.remove(np.array([0]))
    assert (cells.seq_pos_min(0), cells.seq_pos_max(0), cells.seq_n_cells(0)) == (5, 5, 1)


def test_put_from_carries_pending_shift_and_place() -> None:
    source, target = Cells(4, 2, 4), Cells(4, 2, 4)
    source.put(
        np.array([1, 3]),
        np.array([4, 6], np.int32),
        np.ones((1, 2), np.uint64),
        np.array([[1, 2], [3, 4]], np.int32),
    )
    source.seq_add(0, None, None, -2)
    target.put_from(source, np.array([1, 3]), 1)
    assert snapshot(target) == [None, (2, -2, (1,), (1, 3)), None, (4, -2, (1,), (2, 4))]
    assert target.has_shift
