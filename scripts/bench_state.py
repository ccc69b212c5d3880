"""Saving and restoring state side by side with libllama, in one process on one ggml: alternating rounds, medians.

    python scripts/bench_state.py [--cells N] [--rounds N] [--type-k T] [--type-v T] [--flash-attn on|off] [--json]

A tiny model fills one sequence of N cells; both sides then save it and restore it, each to a new buffer.
Milliseconds are CPU time of the one thread that works. A ratio above 1 means that we are faster. A timing is never a
test: this prints, it does not judge.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import numpy as np

from pyggmlkv.memory.cells import Cells
from scripts.compare_llama import reference_module
from tests.oracle.libllama import Library, RefContext, load
from tests.oracle.tiny_models import TinyModel, write
from tests.side_by_side import Models, Pair, Setup

MODEL = {
    "embedding_length": 64,
    "attention.head_count": 1,
    "attention.head_count_kv": 1,
    "context_length": 1 << 17,
}
HEAD = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Medians of one figure, milliseconds of CPU time."""

    name: str
    ours: float
    reference: float

    @property
    def ratio(self) -> float:
        return self.reference / self.ours


class ReferenceState:
    """The reference's calls. It writes to a new buffer as we do, one of NumPy's, which has huge pages."""

    def __init__(self, library: Library, context: RefContext, data: bytes) -> None:
        self.library, self.context, self.data = library, context, data

    def write(self, seq_id: int | None) -> None:
        ffi, lib, ptr, n = self.library.ffi, self.library.lib, self.context.ptr, len(self.data)
        buffer = ffi.from_buffer("uint8_t[]", np.empty(n, np.uint8))
        if seq_id is None:
            assert lib.llama_state_get_data(ptr, buffer, n) == n
        else:
            assert lib.llama_state_seq_get_data_ext(ptr, buffer, n, seq_id, 0) == n

    def read(self, seq_id: int | None) -> None:
        lib, ptr, n = self.library.lib, self.context.ptr, len(self.data)
        buffer = self.library.ffi.from_buffer("uint8_t[]", self.data)
        if seq_id is None:
            assert lib.llama_state_set_data(ptr, buffer, n) == n
        else:
            assert lib.llama_state_seq_set_data_ext(ptr, buffer, n, seq_id, 0) == n


def median_ms(
    rounds: int, ours: Callable[[], object], reference: Callable[[], object]
) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for run, into in zip((ours, reference), times, strict=True):
            begin = time.thread_time()
            run()
            into.append(1e3 * (time.thread_time() - begin))
    return statistics.median(times[0]), statistics.median(times[1])


def filled_state(pair: Pair, n_cells: int, shuffled: bool) -> bytes:
    """A whole state of one sequence with random rows; `shuffled`: every other cell belongs to sequence 1."""
    memory = pair.ours.memory
    cells: Cells = memory.streams.cells[0]
    cells.clear()
    seq = np.ones((cells.n_words, n_cells), np.uint64)
    seq[1:] = 0
    pos = np.arange(n_cells, dtype=np.int32)
    if shuffled:
        seq[0, 1::2], pos = 2, pos // 2
    cells.put(np.arange(n_cells), pos, seq)
    return pair.ours.state_get()


def measure(pair: Pair, data: bytes, rounds: int) -> list[Measured]:
    """Whole context and sequence 0, written and read."""
    out = []
    pair.ours.state_set(data)
    assert pair.reference.state_set(data) == len(data)
    for name, seq_id in (("context", None), ("sequence", 0)):
        saved = pair.ours.state_get(seq_id)
        assert saved == pair.reference.state_get(seq_id)
        theirs = ReferenceState(pair.models.reference.library, pair.reference, saved)
        out.append(Measured(f"{name} write, {len(saved) / 1e6:.1f} MB", *median_ms(
            rounds, lambda s=seq_id: pair.ours.state_get(s), lambda t=theirs, s=seq_id: t.write(s))))  # fmt: skip
        out.append(Measured(f"{name} read", *median_ms(
            rounds, lambda d=saved, s=seq_id: pair.ours.state_set(d, s), lambda t=theirs, s=seq_id: t.read(s))))  # fmt: skip
        assert pair.ours.state_get(seq_id) == pair.reference.state_get(seq_id)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="State write and read, side by side with libllama.")
    parser.add_argument("--cells", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--type-k", default="f16")
    parser.add_argument("--type-v", default="f16")
    parser.add_argument("--flash-attn", choices=("on", "off"), default="on")
    parser.add_argument("--shuffled", action="store_true", help="two sequences, cell by cell in turn")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    setup = Setup(
        n_ctx=options.cells, n_ubatch=16, n_seq_max=2, kv_unified=True, flash_attn=options.flash_attn,
        type_k=options.type_k, type_v=options.type_v,
    )  # fmt: skip
    library = load(reference_module())
    with tempfile.TemporaryDirectory() as folder:
        path = write(library, TinyModel("llama", keys={**MODEL, **HEAD}), Path(folder))
        with Models(library, path) as models, Pair(models, setup) as pair:
            rows = measure(pair, filled_state(pair, options.cells, options.shuffled), options.rounds)
    if options.json:
        print(json.dumps([{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows], indent=1))
        return 0
    for row in rows:
        print(
            f"{row.name:24} ours {row.ours:8.2f} ms   reference {row.reference:8.2f} ms   ratio {row.ratio:5.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
