"""The cell view counts what is there; the text map shows it."""

from __future__ import annotations

import numpy as np
import pytest

from pyggmlkv.memory import slots
from pyggmlkv.memory.cells.view import render, view
from pyggmlkv.memory.seq_ops import CellStreams, StreamsSpec
from tests.memory.ubatches import run, ubatch


def decode(streams: CellStreams, u: object) -> None:
    slots.apply_ubatch(streams, slots.find_slot(streams, u), u)


def shared() -> CellStreams:
    streams = CellStreams(StreamsSpec(20, 4))
    decode(streams, ubatch([(0, [0, 1]), (1, [0, 1]), (2, 0), (2, 1), (3, 1)]))
    streams.seq_rm(0, 2, None)
    return streams


def test_view_counts_a_shared_cell_once_as_used_and_once_for_each_sequence() -> None:
    seen = view(shared())
    assert (seen.n_cells, seen.used_cells, seen.token_count) == (20, 4, 6)
    assert seen.seq_count[0, :6].tolist() == [2, 2, 0, 1, 1, 0]


def test_view_finds_the_longest_free_run() -> None:
    seen = view(shared())
    assert (seen.max_contiguous, seen.max_contiguous_idx, seen.max_contiguous_stream) == (15, 5, 0)


def test_view_prefers_the_first_of_equal_runs_and_names_the_stream() -> None:
    streams = CellStreams(StreamsSpec(8, 2, 2))
    decode(streams, run(0, 8, 0, 2))
    decode(streams, run(0, 8, 1, 2))
    streams.seq_rm(1, 1, 3)
    streams.seq_rm(1, 5, 7)
    seen = view(streams)
    assert (seen.max_contiguous, seen.max_contiguous_idx, seen.max_contiguous_stream) == (2, 1, 1)


def test_view_of_a_full_memory_has_no_free_run() -> None:
    streams = CellStreams(StreamsSpec(8, 1))
    decode(streams, run(0, 8, 0, 1))
    seen = view(streams)
    assert (seen.max_contiguous, seen.max_contiguous_idx, seen.max_contiguous_stream) == (0, None, None)


def test_view_is_a_copy() -> None:
    streams = shared()
    seen = view(streams)
    streams.clear()
    assert seen.pos[0, 0] == 0


def test_map_marks_sequences_shared_free_and_shifted_cells() -> None:
    streams = shared()
    streams.seq_add(1, 2, 4, 5)
    lines = render(streams).splitlines()
    assert lines[0].startswith("kv: 1 x 20 cells")
    assert lines[1] == "stream 0: 4 used, head 0, positions {0: 0..1, 1: 0..8}"
    assert lines[2] == "      0> **.11..............."
    assert lines[3] == "            ^^"


@pytest.mark.parametrize(("seq", "mark"), [(9, "9"), (10, "a"), (35, "z"), (36, "+"), (250, "+")])
def test_map_names_sequences_by_one_letter(seq: int, mark: str) -> None:
    streams = CellStreams(StreamsSpec(4, 256))
    decode(streams, ubatch([(0, seq)], 256))
    assert render(streams).splitlines()[2] == f"      0> {mark}..."


def test_map_is_narrow_and_draws_equal_rows_once() -> None:
    streams = CellStreams(StreamsSpec(4096, 2, 2))
    decode(streams, run(0, 700, 0, 2))
    lines = render(streams).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 20
    assert sum(line.startswith("stream ") for line in lines) == 2
    assert any("more like this" in line for line in lines)


def test_map_stops_after_the_rows_asked_for() -> None:
    streams = CellStreams(StreamsSpec(1024, 1))
    decode(streams, run(0, 1024, 0, 1))
    streams.cells[0].remove(np.arange(0, 1024, 65))
    lines = render(streams, max_rows=3).splitlines()
    assert len(lines) == 2 + 3 + 1
    assert lines[-1].strip() == f"... {1024 - 3 * 64} more cells"
