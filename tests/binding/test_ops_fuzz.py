"""Whatever the ops accept, the CPU runs: random types, shapes, strides and options in a child that survives.

A crash shows the call that did it. Indices are all zero: an index is data, and ggml aborts on one out of
range.
"""

from __future__ import annotations

import inspect
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggmlkv.binding import ComputeGraph, RopeParams, Tensor, TensorArena, cpu_device, dtypes, ops
from pyggmlkv.errors import ArenaFullError, PyggmlkvError

N_CALLS = 1500
LEFT_OUT = ("RopeParams", "rope_yarn_corr_dims", "flash_attn_back")
NAMES = [
    n
    for n in ops.__all__
    if n not in LEFT_OUT and not any(w in n for w in ("custom", "prec", "hint", "sinks"))
]
OPTIONS = {
    "op": ("silu", "gelu", "exp", "swiglu", "reglu", "max", "avg"),
    "order": ("asc", "desc"),
    "dtype": ("f32", "f16", "q8_0", "bf16", "i32"),
    "dst_type": ("f32", "f16"),
    "mode": ("nearest", "bilinear", "bicubic", "normal", "neox"),
    "type": ("upper", "lower", "upper_diag", "lower_diag"),
}
COMMON = ("f32",) * 14 + ("f16",) * 3 + ("i32",) * 3
RARE = ("bf16", "i64", "q8_0", "q4_K", "q4_0", "i8", "f64", "q8_1", "iq2_xxs", "mxfp4")


class Fuzzer:
    """Random arguments for one op after the other; `easy` ones are accepted more often."""

    def __init__(self, seed: int, easy: bool) -> None:
        self.random = random.Random(seed)
        self.easy = easy
        self.sizes = (1, 1, 2, 2, 4) if easy else (1, 1, 2, 3, 4, 4, 8, 16, 32)
        self.base = [1, 1, 1, 1]

    def tensor(self, ctx: TensorArena) -> Tensor:
        pick = self.random
        dtype = pick.choice(COMMON if self.easy else COMMON + RARE)
        ne = [s if pick.random() < 0.7 else pick.choice((0, *self.sizes)) for s in self.base][
            : pick.randint(1, 4)
        ]
        block = dtypes.type_traits(dtype)[0]
        ne[0] = block * pick.choice((1, 2)) if block > 1 else ne[0]
        tensor = ctx.new_tensor(dtype, *ne)
        if dtype in ("f32", "f16", "bf16"):
            tensor.set(np.random.default_rng(pick.randrange(2**30)).standard_normal(tensor.shape))
        else:
            tensor.set_zero()
        return self.other_view(ctx, tensor)

    def other_view(self, ctx: TensorArena, tensor: Tensor) -> Tensor:
        pick = self.random
        chance = pick.random() * (3 if self.easy else 1)
        try:
            if chance < 0.15:
                return ops.transpose(ctx, tensor)
            if chance < 0.3:
                return ops.permute(ctx, tensor, *pick.sample(range(4), 4))
            if chance < 0.4:
                return ops.view_2d(ctx, tensor, tensor.ne[0], max(1, tensor.ne[1] // 2), tensor.nb[1] * 2, 0)
        except PyggmlkvError:
            pass
        return tensor

    def argument(self, ctx: TensorArena, parameter: inspect.Parameter, given: list[Any]) -> Any:
        kind, pick = str(parameter.annotation), self.random
        if parameter.name == "ne":
            return tuple(pick.choice(self.sizes) for _ in range(4))
        if kind == "RopeParams":
            mode: Any = pick.choice(("normal", "neox", "mrope", "imrope", "vision"))
            return RopeParams(
                pick.choice((2, 4, 8)), mode, sections=pick.choice(((1, 1, 1, 1), (2, 0, 0, 0)))
            )
        if "Tensor" in kind or kind == str(inspect.Parameter.empty):
            if "None" in kind and pick.random() < 0.4:
                return None
            return given[0] if given and pick.random() < 0.35 else self.tensor(ctx)
        if kind in ("str", "RopeMode"):
            return pick.choice(OPTIONS[parameter.name])
        if kind == "bool":
            return pick.random() < 0.5
        if kind == "float":
            return pick.choice((0.0, 0.5, 1.0, 2.0, 1e-5))
        sizes = [*given[0].ne, *given[0].nb, given[0].n_elements] if isinstance(given[0], Tensor) else []
        return pick.choice((-1, 0, 0, 1, 1, 1, 2, 2, 3, *sizes))

    def arguments(self, ctx: TensorArena, name: str) -> list[Any]:
        self.base = [self.random.choice(self.sizes) for _ in range(4)]
        given: list[Any] = []
        for parameter in list(inspect.signature(getattr(ops, name)).parameters.values())[1:]:
            given.append(self.argument(ctx, parameter, given))
        return given


def describe(name: str, arguments: list[Any]) -> str:
    shown = [f"{a.dtype} {a.ne} nb {a.nb}" if isinstance(a, Tensor) else str(a) for a in arguments]
    return f"{name}({', '.join(shown)})"


def fuzz(seed: int, easy: bool) -> int:
    """Runs in the child. Returns how many calls were accepted and computed."""
    fuzzer, computed = Fuzzer(seed, easy), 0
    with cpu_device().init() as cpu, open(os.devnull if len(sys.argv) < 4 else sys.argv[3], "w") as log:
        cpu.set_n_threads(2)
        for i in range(N_CALLS):
            with TensorArena(64, graph_nodes=64, data_bytes=1 << 22) as ctx:
                name = NAMES[i % len(NAMES)]
                try:
                    arguments = fuzzer.arguments(ctx, name)
                    print(describe(name, arguments), file=log, flush=True)
                    if name.startswith("opt_step"):
                        arguments[0].set_param()
                    result = getattr(ops, name)(ctx, *arguments)
                    graph = ComputeGraph(ctx, 64)
                    graph.build_forward_expand(result)
                    cpu.graph_compute(graph)
                    computed += 1
                except (PyggmlkvError, ArenaFullError):
                    continue
    return computed


@pytest.mark.parametrize("easy", [True, False], ids=["easy", "hard"])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_the_ops_accept_the_cpu_runs(seed: int, easy: bool, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    done = subprocess.run(
        [sys.executable, __file__, str(seed), "easy" if easy else "hard", str(log)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GGML_NO_BACKTRACE": "1"},
    )
    last = log.read_text().splitlines()[-1:]
    assert done.returncode == 0, (last, done.stderr[-500:])
    assert int(done.stdout) > N_CALLS // 10


if __name__ == "__main__":
    print(fuzz(int(sys.argv[1]), sys.argv[2] == "easy"))
