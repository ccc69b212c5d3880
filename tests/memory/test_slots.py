"""Slot search, placing, rollback and the index inputs, on cases that are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggmlkv.errors import NoSlotError
from pyggmlkv.memory import slots
from pyggmlkv.memory.mask import SlidingWindow
from pyggmlkv.memory.seq_ops import CellStreams, StreamsSpec
from tests.memory.ubatches import run, ubatch
from tests.oracle.cells_naive import NaiveStreams


def memory(
    size: int, n_seq_max: int = 4, n_stream: int = 1, window: tuple[str, int] = ("none", 0), name: str = "kv"
) -> CellStreams:
    return CellStreams(StreamsSpec(size, n_seq_max, n_stream, window=SlidingWindow(*window), name=name))


def decode(streams: CellStreams, pos0: int, n: int, seq: int = 0) -> list[int]:
    u = run(pos0, n, seq, streams.spec.n_seq_max)
    slot = slots.prepare(streams, [u])[0]
    slots.apply_ubatch(streams, slot, u)
    return slot.idxs[0].tolist()


def state(streams: CellStreams) -> object:
    return [
        (c.pos.tobytes(), c.shift.tobytes(), c.seq.tobytes(), c.n_used, c.used_max_p1, c.has_shift)
        + tuple((c.seq_pos_min(s), c.seq_pos_max(s), c.seq_n_cells(s)) for s in range(c.n_seq_max))
        for c in streams.cells
    ] + [list(streams.heads)]


def test_search_starts_at_the_head() -> None:
    streams = memory(16)
    assert decode(streams, 0, 4) == [0, 1, 2, 3]
    assert decode(streams, 4, 2) == [4, 5]
    assert streams.heads == [6]


def test_search_takes_scattered_cells_in_circular_order() -> None:
    streams = memory(10)
    decode(streams, 0, 10)
    streams.seq_rm(0, 2, 4)
    streams.seq_rm(0, 8, 9)
    streams.heads[0] = 7
    assert decode(streams, 10, 3) == [8, 2, 3]
    assert streams.heads == [4]


@pytest.mark.parametrize(("n_used", "head", "first"), [(3, 9, 0), (3, 7, 7), (3, 8, 3)])
def test_head_far_beyond_the_used_cells_starts_over(n_used: int, head: int, first: int) -> None:
    streams = memory(16)
    decode(streams, 0, n_used)
    streams.heads[0] = head
    n = 2
    want = first if head <= n_used + 2 * n else n_used
    assert decode(streams, n_used, n)[0] == want


@pytest.mark.parametrize(("n", "want"), [(2, [2, 3]), (3, [6, 7, 8]), (4, None), (99, None)])
def test_contiguous_search_takes_the_first_run_that_is_long_enough(n: int, want: list[int] | None) -> None:
    streams = memory(10)
    decode(streams, 0, 10)
    streams.seq_rm(0, 2, 4)
    streams.seq_rm(0, 6, 9)
    streams.heads[0] = 1
    slot = slots.find_slot(streams, run(10, n), cont=True)
    assert (None if slot is None else slot.idxs[0].tolist()) == want


def test_contiguous_search_wraps_to_a_run_that_crosses_the_head() -> None:
    streams = memory(10)
    decode(streams, 0, 10)
    streams.seq_rm(0, 3, 7)
    streams.heads[0] = 5
    slot = slots.find_slot(streams, run(10, 4), cont=True)
    assert slot is not None
    assert slot.idxs.tolist() == [[3, 4, 5, 6]]
    assert slot.is_contiguous


@pytest.mark.parametrize("cont", [False, True])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    used=st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 2), min_size=1)), min_size=1, max_size=14),
    head=st.integers(0, 14),
    n=st.integers(1, 15),
    window=st.sampled_from([("none", 0), ("standard", 3), ("standard", 1), ("chunked", 4), ("symmetric", 5)]),
    base=st.integers(0, 5),
)
def test_search_equals_the_loop(
    used: list, head: int, n: int, window: tuple[str, int], base: int, cont: bool
) -> None:
    size = len(used)
    fast, slow = memory(size, 3, window=window), NaiveStreams(size, 3, swa=window)
    for i, (is_used, ids) in enumerate(used):
        if is_used:
            u = ubatch([((i * 5 + base) % 11, ids)], 3)
            fast.cells[0].place(np.array([i]), u)
            slow.apply(0, [i], [((i * 5 + base) % 11, ids)])
    fast.heads[0] = slow.heads[0] = min(head, size)
    found = slots.find_slot(fast, run(50, n, 0, 3), cont)
    assert (None if found is None else found.idxs[0].tolist()) == slow.find_slot(0, n, cont)


# windows: reuse and purge


def test_cell_behind_the_window_is_reused() -> None:
    streams = memory(8, window=("standard", 4))
    decode(streams, 0, 8)
    assert decode(streams, 8, 3) == [0, 1, 2]
    assert streams.seq_pos_min(0) == 3


def test_cell_of_two_sequences_is_never_reused() -> None:
    streams = memory(8, window=("standard", 2))
    decode(streams, 0, 8)
    streams.seq_cp(0, 1)
    assert slots.find_slot(streams, run(8, 1)) is None


def test_overwriting_purges_all_lower_positions_of_that_sequence() -> None:
    streams = memory(8, window=("standard", 3))
    decode(streams, 0, 6)
    streams.seq_rm(0, 2, 3)
    streams.heads[0] = 4
    # behind the head: 4 and 5, which the next token still sees; then two free cells; then 0 and 1, not seen
    assert decode(streams, 10, 4) == [6, 7, 0, 1]
    streams.heads[0] = 3
    assert decode(streams, 14, 1) == [3]
    assert sorted(streams.cells[0].pos[streams.cells[0].find(0)].tolist()) == [4, 5, 10, 11, 12, 13, 14]


def test_purge_spares_other_sequences() -> None:
    streams = memory(12, window=("standard", 2))
    decode(streams, 0, 4, 0)
    decode(streams, 0, 4, 1)
    streams.heads[0] = 2
    streams.seq_add(0, 3, None, 10)  # sequence 0 now holds 0, 1, 2, 13
    streams.heads[0] = 2
    decode(streams, 4, 1, 1)
    cells = streams.cells[0]
    assert cells.pos[cells.find(0)].tolist() == [13]
    assert cells.pos[cells.find(1)].tolist() == [4, 0, 1, 2, 3]


# case 12: refused plans


@pytest.mark.parametrize("window", [("none", 0), ("standard", 4)], ids=["full", "window"])
def test_plan_that_fails_late_leaves_cells_and_heads_unchanged(window: tuple[str, int]) -> None:
    streams = memory(16, window=window)
    decode(streams, 0, 9)
    streams.seq_rm(0, 2, 3)
    streams.seq_cp(0, 1, 5, None)
    before = state(streams)
    with pytest.raises(NoSlotError) as error:
        slots.prepare(streams, [run(9, 5), run(14, 5), run(19, 17)])
    assert error.value.facts["part"] == "kv"
    assert error.value.facts["ubatch"] in (1, 2)
    assert state(streams) == before


def test_plan_that_purges_on_its_way_restores_what_it_purged() -> None:
    streams = memory(8, window=("standard", 2))
    decode(streams, 0, 8)
    streams.heads[0] = 3  # reuse begins in the middle: positions 0 .. 2 are purged with 3
    before = state(streams)
    assert [s.idxs[0].tolist() for s in slots.prepare(streams, [run(8, 2), run(10, 2)])] == [[3, 4], [5, 6]]
    assert state(streams) == before


def test_failed_search_names_part_needed_and_free_cells() -> None:
    streams = memory(8, name="sliding window part")
    decode(streams, 0, 6)
    with pytest.raises(
        NoSlotError, match="sliding window part: no slot for ubatch 0: 3 cells needed, 2 of 8 free"
    ):
        slots.prepare(streams, [run(6, 3)])


def test_plan_places_each_ubatch_behind_the_one_before() -> None:
    streams = memory(16)
    found = slots.prepare(streams, [run(0, 5), run(5, 4), run(9, 3)])
    assert [s.head for s in found] == [0, 5, 9]
    assert streams.cells[0].n_used == 0


def test_journal_restores_two_dimensional_places() -> None:
    streams = CellStreams(StreamsSpec(4, 1, 1, 4, SlidingWindow("standard", 2)))
    first = ubatch([(i, 0, (i, 7 - i)) for i in range(4)], 1)
    slots.apply_ubatch(streams, slots.find_slot(streams, first), first)
    places = streams.cells[0].ext_x.tolist(), streams.cells[0].ext_y.tolist()
    assert places == ([0, 1, 2, 3], [7, 6, 5, 4])
    u = ubatch([(4, 0, (50, 60)), (4, 0, (51, 61))], 1)
    journal = slots.Journal(streams)
    slots.apply_ubatch(streams, slots.find_slot(streams, u), u, journal)
    assert streams.cells[0].ext_x.tolist() == [50, 51, 2, 3]
    journal.undo()
    assert (streams.cells[0].ext_x.tolist(), streams.cells[0].ext_y.tolist()) == places


# case 14: two sequences in one small window part


@pytest.mark.parametrize("seed", range(6))
def test_window_part_of_the_right_size_always_has_a_slot(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, n_ubatch, last = 8 * 2 + 8, 8, [0, 0]
    streams = memory(size, 2, window=("standard", 8))
    while min(last) < 60:
        tokens = []
        for seq in rng.integers(0, 2, rng.integers(1, 33)).tolist():
            if last[seq] < 60:
                tokens.append((last[seq], seq))
                last[seq] += 1
        batches = [ubatch(tokens[i : i + n_ubatch], 2) for i in range(0, len(tokens), n_ubatch)]
        for slot, u in zip(slots.prepare(streams, batches), batches, strict=True):
            slots.apply_ubatch(streams, slot, u)
        for seq in range(2):
            mine = sorted(streams.cells[0].pos[streams.cells[0].find(seq)].tolist())
            assert mine == list(range(last[seq] - len(mine), last[seq])), "a hole between lowest and highest"


# streams


def test_streams_get_their_own_cells() -> None:
    streams = memory(8, 3, 3)
    decode(streams, 0, 2, 1)
    u = ubatch([(2, 1), (3, 1), (0, 2), (1, 2)], 3)
    slot = slots.prepare(streams, [u])[0]
    assert (slot.s0, slot.s1, slot.strm) == (1, 2, (1, 2))
    assert slot.idxs.tolist() == [[2, 3], [0, 1]]
    assert (slot.n_stream, slot.size, slot.head, slot.is_contiguous) == (2, 2, 2, False)
    slots.apply_ubatch(streams, slot, u)
    assert streams.heads == [0, 4, 2]


@pytest.mark.parametrize(
    ("idxs", "want"), [([3, 4, 5], True), ([3, 5, 6], False), ([4, 3, 2], False), ([7], True)]
)
def test_contiguous_means_one_ascending_run(idxs: list[int], want: bool) -> None:
    assert slots.SlotInfo(0, 0, (0,), np.array([idxs], np.int32)).is_contiguous is want


# inputs


def slot_of(strm: list[int], idxs: list[list[int]]) -> slots.SlotInfo:
    return slots.SlotInfo(min(strm), max(strm), tuple(strm), np.array(idxs, np.int32))


@pytest.mark.parametrize(
    "slot", [slot_of([0], [[3, 1]]), slot_of([2], [[3, 1]]), slot_of([1, 3], [[3], [0]])]
)
def test_k_indices_are_rows_of_all_streams(slot: slots.SlotInfo) -> None:
    out = np.zeros(2, np.int64)
    slots.fill_k_idxs(slot, 10, out)
    assert out.tolist() == [
        s * 10 + i for s, row in zip(slot.strm, slot.idxs.tolist(), strict=True) for i in row
    ]


@pytest.mark.parametrize(
    "slot", [slot_of([0], [[3, 1]]), slot_of([2], [[3, 1]]), slot_of([1, 3], [[3], [0]])]
)
def test_v_indices_of_a_transposed_cache_are_its_elements(slot: slots.SlotInfo) -> None:
    kv_size, n_embd_v = 10, 3
    out = np.zeros(2 * n_embd_v, np.int64)
    slots.fill_v_idxs(slot, kv_size, n_embd_v, out)
    want = [
        s * kv_size * n_embd_v + j * kv_size + i
        for s, row in zip(slot.strm, slot.idxs.tolist(), strict=True)
        for i in row
        for j in range(n_embd_v)
    ]
    assert out.tolist() == want


def test_k_indices_beyond_32_bits_do_not_wrap() -> None:
    out = np.zeros(1, np.int64)
    slots.fill_k_idxs(slot_of([255], [[7]]), 1 << 24, out)
    assert out[0] == 255 * (1 << 24) + 7
    big = np.zeros(2, np.int64)
    slots.fill_v_idxs(slot_of([3], [[7]]), 1 << 30, 2, big)
    assert big.tolist() == [(3 * 2 + j) * (1 << 30) + 7 for j in range(2)]


def test_k_shift_input_is_the_pending_shift_of_every_stream() -> None:
    streams = memory(4, 2, 2)
    decode(streams, 0, 3, 0)
    decode(streams, 0, 2, 1)
    streams.seq_add(0, 1, None, 5)
    streams.seq_add(1, 0, None, -1)
    out = np.full(8, 99, np.int32)
    slots.fill_k_shift(streams, out)
    assert out.tolist() == [0, 5, 5, 0, 0, -1, 0, 0]


@pytest.mark.parametrize(
    ("size", "n_used", "n_pad", "want"),
    [(1024, 0, 1, 256), (1024, 1, 1, 256), (1024, 256, 1, 256), (1024, 257, 1, 512), (300, 290, 1, 300)]
    + [(100, 5, 1, 100), (1024, 300, 512, 512), (2048, 600, 384, 768)],
)
def test_n_kv_is_padded_to_at_least_256_and_bounded_by_the_size(
    size: int, n_used: int, n_pad: int, want: int
) -> None:
    streams = memory(size)
    if n_used:
        decode(streams, 0, n_used)
    assert slots.n_kv(streams, slot_of([0], [[0]]), n_pad) == want


def test_n_kv_is_the_largest_over_the_streams_of_the_slot() -> None:
    streams = memory(1024, 3, 3)
    decode(streams, 0, 600, 1)
    decode(streams, 0, 900, 2)
    assert slots.n_kv(streams, slot_of([0, 1], [[0], [0]])) == 768
