"""Sequence operations over streams: what they refuse, where heads go, and cases from public reports."""

from __future__ import annotations

import numpy as np
import pytest

from pyggmlkv.errors import SequenceError
from pyggmlkv.memory import slots
from pyggmlkv.memory.mask import SlidingWindow
from pyggmlkv.memory.seq_ops import CellStreams, StreamsSpec
from tests.memory.ubatches import run, ubatch

MAX = 2**31 - 1


def decode(streams: CellStreams, pos0: int, n: int, seq: int = 0) -> None:
    u = run(pos0, n, seq, streams.spec.n_seq_max)
    slots.apply_ubatch(streams, slots.prepare(streams, [u])[0], u)


def state(streams: CellStreams) -> object:
    cells = [
        (c.pos.tobytes(), c.shift.tobytes(), c.seq.tobytes(), c.n_used, c.has_shift) for c in streams.cells
    ]
    return cells, list(streams.heads), list(streams.stream_copies)


def positions(streams: CellStreams, seq: int) -> list[int]:
    cells = streams.of(seq)
    return cells.pos[cells.find(seq)].tolist()


def four_streams() -> CellStreams:
    streams = CellStreams(StreamsSpec(16, 4, 4))
    decode(streams, 0, 16)
    return streams


# case 11: copies between streams


@pytest.mark.parametrize(("p0", "p1"), [(0, 8), (0, 15), (1, None), (4, 16)])
def test_partial_copy_between_streams_is_refused_and_changes_nothing(p0: int, p1: int | None) -> None:
    streams = four_streams()
    before = state(streams)
    with pytest.raises(SequenceError, match=r"0 \.\. 15"):
        streams.seq_cp(0, 1, p0, p1)
    assert state(streams) == before


@pytest.mark.parametrize(("p0", "p1"), [(None, None), (0, 16), (-1, -1), (None, 99)])
def test_full_copy_between_streams_replaces_the_target_and_queues_the_buffers(p0: int, p1: int) -> None:
    streams = four_streams()
    decode(streams, 30, 3, seq=1)
    streams.seq_cp(0, 1, p0, p1)
    assert positions(streams, 1) == list(range(16))
    assert streams.stream_copies == [(0, 1)]
    assert streams.heads[1] == streams.heads[0]


def test_chain_of_copies_before_an_update_keeps_its_order() -> None:
    streams = four_streams()
    streams.seq_cp(0, 1)
    streams.seq_cp(1, 2)
    assert streams.stream_copies == [(0, 1), (1, 2)]
    assert positions(streams, 2) == list(range(16))


def test_copy_between_streams_carries_a_pending_shift() -> None:
    streams = four_streams()
    streams.seq_rm(0, 4, 8)
    streams.seq_add(0, 8, None, -4)
    streams.seq_cp(0, 1)
    assert np.array_equal(streams.cells[1].shift, streams.cells[0].shift)
    assert streams.cells[1].has_shift
    assert streams.seq_pos_max(1) == 11


def test_change_of_the_source_after_a_copy_leaves_the_target_alone() -> None:
    streams = four_streams()
    streams.seq_cp(0, 1)
    streams.seq_rm(0)
    assert positions(streams, 1) == list(range(16))


def test_copy_onto_itself_changes_nothing() -> None:
    streams = four_streams()
    before = state(streams)
    streams.seq_cp(0, 0, 3, 4)
    assert state(streams) == before


def test_partial_copy_in_one_stream_is_bookkeeping() -> None:
    streams = CellStreams(StreamsSpec(16, 4))
    decode(streams, 0, 16)
    streams.seq_cp(0, 1, 0, 8)
    assert positions(streams, 1) == list(range(8))
    assert streams.cells[0].n_used == 16
    assert not streams.stream_copies


# case 25: several moves before one update


def test_cut_and_move_twice_adds_up_to_one_turn_per_token() -> None:
    streams = CellStreams(StreamsSpec(16, 1))
    decode(streams, 0, 9)  # a b c d e f g h j
    streams.seq_rm(0, 2, 4)
    streams.seq_add(0, 4, None, -2)
    streams.seq_rm(0, 4, 5)
    streams.seq_add(0, 5, None, -1)
    cells = streams.cells[0]
    kept = [0, 1, 4, 5, 7, 8]
    assert cells.find(0).tolist() == kept
    assert cells.pos[kept].tolist() == [0, 1, 2, 3, 4, 5]
    assert cells.shift[kept].tolist() == [0, 0, -2, -2, -3, -3]


# case 27: all sequences, and ids out of range


