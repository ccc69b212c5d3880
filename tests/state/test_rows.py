"""Tensor rows in and out: the same bytes whether host memory is looked at, or pieces or spans go through the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pyggmlkv.binding import Tensor, TensorArena, devices
from pyggmlkv.state import rows
from pyggmlkv.state.rows import RowSet

SIZE, N_EMBD = 64, 64
PICKS = {
    "none": [],
    "one": [5],
    "run": range(10, 30),
    "all": range(SIZE),
    "holes": [0, 2, 3, 9, 40, 63],
    "scattered": range(1, 64, 2),
    "wrapped": [60, 61, 62, 63, 0, 1],
    "backwards": [9, 8, 7],
}
WAYS: dict[str, tuple[bool, int]] = {
    "host, views": (True, 0),
    "host, gathered": (True, 1 << 30),
    "backend, pieces": (False, 0),
    "backend, span": (False, 1 << 30),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    host, cost = WAYS[request.param]
    if not host:
        monkeypatch.setattr(rows, "host_bytes", lambda t: None)
    monkeypatch.setattr(rows, "VIEW_COST", cost)
    monkeypatch.setattr(rows, "TRANSFER_COST", cost)


@pytest.fixture
def tensor() -> Iterator[Callable[[str], Tensor]]:
    arenas = []

    def make(dtype: str) -> Tensor:
        arena = TensorArena(1)
        t = arena.new_tensor(dtype, N_EMBD, SIZE)
        arenas.append((devices()[-1].buffer_type.alloc_tensors(arena), arena))
        t.set_bytes(np.random.default_rng(1).integers(0, 256, t.nbytes, np.uint8).tobytes())
        return t

    yield make
    for buffer, arena in arenas:
        buffer.close()
        arena.close()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", PICKS)
@pytest.mark.usefixtures("way")
def test_rows_are_read_and_written_in_saving_order(
    tensor: Callable[[str], Tensor], name: str, dtype: str
) -> None:
    t = tensor(dtype)
    picked = RowSet.of(np.array(PICKS[name], np.int64))
    row = t.nb[1]
    table = np.frombuffer(t.get_bytes(), np.uint8).reshape(SIZE, row).copy()
    assert b"".join(rows.read_rows(t, picked, row)) == table[picked.idxs].tobytes()
    data = np.random.default_rng(2).integers(0, 256, (len(picked.idxs), row), np.uint8)
    rows.write_rows(t, picked, data)
    table[picked.idxs] = data
    assert t.get_bytes() == table.tobytes()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", PICKS)
@pytest.mark.parametrize("n_embd", [N_EMBD, 48], ids=["whole", "padded"])
@pytest.mark.usefixtures("way")
def test_columns_are_read_and_written_in_saving_order(
    tensor: Callable[[str], Tensor], name: str, dtype: str, n_embd: int
) -> None:
    t = tensor(dtype)
    size = t.nb[0]
    picked = RowSet.of(np.array(PICKS[name], np.int64))
    grid = np.frombuffer(t.get_bytes(), np.uint8).reshape(N_EMBD, SIZE, size).copy()
    want = grid[:n_embd, picked.idxs]
    assert b"".join(rows.read_columns(t, picked, n_embd, size)) == want.tobytes()
    data = np.random.default_rng(2).integers(0, 256, (n_embd, len(picked.idxs), size), np.uint8)
    rows.write_columns(t, picked, data.reshape(n_embd, len(picked.idxs) * size), size)
    grid[:n_embd, picked.idxs] = data
    assert t.get_bytes() == grid.tobytes()
