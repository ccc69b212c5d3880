"""Memory operations side by side with libllama at many used cells: sequence operations, slots, masks, K-shift, state.

    python scripts/bench_memory.py [--cells N ...] [--rounds N] [--json]

Both sides start from the same saved state, so that every cell is in use without decoding it. A ratio above 1 means that
we are faster. With several `--cells` the rows show how cost grows. A timing is never a test: this prints, nothing more.
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
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import numpy as np

import pyggmlkv
from pyggmlkv.batch import BatchAllocator, BatchLimits
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.slots import find_slot
from scripts.compare_llama import reference_module
from tests.oracle.libllama import ContextParams, Library, RefContext, RefModel, load
from tests.oracle.tiny_models import TinyModel, write

N_SEQ = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Medians of one operation, microseconds."""

    cells: int
    name: str
    ours_us: float
    reference_us: float

    @property
    def ratio(self) -> float:
        return self.reference_us / self.ours_us


def clocked(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) * 1e6


class Sides:
    """A context on each side whose cells are all used by sequence 0, positions in order."""

    def __init__(self, library: Library, path: Path, n_cells: int) -> None:
        settings = {
            "n_ctx": n_cells + 1024,
            "n_seq_max": N_SEQ,
            "kv_unified": True,
            "flash_attn": "on",
            "n_threads": 2,
        }
        self.model = pyggmlkv.Model.load(path)
        self.ours = pyggmlkv.Context(self.model, **settings)
        self.reference_model = RefModel(library, path)
        self.reference: RefContext = self.reference_model.context(ContextParams(**settings))
        self.library = library
        self.n_cells = n_cells
        memory = self.ours.memory
        assert isinstance(memory, KVCache)
        self.memory = memory
        self.fill()
        self.saved = self.ours.state_get(0)
        self.reset()

    def fill(self) -> None:
        """Use the cells without decoding: what they hold does not matter here."""
        cells = self.memory.streams.cells[0]
        seq = np.zeros((cells.n_words, self.n_cells), np.uint64)
        seq[0] = 1
        cells.put(np.arange(self.n_cells), np.arange(self.n_cells, dtype=np.int32), seq)

    def reset(self) -> None:
        """Both sides as at the start."""
        self.ours.memory.clear(data=False)
        self.fill()
        self.reference.memory.clear(False)
        self.reference.state_set(self.saved, 0)

    def close(self) -> None:
        self.ours.close()
        self.model.close()
        self.reference.close()
        self.reference_model.close()


Operation = tuple[str, Callable[[Any], object], Callable[[Any], object]]
"""Name, what is timed, and what puts things back; both get a memory of either side."""

OPERATIONS: tuple[Operation, ...] = (
    ("seq_cp", lambda m: m.seq_cp(0, 1), lambda m: m.seq_rm(1)),
    ("seq_rm", lambda m: m.seq_rm(1), lambda m: m.seq_cp(0, 1)),
    ("seq_keep", lambda m: m.seq_keep(0), lambda m: None),
    ("seq_add", lambda m: m.seq_add(0, 0, None, 1), lambda m: m.seq_add(0, 0, None, -1)),
)


def sequence_operations(sides: Sides, rounds: int) -> list[Row]:
    rows = []
    for name, run, undo in OPERATIONS:
        sides.reset()
        spent: dict[str, list[float]] = {"ours": [], "reference": []}
        for side, memory in (("ours", sides.memory), ("reference", sides.reference.memory)):
            if name == "seq_rm":
                undo(memory)
            for _ in range(rounds):
                spent[side].append(clocked(lambda memory=memory, run=run: run(memory)))
                undo(memory)
        rows.append(Row(sides.n_cells, name, *(statistics.median(spent[s]) for s in ("ours", "reference"))))
    return rows


def slot_and_mask(sides: Sides, rounds: int, n_tokens: int) -> list[Row]:
    """Slot search, and the f16 mask, of the next `n_tokens` tokens."""
    sides.reset()
    times = sides.library.ffi.new("struct oracle_times *")
    sides.library.lib.oracle_time_step(sides.reference.ptr, n_tokens, rounds, True, times)
    allocator = BatchAllocator()
    allocator.init(pyggmlkv.Batch([1] * n_tokens), BatchLimits(128, 256, 256), sides.memory)
    slot, fill = [], []
    out = np.zeros((1, n_tokens, times.n_kv), np.float16)
    for _ in range(rounds):
        step = sides.memory.plan(allocator, n_tokens)[0]
        slot.append(clocked(lambda step=step: find_slot(sides.memory.streams, step.ubatch)))
        step.apply()
        fill.append(clocked(lambda step=step: step.fill_mask(out, True)))
        step.undo()
    return [
        Row(sides.n_cells, f"slot {n_tokens}", statistics.median(slot), times.slot_us),
        Row(sides.n_cells, f"mask {n_tokens}", statistics.median(fill), times.mask_us),
    ]


def shift(sides: Sides, rounds: int) -> Row:
    """One applied K-shift of every cell."""
    sides.reset()
    ours, theirs = [], []
    for _ in range(rounds):
        sides.memory.seq_add(0, 0, None, 1)
        ours.append(clocked(sides.memory.update))
        sides.reference.memory.seq_add(0, 0, None, 1)
        theirs.append(clocked(sides.reference.memory.update))
    return Row(sides.n_cells, "K-shift", statistics.median(ours), statistics.median(theirs))


def state(sides: Sides, rounds: int) -> list[Row]:
    """A sequence's state written to memory and read back."""
    sides.reset()
    spent: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for side, ctx in (("ours", sides.ours), ("reference", sides.reference)):
            spent.setdefault((side, "write"), []).append(clocked(lambda ctx=ctx: ctx.state_get(0)))
            spent.setdefault((side, "read"), []).append(
                clocked(lambda ctx=ctx: ctx.state_set(sides.saved, 0))
            )
    mib = len(sides.saved) / 2**20
    return [
        Row(
            sides.n_cells,
            f"state {what} {mib:.0f} MiB",
            *(statistics.median(spent[s, what]) for s in ("ours", "reference")),
        )
        for what in ("write", "read")
    ]


def measure(library: Library, path: Path, n_cells: int, rounds: int) -> list[Row]:
    sides = Sides(library, path, n_cells)
    try:
        rows = sequence_operations(sides, rounds)
        rows += slot_and_mask(sides, rounds, 1) + slot_and_mask(sides, rounds, 512)
        return [*rows, shift(sides, rounds), *state(sides, max(3, rounds // 2))]
    finally:
        sides.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, nargs="+", default=[4096 - 512, 32768 - 512, 131072])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    library = load(reference_module())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        path = write(library, TinyModel("llama"), Path(folder))
        for n_cells in args.cells:
            rows += measure(library, path, n_cells, args.rounds)
    if args.json:
        print(json.dumps([{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows]))
        return
    print(f"{'cells':>8} {'operation':22}{'ours':>12}{'libllama':>12}{'ratio':>9}")
    for row in rows:
        print(f"{row.cells:8d} {row.name:22}{row.ours_us:9.1f} us{row.reference_us:9.1f} us{row.ratio:9.1f}")


if __name__ == "__main__":
    main()
