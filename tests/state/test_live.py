"""States of live memories: equal to the reference's byte for byte, both ways, whole, by sequence, in part, in files."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggmlkv.errors import StateError
from pyggmlkv.memory.recurrent.memory import RecurrentMemory, RecurrentSpec
from pyggmlkv.state.live import Live
from pyggmlkv.state.reader import load_bytes
from pyggmlkv.state.writer import save_bytes
from tests.side_by_side import Models, Pair
from tests.state.kinds import KINDS, N_SEQ, Kind, decode, everything, image

STATES: list[Any] = [(None, False), *((s, partial) for s in range(N_SEQ) for partial in (False, True))]


def assert_equal_states(pair: Pair, step: str = "") -> None:
    """Both sides save the same bytes, whole, by sequence and in part."""
    pair.reference.memory.update()
    for seq_id, partial in STATES:
        theirs = pair.reference.state_get(seq_id, partial=partial)
        assert pair.ours.state_get(seq_id, partial) == theirs, f"{step}: sequence {seq_id}, partial {partial}"


def filled(pair: Pair) -> None:
    """Three sequences of different lengths, one longer than the window, one a copy that went on."""
    decode(pair, 13, 0, seed=1)
    decode(pair, 5, 1, seed=2)
    decode(pair, 9, 0, seed=3)
    pair.memory("seq_cp", 0, 2, None, None)
    decode(pair, 4, 2, seed=4)


def test_saved_states_equal_the_reference(pair: Pair) -> None:
    assert_equal_states(pair, "empty")
    filled(pair)
    assert_equal_states(pair)
    assert pair.comparison.bits_equal, pair.comparison.first_difference


def test_saved_files_equal_the_reference_and_each_reads_the_other(pair: Pair, tmp_path: Path) -> None:
    filled(pair)
    for seq_id, tokens in ((None, [5, 6, 7]), (1, []), (2, [127])):
        pair.ours.state_save(tmp_path / "ours", tokens, seq_id)
        pair.reference.state_save(tmp_path / "theirs", tokens, seq_id)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
        assert pair.ours.state_load(tmp_path / "theirs", seq_id) == tokens
        if seq_id is not None or pair.setup.kv_unified:
            assert pair.reference.state_load(tmp_path / "ours", seq_id) == tokens
            assert_equal_states(pair, f"after loading {seq_id}")


def test_a_restored_whole_state_saves_as_it_was(pair: Pair) -> None:
    filled(pair)
    data = pair.reference.state_get()
    decode(pair, 6, 1, seed=5)
    pair.ours.state_set(data)
    assert pair.ours.state_get() == data
    if pair.memory_kind == "recurrent" or pair.setup.kv_unified:
        # with several streams the reference forgets all but the last
        assert pair.reference.state_set(data) == len(data)
        assert_equal_states(pair)


@pytest.mark.parametrize("partial", [False, True], ids=["all", "partial"])
def test_a_sequence_is_restored_under_another_id_where_the_reference_puts_it(
    pair: Pair, partial: bool
) -> None:
    filled(pair)
    for src, dst in ((1, 2), (0, 1), (2, 2)):
        data = pair.reference.state_get(src, partial=partial)
        assert pair.reference.state_set(data, dst, partial=partial) == len(data)
        pair.ours.state_set(data, dst, partial)
        assert_equal_states(pair, f"{src} as {dst}")
    pair.compare_positions(N_SEQ)
    if not partial:
        decode(pair, 5, 1, seed=6, logits="all")
        decode(pair, 3, 2, seed=7, logits="all")
    assert pair.comparison.bits_equal, pair.comparison.first_difference


@pytest.mark.parametrize("seed", range(3))
def test_random_scripts_leave_equal_states(pair: Pair, seed: int) -> None:
    """Decodes, removals, copies, shifts, and states that move between sequences and sides."""
    rng = random.Random(seed)
    saved: list[bytes] = []
    for step in range(14):
        a, b = rng.sample(range(N_SEQ), 2)
        verb = rng.choice(("decode", "decode", "decode", "rm", "cp", "tail", "shift", "save", "load", "load"))
        last = pair.reference.memory.seq_pos_max(a)
        if verb == "decode" and (last is None or last < 60):
            decode(pair, rng.choice((1, 1, 3, 9)), a, seed=100 * seed + step)
        elif verb == "rm":
            pair.memory("seq_rm", a, None, None)
        elif verb == "cp" and last is not None:
            pair.memory("seq_cp", a, b, None, None)
            pair.reference.memory.update()
            pair.ours.memory.update()
        elif verb == "tail" and last is not None and pair.memory_kind in ("kv", "iswa"):
            pair.memory("seq_rm", a, max(1, last - 2), None)
        elif verb == "shift" and pair.memory_kind in ("kv", "iswa") and pair.ours.memory.can_shift and last:
            pair.memory("seq_rm", a, 1, 3)
            pair.memory("seq_add", a, 3, None, -2)
            pair.reference.memory.update()
        elif verb == "save" and last is not None:
            saved.append(pair.ours.state_get(a))
        elif verb == "load" and saved:
            data = rng.choice(saved)
            pair.ours.state_set(data, a)
            assert pair.reference.state_set(data, a) == len(data)
        assert_equal_states(pair, f"step {step}, {verb}")
    assert pair.comparison.bits_equal, pair.comparison.first_difference


def test_sixteen_greedy_steps_after_a_restore_are_equal_bit_for_bit(pair: Pair, models: Models) -> None:
    """To the reference after the same restore, and to the run that never stopped where cells stay where they were.

    A sliding window takes over masked cells from the restored head on, which sums in another order.
    """
    decode(pair, 21, 0, seed=1)
    data = pair.ours.state_get()
    with Pair(models, pair.setup) as other:
        other.ours.state_set(data)
        assert other.reference.state_set(data) == len(data)
        assert other.greedy(16, 3) == pair.greedy(16, 3)
        assert other.comparison.bits_equal, other.comparison.first_difference
        if "iswa" not in pair.memory_kind:
            assert other.ours.logits.tobytes() == pair.ours.logits.tobytes()


@pytest.mark.parametrize("kind", [KINDS["m-rope"], KINDS["m-rope-streams"]], ids=["unified", "streams"])
def test_rows_and_columns_of_an_image_are_saved_and_restored(pair: Pair) -> None:
    decode(pair, 4, 0, seed=1)
    image(pair, 0, seed=2)
    image(pair, 1, seed=3)
    assert_equal_states(pair)
    data = pair.ours.state_get(0)
    pair.ours.state_set(data, 2)
    assert pair.reference.state_set(data, 2) == len(data)
    assert_equal_states(pair, "restored")
    decode(pair, 3, 2, seed=4, logits="all")
    whole = pair.ours.state_get()
    pair.ours.state_set(whole)
    assert pair.ours.state_get() == whole
    assert pair.comparison.bits_equal, pair.comparison.first_difference


def test_what_is_pending_is_applied_before_a_save(pair: Pair) -> None:
    memory = pair.ours.memory
    decode(pair, 12, 0, seed=1)
    pair.memory("seq_cp", 0, 1, None, None)
    if pair.memory_kind in ("kv", "iswa") and memory.can_shift:
        pair.memory("seq_rm", 0, 2, 5)
        pair.memory("seq_add", 0, 5, None, -3)
    data = pair.ours.state_get()
    assert not memory.has_update
    pair.reference.memory.update()
    assert data == pair.reference.state_get()


@pytest.mark.parametrize("kind", [KINDS["kv-streams"]], ids=["kv-streams"])
def test_a_queued_stream_copy_is_made_before_its_streams_are_written(pair: Pair) -> None:
    decode(pair, 12, 0, seed=1)
    decode(pair, 5, 1, seed=2)
    first, second = pair.ours.state_get(0), pair.ours.state_get(1)
    for target in (2, 0):
        pair.ours.state_set(first, 0)
        pair.ours.memory.seq_cp(0, 2)
        pair.ours.state_set(second, target)
        pair.reference.state_set(first, 0)
        pair.reference.memory.seq_cp(0, 2)
        pair.reference.memory.update()
        pair.reference.state_set(second, target)
        assert_equal_states(pair, f"restored into {target}")


def test_a_whole_restore_zeroes_what_no_cell_holds(pair: Pair) -> None:
    """A masked row still enters products as 0 x row."""
    decode(pair, 5, 0, seed=1)
    data = pair.ours.state_get()
    decode(pair, 20, 1, seed=2)
    pair.ours.state_set(data)
    restored = everything(pair.ours)
    pair.ours.memory.clear()
    pair.ours.state_set(data)
    assert everything(pair.ours) == restored


@pytest.mark.parametrize("kind", [KINDS["kv"], KINDS["hybrid-unified"]], ids=["kv", "hybrid"])
def test_older_layouts_are_read_by_name(pair: Pair) -> None:
    """Mid-2025: no streams, whole contexts with outputs, sequences without a header."""
    decode(pair, 9, 0, seed=1)
    decode(pair, 4, 1, seed=2)
    whole, single = pair.ours.state_get(), pair.ours.state_get(0)
    head = 4 + whole[0]
    old_whole = whole[:head] + struct.pack("=IiQfQ", 1, 0, 1, 0.5, 0) + whole[head + 4 :]
    pair.ours.memory.clear()
    pair.ours.state_set(old_whole, layout="2025-06")
    assert pair.ours.state_get() == whole
    pair.ours.memory.seq_rm(1)
    pair.ours.state_set(single[12:], 1, layout="2025-06")
    assert pair.ours.state_get(1)[8:] == single[8:].replace(
        struct.pack("=Ii", 1, 0), struct.pack("=Ii", 1, 1)
    )
    with pytest.raises(StateError):
        pair.ours.state_set(single[12:], 1)


def test_a_pending_rollback_is_saved_as_the_state_it_goes_back_to() -> None:
    """Plane j of a recurrent tensor holds the state of j tokens ago; a restore goes to plane 0."""
    with RecurrentMemory(RecurrentSpec((1,), 3, 5, n_seq_max=2, size=2, n_rs_seq=3)) as memory:
        live = Live("any", memory, 2)
        r, s = memory.tensors[1]
        r_rows, s_rows = (np.arange(8 * n, dtype=np.float32).reshape(8, n) for n in (3, 5))
        r.set(r_rows)
        s.set(s_rows)
        cell = memory.states.restore_seq(0, 9)
        assert cell == 0
        memory.states.rs_pos[0] = [8, 7, 6]
        assert memory.seq_rm(0, 8)
        data = save_bytes(live, 0)
        row = 2 * 2 + 0
        assert data.endswith(struct.pack("=iQ", 0, 20) + s_rows[row].tobytes())
        assert r_rows[row].tobytes() in data
        load_bytes(live, data, 1)
        assert memory.seq_pos_max(1) == 7
        assert r.to_numpy()[1].tolist() == r_rows[row].tolist()
        assert s.to_numpy()[1].tolist() == s_rows[row].tolist()
        assert save_bytes(live, 1)[8:] == data[8:]


def test_an_empty_saved_sequence_empties_the_one_it_replaces(pair: Pair) -> None:
    data = pair.ours.state_get(1)
    decode(pair, 6, 0, seed=1)
    decode(pair, 6, 2, seed=2)
    kept = pair.ours.state_get(0)
    pair.ours.state_set(data, 2)
    assert pair.ours.memory.seq_pos_max(2) is None
    assert pair.ours.state_get(0) == kept


def test_an_empty_whole_state_empties_the_memory(pair: Pair) -> None:
    data = pair.ours.state_get()
    decode(pair, 6, 1, seed=1)
    pair.ours.state_set(data)
    assert pair.ours.state_get() == data
    assert [pair.ours.memory.seq_pos_max(s) for s in range(N_SEQ)] == [None] * N_SEQ


@pytest.mark.parametrize("kind", [KINDS["kv"], KINDS["kv-rows"], KINDS["kv-q8-q4"]], ids=["kv", "rows", "q8"])
def test_upstreams_scattered_restore(pair: Pair, kind: Kind) -> None:
    """test-state-restore-fragmented: three sequences token by token in turn, one removed and put back in its holes."""
    ids = [s for _ in range(70) for s in range(N_SEQ)]
    pair.decode([1] * 210, pos=[i // 3 for i in range(210)], seq_id=ids, logits="last")
    data = pair.ours.state_get(1)
    assert data == pair.reference.state_get(1)
    pair.memory("seq_rm", 1, None, None)
    pair.ours.state_set(data, 1)
    assert pair.reference.state_set(data, 1) == len(data)
    assert_equal_states(pair)
    decode(pair, 1, 1, seed=1)
    assert pair.comparison.bits_equal, pair.comparison.first_difference
