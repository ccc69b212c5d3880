"""Case 15: a refused restore changes nothing, whatever is wrong with the state, in memory or in a file.

Damages are made by walking over a good state with `struct` alone.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv.errors import CacheError, NoSlotError, SequenceError, StateError
from pyggmlkv.memory.config import KVSpec, LayerSpec
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.recurrent.memory import RecurrentMemory
from pyggmlkv.state import reader
from pyggmlkv.state.live import Live
from pyggmlkv.state.writer import save_bytes
from tests.side_by_side import Pair
from tests.state.conftest import OpenModels
from tests.state.kinds import KINDS, N_SEQ, Kind, decode, everything, finite, text

NAN16, NAN32 = struct.pack("=e", float("nan")), struct.pack("=f", float("nan"))
CHOSEN = ("kv", "kv-streams", "mla", "m-rope", "iswa", "iswa-streams", "recurrent", "hybrid", "hybrid-iswa")


@dataclasses.dataclass
class Field:
    """A number of a saved sequence: where, how `struct` writes it."""

    at: int
    form: str


@dataclasses.dataclass
class Rows:
    """Tensor data of a saved sequence."""

    at: int
    nbytes: int
    f32: bool


class Walk:
    """Finds every field of a sequence that was saved to memory; `fields` by name and `rows`, in order."""

    def __init__(self, data: bytes, pair: Pair) -> None:
        self.data, self.at = data, 8
        self.fields: dict[str, list[Field]] = {}
        self.rows: list[Rows] = []
        for part in Live("", pair.ours.memory, 0).parts():
            if isinstance(part, RecurrentMemory):
                self._cells(self._take("cell count", "=I"), ids=False, ext=False)
                self._tensors(2 * len(part.tensors), 0, False)
                continue
            for _ in range(self._take("n_stream", "=I")):
                n = self._take("cell count", "=I")
                if n:
                    self._cells(n, ids=True, ext=part.spec.n_pos_per_embd > 1)
                    owners = part.storage.owners
                    n_v = sum(layer.v is not None for layer in owners)
                    self._tensors(len(owners), n_v, part.spec.v_trans)
        assert self.at == len(data)

    def _take(self, name: str, form: str) -> int:
        self.fields.setdefault(name, []).append(Field(self.at, form))
        value: int = struct.unpack_from(form, self.data, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def _cells(self, n: int, ids: bool, ext: bool) -> None:
        self.n = n
        for _ in range(n):
            self._take("position", "=i")
            count = self._take("n_seq_id", "=I")
            self.at += 8 * ext + 4 * ids * count

    def _tensors(self, n_rows: int, n_v: int, transposed: bool) -> None:
        self._take("layout", "=I")
        self._take("layer count", "=I")
        for i in range(n_rows + n_v):
            kind = self._take("type", "=i")
            if i >= n_rows and transposed:
                row = self._take("element size", "=I") * self._take("n_embd", "=I")
            else:
                row = self._take("row size", "=Q")
            self.rows.append(Rows(self.at, self.n * row, kind == 0))
            self.at += self.n * row

    def changed(self, name: str, value: Callable[[int], int], which: int = -1) -> bytes:
        """The state with one number changed."""
        field = self.fields[name][which]
        out = bytearray(self.data)
        struct.pack_into(field.form, out, field.at, value(struct.unpack_from(field.form, out, field.at)[0]))
        return bytes(out)

    def with_nan(self) -> bytes:
        """All floats of the first tensor are NaN, and then the last tensor's type is wrong."""
        out = bytearray(self.changed("type", lambda kind: kind ^ 1))
        first = self.rows[0]
        nan = NAN32 if first.f32 else NAN16
        out[first.at : first.at + first.nbytes] = nan * (first.nbytes // len(nan))
        return bytes(out)


def damages(walk: Walk) -> dict[str, bytes]:
    data = walk.data
    cut = {f"cut at {p}%": data[: len(data) * p // 100] for p in (0, 1, 25, 50, 75, 99)}
    numbers = {
        "first type": walk.changed("type", lambda v: v + 1, 0),
        "last type": walk.changed("type", lambda v: v + 1),
        "no such type": walk.changed("type", lambda v: -1),
        "row size": walk.changed("row size", lambda v: v + 1, 0),
        "huge row size": walk.changed("row size", lambda v: 2**64 - 1, 0),
        "last layer count": walk.changed("layer count", lambda v: v + 1),
        "first layer count": walk.changed("layer count", lambda v: v + 2, 0),
        "no layers": walk.changed("layer count", lambda v: 0),
        "layout of V or s": walk.changed("layout", lambda v: 1 - v),
        "cell count": walk.changed("cell count", lambda v: 2**32 - 1, 0),
        "last cell count": walk.changed("cell count", lambda v: v + 1),
        "first position negative": walk.changed("position", lambda v: -1, 0),
        "last position negative": walk.changed("position", lambda v: -(2**31)),
        "ids of a cell": walk.changed("n_seq_id", lambda v: v + 1),
        "magic": b"\0" + data[1:],
        "bytes left over": data + b"\0",
        "NaN rows, then an error": walk.with_nan(),
    }
    if "n_stream" in walk.fields:
        numbers["stream count"] = walk.changed("n_stream", lambda v: v + 1)
    if "element size" in walk.fields:
        numbers["element size"] = walk.changed("element size", lambda v: v + 2)
        numbers["n_embd"] = walk.changed("n_embd", lambda v: v - 1)
    return cut | numbers


@pytest.mark.parametrize("kind", [KINDS[name] for name in CHOSEN], ids=CHOSEN)
def test_case_15_a_damaged_state_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    """From memory and from a file, into a sequence that holds something; then both sides decode on, bit for bit."""
    decode(pair, 12, 0, seed=1)
    decode(pair, 10, 1, seed=2)
    data = pair.ours.state_get(1)
    decode(pair, 3, 1, seed=3)
    before = everything(pair.ours)
    for name, bad in damages(Walk(data, pair)).items():
        with pytest.raises(StateError) as refused:
            pair.ours.state_set(bad, 1)
        assert {"field", "expected", "found"} <= set(refused.value.facts), name
        assert everything(pair.ours) == before, name
        if name == "magic":
            continue
        path = tmp_path / "state"
        path.write_bytes(struct.pack("=III", 0x67677371, 2, 0) + bad[8:])
        with pytest.raises(StateError):
            pair.ours.state_load(path, 1)
        assert everything(pair.ours) == before, f"{name}, from a file"
    assert finite(pair.ours)
    decode(pair, 4, 0, seed=4, logits="all")
    decode(pair, 4, 1, seed=5, logits="all")
    assert pair.comparison.bits_equal, pair.comparison.first_difference


@pytest.mark.parametrize("kind", [KINDS[name] for name in CHOSEN], ids=CHOSEN)
def test_case_15_a_damaged_whole_state_changes_nothing(pair: Pair) -> None:
    decode(pair, 12, 0, seed=1)
    decode(pair, 5, 1, seed=2)
    data = pair.ours.state_get()
    decode(pair, 3, 1, seed=3)
    before = everything(pair.ours)
    other_arch = data.replace(data[4:8], b"xxxx", 1)
    bad = [data[: len(data) * p // 100] for p in (0, 1, 25, 50, 75, 99)] + [other_arch, data + b"\0"]
    for damaged in bad:
        with pytest.raises(StateError):
            pair.ours.state_set(damaged)
        assert everything(pair.ours) == before


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [KINDS["hybrid-iswa"], KINDS["m-rope"]], ids=["hybrid-iswa", "m-rope"])
def test_random_bytes_in_the_records_never_change_memory_by_half(pair: Pair, seed: int) -> None:
    """A state with random bytes outside of tensor rows is refused, or taken whole."""
    decode(pair, 12, 0, seed=1)
    decode(pair, 6, 1, seed=2)
    data = pair.ours.state_get(0)
    walk = Walk(data, pair)
    in_rows = np.zeros(len(data), np.bool_)
    for rows in walk.rows:
        in_rows[rows.at : rows.at + rows.nbytes] = True
    rng = np.random.default_rng(seed)
    before = everything(pair.ours)
    for at in rng.choice(np.flatnonzero(~in_rows), 60):
        bad = bytearray(data)
        bad[at] = rng.integers(256)
        try:
            pair.ours.state_set(bytes(bad), 1)
        except StateError:
            assert everything(pair.ours) == before
        else:
            before = everything(pair.ours)


@pytest.mark.parametrize("kind", [KINDS["kv"], KINDS["iswa"]], ids=["kv", "iswa"])
def test_no_room_is_an_error_that_names_the_part_and_changes_nothing(pair: Pair) -> None:
    decode(pair, 200, 0, seed=1)
    data = pair.ours.state_get(0)
    decode(pair, 50, 1, seed=2)
    before = everything(pair.ours)
    with pytest.raises(NoSlotError, match="kv") as refused:
        pair.ours.state_set(data, 2)
    assert refused.value.facts["needed"] == 200 and refused.value.facts["free"] == 6
    assert everything(pair.ours) == before


def test_no_room_in_the_second_part_leaves_the_first_as_it_was(open_models: OpenModels) -> None:
    """The window part of another context has more cells in use than this one can place."""
    kind = KINDS["iswa"]
    small = dataclasses.replace(kind.setup, n_ctx=512)
    with Pair(open_models(kind.model), small) as pair:
        for seq_id in range(N_SEQ):
            pair.ours.decode(pyggmlkv.Batch(text(8, seq_id), seq_id=seq_id))
        data = pair.ours.state_get(0)
        memory = pair.ours.memory
        swa = memory.swa.streams.cells[0]
        free = np.flatnonzero(swa.pos < 0)
        words = np.zeros((swa.n_words, len(free)), np.uint64)
        words[0] = 0b110
        swa.put(free, np.full(len(free), 7, np.int32), words)
        memory.swa.streams.seq_cp(0, 1)
        before = everything(pair.ours)
        with pytest.raises(NoSlotError, match="kv swa"):
            pair.ours.state_set(data, 0)
        assert everything(pair.ours) == before


@pytest.mark.parametrize("n_written", [0, 1, 3])
@pytest.mark.parametrize("kind", [KINDS["iswa"], KINDS["hybrid"]], ids=["iswa", "hybrid"])
def test_a_device_that_fails_in_the_middle_costs_the_sequence_and_nothing_else(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, n_written: int
) -> None:
    decode(pair, 12, 0, seed=1)
    decode(pair, 5, 1, seed=2)
    data, kept = pair.ours.state_get(0), pair.ours.state_get(0)
    left = [n_written]
    real = reader.write_rows

    def fails(*arguments: Any) -> None:
        if not left[0]:
            raise OSError("device lost")
        left[0] -= 1
        real(*arguments)

    monkeypatch.setattr(reader, "write_rows", fails)
    with pytest.raises(OSError, match="device lost"):
        pair.ours.state_set(data, 1)
    assert pair.ours.state_get(0) == kept
    assert pair.ours.memory.seq_pos_max(1) is None
    assert all(part.seq_pos_max(1) is None for part in Live("", pair.ours.memory, 0).parts())


def test_a_layer_that_borrows_rows_is_saved_once() -> None:
    """Case 37: four layers, the last two borrow; the state is that of the two that own."""
    owners = LayerSpec.uniform(2, 1, 32)
    plain = KVSpec(layers=owners, kv_size=16)
    words = np.ones((1, 3), np.uint64)
    states = []
    for spec in (plain, dataclasses.replace(plain, reuse={2: 0, 3: 1})):
        with KVCache(spec) as cache:
            cache.streams.cells[0].put(np.arange(3), np.arange(3, dtype=np.int32), words)
            for il in (0, 1):
                cache.storage.layers[il].k.set(np.full((16, 32), il + 1, np.float16))
            states.append(save_bytes(Live("any", cache, 4)))
    assert states[0] == states[1]


def test_ids_and_flags_that_make_no_sense_are_refused(pair: Pair, kind: Kind) -> None:
    decode(pair, 4, 0, seed=1)
    data = pair.ours.state_get(0)
    before = everything(pair.ours)
    for seq_id in (-1, 256):
        with pytest.raises(SequenceError):
            pair.ours.state_get(seq_id)
        with pytest.raises(SequenceError):
            pair.ours.state_set(data, seq_id)
    with pytest.raises(StateError):
        pair.ours.state_get(None, partial=True)
    with pytest.raises(StateError):
        pair.ours.state_set(pair.ours.state_get(), None, True)
    with pytest.raises(StateError):
        pair.ours.state_set(data)
    with pytest.raises((StateError, CacheError)):
        pair.ours.state_set(pair.ours.state_get(), 0)
    assert everything(pair.ours) == before
