"""Speed side by side with libllama, in one process on one ggml: alternating rounds, medians, ratios.

    python scripts/bench_llama.py [MODEL] [--rounds N] [--threads N] [--prompt N] [--predict N] [--json]

The reference runs a bare `llama_decode` loop on a batch made once; we run `Context.decode`. A ratio above 1 means that
we are faster. A timing is never a test: this prints, it does not judge.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import numpy as np

import pyggmlkv
from pyggmlkv.fetch import fetch
from scripts.compare_llama import reference_module
from tests.oracle.libllama import ContextParams, RefModel, load


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: tokens of the prompt, of the generation, rounds, threads."""

    n_prompt: int
    n_predict: int
    rounds: int
    threads: int


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Medians of one figure, tokens per second."""

    name: str
    ours: float
    reference: float

    @property
    def ratio(self) -> float:
        return self.ours / self.reference


class Reference:
    """libllama's own loop: a batch struct filled once, then nothing but `llama_decode`."""

    def __init__(self, model: RefModel, sizes: Sizes) -> None:
        params = ContextParams(n_ctx=1024, n_threads=sizes.threads, flash_attn="on")
        self._ctx = model.context(params)
        self._lib, self._ffi = model.library.lib, model.library.ffi

    def clear(self) -> None:
        self._ctx.memory.clear(False)

    def prompt(self, tokens: np.ndarray) -> None:
        self._decode(self._batch(tokens))

    def predict(self, n: int) -> None:
        token = np.array([1], np.int32)
        batch = self._batch(token)
        for i in range(n):
            token[0] = i + 1
            self._decode(batch)

    def _batch(self, tokens: np.ndarray) -> Any:
        batch = self._ffi.new("struct llama_batch *")
        batch.n_tokens = len(tokens)
        batch.token = self._ffi.cast("llama_token *", tokens.ctypes.data)
        self._keep = tokens
        return batch

    def _decode(self, batch: Any) -> None:
        if self._lib.llama_decode(self._ctx.ptr, batch[0]):
            raise SystemExit("the reference refused the batch")
        self._lib.llama_synchronize(self._ctx.ptr)


class Ours:
    """The public API as a user calls it."""

    def __init__(self, model: pyggmlkv.Model, sizes: Sizes) -> None:
        self.ctx = pyggmlkv.Context(model, n_ctx=1024, n_threads=sizes.threads, flash_attn="on")

    def clear(self) -> None:
        self.ctx.memory.clear(data=False)

    def prompt(self, tokens: np.ndarray) -> None:
        self.ctx.decode(pyggmlkv.Batch(tokens))

    def predict(self, n: int) -> None:
        for i in range(n):
            self.ctx.decode(pyggmlkv.Batch([i + 1]))


def timed(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def measure(ours: Ours, reference: Reference, sizes: Sizes) -> list[Measured]:
    """Alternate sides round by round; the first round warms both up and is not counted."""
    tokens = np.random.default_rng(0).integers(0, 1000, sizes.n_prompt).astype(np.int32)
    seconds: dict[tuple[str, str], list[float]] = {}
    for round_ in range(sizes.rounds + 1):
        sides = [("ours", ours), ("reference", reference)]
        for name, side in sides if round_ % 2 else reversed(sides):
            side.clear()
            prompt = timed(lambda side=side: side.prompt(tokens))
            predict = timed(lambda side=side: side.predict(sizes.n_predict))
            if round_:
                seconds.setdefault((name, "prompt"), []).append(prompt)
                seconds.setdefault((name, "decode"), []).append(predict)

    def rate(side: str, what: str, n: int) -> float:
        return n / statistics.median(seconds[side, what])

    rows = (("prompt", sizes.n_prompt), ("decode", sizes.n_predict))
    return [Measured(f"{what} {n}", rate("ours", what, n), rate("reference", what, n)) for what, n in rows]


def python_time_per_step(model: pyggmlkv.Model, sizes: Sizes, n: int = 200) -> float:
    """Microseconds of one reused step that are not spent in the graph run, median."""
    ctx = pyggmlkv.Context(model, n_ctx=1024, n_threads=sizes.threads, flash_attn="on")
    scheduler = ctx._runner.scheduler
    inside = [0.0]
    compute = scheduler.graph_compute

    def clocked(graph: Any, *, check_ids: bool) -> None:
        begun = time.perf_counter()
        compute(graph, check_ids=check_ids)
        inside[0] = time.perf_counter() - begun

    scheduler.graph_compute = clocked  # type: ignore[method-assign]
    spent = [(timed(lambda i=i: ctx.decode(pyggmlkv.Batch([i + 1]))) - inside[0]) * 1e6 for i in range(n)]
    ctx.close()
    return statistics.median(spent[20:])


def import_time() -> float:
    """Seconds to import the package and make its names ready, in a fresh interpreter, median of 5."""
    code = "import time; t = time.perf_counter(); import pyggmlkv; pyggmlkv.Context; print(time.perf_counter() - t)"
    return statistics.median(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    )


def install_size() -> int:
    """Bytes of the package as installed, libraries included."""
    package = Path(pyggmlkv.__file__).parent
    return sum(f.stat().st_size for f in package.rglob("*") if f.is_file() and "__pycache__" not in f.parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--predict", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    path = args.model or fetch("smollm2-135m")
    sizes = Sizes(args.prompt, args.predict, args.rounds, args.threads)
    library = load(reference_module())
    with RefModel(library, path) as theirs, pyggmlkv.Model.load(path) as mine:
        rows = measure(Ours(mine, sizes), Reference(theirs, sizes), sizes)
        step = python_time_per_step(mine, sizes)
    facts = {"python_us_per_step": step, "import_seconds": import_time(), "install_bytes": install_size()}
    if args.json:
        rates = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows]
        print(json.dumps({"model": path.name, "rates": rates, **facts}))
        return
    print(f"{path.name}, {sizes.threads} threads, median of {sizes.rounds} alternating rounds")
    print(f"{'':14}{'ours':>12}{'libllama':>12}{'ratio':>8}")
    for row in rows:
        print(f"{row.name:14}{row.ours:8.1f} t/s{row.reference:8.1f} t/s{row.ratio:8.3f}")
    print(f"Python time per decode step, graph reused: {step:.0f} us")
    print(f"import: {facts['import_seconds']:.2f} s, installed: {facts['install_bytes'] / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