@pytest.mark.parametrize("every", [None, -1])
@pytest.mark.parametrize("n_stream", [1, 3])
def test_removal_without_an_id_takes_every_sequence(every: int | None, n_stream: int) -> None:
    streams = CellStreams(StreamsSpec(32, 3, n_stream))
    for seq in range(3):
        decode(streams, 0, 9, seq)
    streams.seq_rm(every, 4, 8)
    assert [positions(streams, seq) for seq in range(3)] == [[0, 1, 2, 3, 8]] * 3
    streams.seq_rm(every)
    assert [streams.seq_pos_max(seq) for seq in range(3)] == [None] * 3
    assert sum(c.n_used for c in streams.cells) == 0


OPS = {
    "seq_cp_from": lambda s, i: s.seq_cp(i, 0),
    "seq_cp_to": lambda s, i: s.seq_cp(0, i),
    "seq_keep": lambda s, i: s.seq_keep(i),
    "seq_add": lambda s, i: s.seq_add(i, 0, None, 1),
    "seq_div": lambda s, i: s.seq_div(i, 0, None, 2),
    "seq_pos_min": lambda s, i: s.seq_pos_min(i),
    "seq_pos_max": lambda s, i: s.seq_pos_max(i),
    "prune": lambda s, i: s.prune(i, 0, 1),
}


@pytest.mark.parametrize("seq", [-1, 3, 256])
@pytest.mark.parametrize("op", OPS)
def test_id_out_of_range_is_refused_and_changes_nothing(op: str, seq: int) -> None:
    streams = CellStreams(StreamsSpec(8, 3))
    decode(streams, 0, 5)
    before = state(streams)
    with pytest.raises(SequenceError, match=f"id {seq} given"):
        OPS[op](streams, seq)
    assert state(streams) == before


@pytest.mark.parametrize("seq", [3, -2])
def test_removal_with_an_id_out_of_range_is_refused(seq: int) -> None:
    with pytest.raises(SequenceError, match=f"id {seq} given"):
        CellStreams(StreamsSpec(8, 3)).seq_rm(seq)


# positions


@pytest.mark.parametrize("d", [0, -2])
def test_divisor_below_one_is_refused(d: int) -> None:
    with pytest.raises(SequenceError, match="1 or more"):
        CellStreams(StreamsSpec(8, 1)).seq_div(0, None, None, d)


def test_position_beyond_31_bits_is_refused_and_changes_nothing() -> None:
    streams = CellStreams(StreamsSpec(8, 1))
    decode(streams, MAX - 4, 3)
    before = state(streams)
    with pytest.raises(SequenceError, match=str(MAX)):
        streams.seq_add(0, None, None, 3)
    assert state(streams) == before
    streams.seq_add(0, None, None, 2)
    assert streams.seq_pos_max(0) == MAX


def test_large_shift_of_low_positions_passes_beside_a_high_one() -> None:
    streams = CellStreams(StreamsSpec(8, 1))
    decode(streams, 0, 2)
    decode(streams, MAX - 4, 1)
    streams.seq_add(0, 0, 2, 100)
    assert positions(streams, 0) == [100, 101, MAX - 4]


def test_cell_pushed_below_zero_is_freed_and_the_head_goes_there() -> None:
    streams = CellStreams(StreamsSpec(16, 2))
    decode(streams, 0, 10)
    streams.seq_add(0, 2, 8, -4)
    assert positions(streams, 0) == [0, 1, 0, 1, 2, 3, 8, 9]
    assert streams.cells[0].find(0).tolist() == [0, 1, 4, 5, 6, 7, 8, 9]
    assert streams.heads == [2]


def test_shared_cell_pushed_below_zero_leaves_all_its_sequences() -> None:
    streams = CellStreams(StreamsSpec(16, 3))
    decode(streams, 0, 6)
    streams.seq_cp(0, 2)
    streams.seq_add(0, None, None, -2)
    assert positions(streams, 2) == [0, 1, 2, 3]
    assert (streams.seq_pos_min(2), streams.seq_pos_max(2)) == (0, 3)


@pytest.mark.parametrize(("delta", "p0", "p1"), [(0, 0, None), (5, 3, 3)], ids=["no-delta", "empty-range"])
def test_shift_of_nothing_keeps_the_head(delta: int, p0: int, p1: int | None) -> None:
    streams = CellStreams(StreamsSpec(16, 1))
    decode(streams, 0, 6)
    streams.seq_add(0, p0, p1, delta)
    assert streams.heads == [6]


@pytest.mark.parametrize(("shift", "turns"), [("upstream", [0, 1, 1, 2]), ("pure", [0, -1, -1, -2])])
def test_division_queues_the_turn_that_the_setting_names(shift: str, turns: list[int]) -> None:
    streams = CellStreams(StreamsSpec(4, 1, shift=shift))
    decode(streams, 0, 4)
    streams.seq_div(0, None, None, 2)
    assert positions(streams, 0) == [0, 0, 1, 1]
    assert streams.cells[0].shift.tolist() == turns


