"""What the misuse tables share: a case, short names for tensors, and the one way to check it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from pyggmlkv.binding import Tensor, TensorArena, ops
from pyggmlkv.errors import PyggmlkvError


class Case(NamedTuple):
    """`call` must raise `error`, and the message must contain every word of `words`."""

    call: Callable[[Any], object]
    error: type[PyggmlkvError]
    words: tuple[str, ...]


class Tools:
    """Short names for what the cases need."""

    def __init__(self, arena: TensorArena) -> None:
        self.c = arena

    def f32(self, *ne: int) -> Tensor:
        return self.c.new_tensor("f32", *ne)

    def of(self, dtype: str, *ne: int) -> Tensor:
        return self.c.new_tensor(dtype, *ne)

    def turned(self, *ne: int) -> Tensor:
        """f32, permuted in its first dimension."""
        return ops.transpose(self.c, self.f32(*ne))

    def closed(self) -> Tensor:
        with TensorArena(1) as arena:
            return arena.new_tensor("f32", 4)

    def full(self) -> TensorArena:
        return TensorArena(0)


def case(call: Callable[[Any], object], error: type[PyggmlkvError], *words: str) -> Case:
    return Case(call, error, words)


def check(case: Case, tools: Tools) -> None:
    with pytest.raises(PyggmlkvError) as caught:
        case.call(tools)
    assert type(caught.value) is case.error
    for word in case.words:
        assert word in str(caught.value)
