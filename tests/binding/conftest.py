"""Running one small op on the CPU and reading the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pyggmlkv.binding import Backend, ComputeGraph, Tensor, TensorArena, cpu_device

Build = Callable[..., Tensor]
_NAMES = {
    "float32": "f32",
    "float16": "f16",
    "float64": "f64",
    "int32": "i32",
    "int64": "i64",
    "int16": "i16",
    "int8": "i8",
}


@pytest.fixture(scope="session")
def cpu() -> Iterator[Backend]:
    """A CPU backend of one thread."""
    with cpu_device().init() as backend:
        backend.set_n_threads(1)
        yield backend


@pytest.fixture
def ctx() -> Iterator[TensorArena]:
    """An arena whose tensors have memory at once."""
    with TensorArena(256, graph_nodes=256, data_bytes=1 << 22) as arena:
        yield arena


def tensor_of(arena: TensorArena, array: Any) -> Tensor:
    """A tensor with the values of `array`; a pair (dtype, array) names the type."""
    dtype, values = array if isinstance(array, tuple) else (_NAMES[array.dtype.name], array)
    tensor = arena.new_tensor(dtype, *values.shape[::-1])
    tensor.set(values)
    return tensor


class Evaluate:
    """Builds `build(arena, *inputs)`, runs it, gives the result (and whatever else was asked for) as
    arrays.
    """

    def __init__(self, arena: TensorArena, backend: Backend) -> None:
        self.arena = arena
        self.backend = backend

    def __call__(self, build: Build, *inputs: Any) -> np.ndarray:
        result = build(self.arena, *(tensor_of(self.arena, i) for i in inputs))
        self.run([result])
        return result.to_numpy()

    def run(self, results: Sequence[Tensor]) -> None:
        graph = ComputeGraph(self.arena, 128)
        for result in results:
            graph.build_forward_expand(result)
        self.backend.graph_compute(graph)


@pytest.fixture
def evaluate(ctx: TensorArena, cpu: Backend) -> Evaluate:
    return Evaluate(ctx, cpu)