def test_keep_touches_only_its_own_stream() -> None:
    streams = CellStreams(StreamsSpec(8, 2, 2))
    decode(streams, 0, 3, 0)
    decode(streams, 0, 3, 1)
    streams.seq_keep(0)
    assert positions(streams, 1) == [0, 1, 2]


def test_clear_forgets_cells_heads_and_queued_copies() -> None:
    streams = four_streams()
    streams.seq_cp(0, 1)
    streams.seq_add(0, None, None, 1)
    streams.clear()
    assert state(streams) == state(CellStreams(StreamsSpec(16, 4, 4)))


@pytest.mark.parametrize("p1", [10, 11, None])
def test_removal_of_the_end_lowers_the_highest_position(p1: int | None) -> None:
    streams = CellStreams(StreamsSpec(16, 1))
    decode(streams, 0, 10)
    streams.seq_rm(0, 7, p1)
    assert streams.seq_pos_max(0) == 6


@pytest.mark.parametrize("p0", [None, 0])
def test_removal_of_the_start_raises_the_lowest_position(p0: int | None) -> None:
    streams = CellStreams(StreamsSpec(16, 1))
    decode(streams, 0, 10)
    streams.seq_rm(0, p0, 4)
    assert streams.seq_pos_min(0) == 4


def test_copy_onto_a_sequence_with_cells_widens_its_range() -> None:
    streams = CellStreams(StreamsSpec(16, 2))
    decode(streams, 5, 3, 0)
    decode(streams, 0, 2, 1)
    streams.seq_cp(0, 1)
    assert (streams.seq_pos_min(1), streams.seq_pos_max(1)) == (0, 7)


# windows


@pytest.mark.parametrize(
    ("window", "left"),
    [(("standard", 8), range(33, 41)), (("chunked", 8), range(40, 41)), (("symmetric", 8), range(36, 41))],
    ids=lambda v: str(v[0]) if isinstance(v, tuple) else "",
)
def test_pruning_leaves_what_the_last_query_sees(window: tuple, left: range) -> None:
    streams = CellStreams(StreamsSpec(64, 1, window=SlidingWindow(*window)))
    decode(streams, 0, 41)
    streams.prune(0, 40, 40)
    assert positions(streams, 0) == list(left)


def test_pruning_counts_what_the_first_query_saw() -> None:
    streams = CellStreams(StreamsSpec(64, 1, window=SlidingWindow("standard", 8)))
    decode(streams, 0, 20)
    assert streams.prune(0, 10, 19) == 8
    assert streams.prune(0, 13, 19) == 2


# case 5 at cell level: a cut before the window, then on


def test_positions_after_a_deep_cut_never_double_and_cells_stay_bounded() -> None:
    streams = CellStreams(StreamsSpec(32, 1, window=SlidingWindow("standard", 8)))
    for pos in range(0, 40, 8):
        decode(streams, pos, 8)
    for _ in range(50):
        streams.seq_rm(0, 10, None)
        last = streams.seq_pos_max(0)
        assert last is None or last <= 9
        decode(streams, 10, 4)
        mine = positions(streams, 0)
        assert len(mine) == len(set(mine))
        assert streams.cells[0].n_used <= 32


# state ranges


def test_state_ranges_of_a_sequence_leave_out_what_the_window_masks() -> None:
    streams = CellStreams(StreamsSpec(32, 2, window=SlidingWindow("standard", 4)))
    decode(streams, 0, 6, 0)
    decode(streams, 0, 3, 1)
    decode(streams, 6, 3, 0)
    assert streams.state_ranges(0, 0) == [(5, 6), (9, 12)]
    assert streams.state_ranges(0) == [(0, 12)]


def test_state_ranges_are_runs_of_used_cells() -> None:
    streams = CellStreams(StreamsSpec(16, 3))
    decode(streams, 0, 10)
    streams.seq_rm(0, 3, 5)
    streams.seq_cp(0, 1, 7, 9)
    assert streams.state_ranges(0) == [(0, 3), (5, 10)]
    assert streams.state_ranges(0, 1) == [(7, 9)]
    assert streams.state_ranges(0, 2) == []


def test_ops_on_an_empty_memory_change_nothing() -> None:
    streams = CellStreams(StreamsSpec(8, 2))
    before = state(streams)
    streams.seq_rm(0)
    streams.seq_rm(None, 3, 9)
    streams.seq_cp(0, 1)
    streams.seq_keep(1)
    streams.seq_add(0, None, None, 3)
    streams.seq_div(0, None, None, 3)
    assert state(streams) == before


def test_token_of_several_sequences_belongs_to_all() -> None:
    streams = CellStreams(StreamsSpec(8, 3))
    u = ubatch([(0, [0, 2]), (1, [2])], 3)
    slots.apply_ubatch(streams, slots.find_slot(streams, u), u)
    assert [positions(streams, s) for s in range(3)] == [[0], [], [0, 1]]
