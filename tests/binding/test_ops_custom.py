"""Ops written in Python run inside a graph, on several threads, and what they raise comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyggmlkv.binding import TensorArena, ops
from pyggmlkv.errors import BindingError, ShapeError
from tests.binding.conftest import Evaluate, tensor_of

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def fill(result: Any, *rest: Any) -> None:
    *operands, task, n_tasks = rest
    values = sum(o.numpy() for o in operands) + 1
    result.numpy()[task::n_tasks] = values[task::n_tasks]


@pytest.mark.parametrize("n_tasks", [1, 2, None], ids=["one task", "two tasks", "one a thread"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_map_custom_sees_its_operands(n: int, n_tasks: int | None, evaluate: Evaluate) -> None:
    op = getattr(ops, f"map_custom{n}")
    result = evaluate(lambda c, *x: op(c, *x, fill, n_tasks), *[X] * n)
    np.testing.assert_array_equal(result, X * n + 1)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_map_custom_inplace_changes_the_first(n: int, evaluate: Evaluate, ctx: TensorArena) -> None:
    tensors = [tensor_of(ctx, X) for _ in range(n)]
    evaluate.run([getattr(ops, f"map_custom{n}_inplace")(ctx, *tensors, fill)])
    np.testing.assert_array_equal(tensors[0].numpy(), X * n + 1)


def test_custom_4d_has_a_shape_and_type_of_its_own(evaluate: Evaluate) -> None:
    def total(result: Any, a: Any, b: Any, task: int, n_tasks: int) -> None:
        result.numpy()[:] = [int(a.numpy().sum()), int(b.numpy().sum())]

    result = evaluate(lambda c, a, b: ops.custom_4d(c, "i32", 2, 1, 1, 1, [a, b], total), X, X + 1)
    np.testing.assert_array_equal(result, [66, 78])


def test_custom_inplace_works_on_a_view(evaluate: Evaluate, ctx: TensorArena) -> None:
    def double(result: Any, b: Any, task: int, n_tasks: int) -> None:
        result.numpy()[...] *= b.numpy()

    base, factor = tensor_of(ctx, X), tensor_of(ctx, np.array([2], np.float32))
    row = ops.view_1d(ctx, base, 4, base.nb[1])
    evaluate.run([ops.custom_inplace(ctx, row, [factor], double)])
    np.testing.assert_array_equal(base.numpy(), [X[0], X[1] * 2, X[2]])


def test_an_exception_is_raised_once_c_has_returned(evaluate: Evaluate, ctx: TensorArena) -> None:
    def fail(result: Any, a: Any, task: int, n_tasks: int) -> None:
        raise LookupError("from below C")

    with pytest.raises(LookupError, match="from below C"):
        evaluate(lambda c, a: ops.map_custom1(c, a, fail), X)
    np.testing.assert_array_equal(evaluate(lambda c, a: ops.map_custom1(c, a, fill), X), X + 1)


def test_wrong_arguments_are_refused(ctx: TensorArena) -> None:
    a = tensor_of(ctx, X)
    with pytest.raises(BindingError, match="expected a function"):
        ops.map_custom1(ctx, a, 3)  # type: ignore[arg-type]
    with pytest.raises(BindingError, match="n_tasks"):
        ops.map_custom1(ctx, a, fill, 0)
    with pytest.raises(BindingError, match="at most 9"):
        ops.custom_4d(ctx, "f32", 1, 1, 1, 1, [a] * 10, fill)
    with pytest.raises(ShapeError, match="four sizes"):
        ops.custom_4d(ctx, "q8_0", 7, 1, 1, 1, [a], fill)
