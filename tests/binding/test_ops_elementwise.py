"""Element-wise ops give what NumPy gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyggmlkv.binding import TensorArena, ops
from tests.binding.conftest import Evaluate, tensor_of

RNG = np.random.default_rng(7)
A = RNG.standard_normal((3, 2, 5, 8)).astype(np.float32)
B = RNG.standard_normal((5, 8)).astype(np.float32) + 3
SCALAR = np.array([1.5], np.float32)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def erf(x: Any) -> Any:
    return np.vectorize(math.erf)(x)


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


UNARY: dict[str, tuple[Callable[[Any], Any], float]] = {
    "abs": (np.abs, 0),
    "sgn": (np.sign, 0),
    "neg": (np.negative, 0),
    "step": (lambda x: (x > 0).astype(np.float32), 0),
    "tanh": (np.tanh, 1e-6),
    "elu": (lambda x: np.where(x > 0, x, np.expm1(x)), 1e-6),
    "relu": (lambda x: np.maximum(x, 0), 0),
    "sigmoid": (sigmoid, 1e-6),
    "gelu": (gelu, 2e-3),
    "gelu_erf": (lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))), 1e-5),
    "gelu_quick": (lambda x: x * sigmoid(1.702 * x), 2e-3),
    "silu": (lambda x: x * sigmoid(x), 1e-5),
    "hardswish": (lambda x: x * np.clip((x + 3) / 6, 0, 1), 1e-6),
    "hardsigmoid": (lambda x: np.clip((x + 3) / 6, 0, 1), 1e-6),
    "exp": (np.exp, 1e-5),
    "expm1": (np.expm1, 1e-5),
    "softplus": (lambda x: np.log1p(np.exp(x)), 1e-5),
    "floor": (np.floor, 0),
    "ceil": (np.ceil, 0),
    "round": (lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5), 0),
    "trunc": (np.trunc, 0),
    "sqr": (np.square, 1e-6),
    "sin": (np.sin, 1e-6),
    "cos": (np.cos, 1e-6),
}
POSITIVE: dict[str, tuple[Callable[[Any], Any], float]] = {"sqrt": (np.sqrt, 1e-6), "log": (np.log, 1e-6)}


@pytest.mark.parametrize("name", UNARY)
def test_unary_op_is_numpys(name: str, evaluate: Evaluate) -> None:
    function, tolerance = UNARY[name]
    np.testing.assert_allclose(evaluate(getattr(ops, name), A), function(A), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", POSITIVE)
def test_unary_op_of_positive_numbers_is_numpys(name: str, evaluate: Evaluate) -> None:
    function, tolerance = POSITIVE[name]
    positive = np.abs(A) + 0.1
    np.testing.assert_allclose(evaluate(getattr(ops, name), positive), function(positive), rtol=tolerance)


@pytest.mark.parametrize("name", [n for n in (*UNARY, *POSITIVE) if n not in ("hardswish", "hardsigmoid")])
def test_inplace_unary_op_overwrites_its_operand(name: str, evaluate: Evaluate, ctx: TensorArena) -> None:
    values = np.abs(A[0, 0]) + 0.1
    plain = tensor_of(ctx, values)
    target = tensor_of(ctx, values)
    expected = getattr(ops, name)(ctx, plain)
    result = getattr(ops, f"{name}_inplace")(ctx, target)
    evaluate.run([expected, result])
    np.testing.assert_array_equal(target.to_numpy(), expected.to_numpy())
    assert result.view_src == target


@pytest.mark.parametrize("name", ["silu", "relu", "gelu", "exp", "round", "softplus"])
def test_unary_by_name_is_the_op(name: str, evaluate: Evaluate) -> None:
    named = evaluate(lambda c, a: ops.unary(c, a, name), A)
    np.testing.assert_array_equal(named, evaluate(getattr(ops, name), A))
    np.testing.assert_array_equal(named, evaluate(lambda c, a: ops.unary_inplace(c, a, name), A))


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
}  # fmt: skip


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
@pytest.mark.parametrize("name", BINARY)
def test_binary_op_repeats_b(name: str, inplace: bool, evaluate: Evaluate) -> None:
    op = getattr(ops, f"{name}_inplace" if inplace else name)
    np.testing.assert_allclose(evaluate(op, A, B), BINARY[name](A, B), rtol=1e-6)


@pytest.mark.parametrize("b_type", ["f16", "f32"])
@pytest.mark.parametrize("name", BINARY)
def test_binary_op_of_f16_gives_f16(name: str, b_type: str, evaluate: Evaluate) -> None:
    result = evaluate(getattr(ops, name), ("f16", A), (b_type, B))
    assert result.dtype == np.float16
    np.testing.assert_allclose(result.astype(np.float32), BINARY[name](A, B), rtol=3e-3, atol=3e-3)


def test_add_takes_a_quantised_a(evaluate: Evaluate) -> None:
    a, b = RNG.standard_normal((2, 4, 64)).astype(np.float32)
    np.testing.assert_allclose(evaluate(ops.add, ("q8_0", a), b), a + b, atol=0.1)


def test_add_cast_adds_in_f32(evaluate: Evaluate) -> None:
    half = A.astype(np.float16)
    result = evaluate(lambda c, a, b: ops.add_cast(c, a, b, "f32"), half, B)
    np.testing.assert_allclose(result, half.astype(np.float32) + B, rtol=1e-6)


def test_add_id_adds_the_named_rows(evaluate: Evaluate) -> None:
    a = RNG.standard_normal((4, 2, 8)).astype(np.float32)
    b = RNG.standard_normal((6, 8)).astype(np.float32)
    ids = RNG.integers(0, 6, (4, 2)).astype(np.int32)
    np.testing.assert_allclose(evaluate(ops.add_id, a, b, ids), a + b[ids], rtol=1e-6)


@pytest.mark.parametrize("name", ["add1", "add1_inplace"])
def test_add1_adds_one_number(name: str, evaluate: Evaluate) -> None:
    np.testing.assert_allclose(evaluate(getattr(ops, name), A, SCALAR), A + 1.5, rtol=1e-6)


@pytest.mark.parametrize("name", ["acc", "acc_inplace", "set", "set_inplace"])
def test_part_of_a_tensor_is_added_or_set(name: str, evaluate: Evaluate, ctx: TensorArena) -> None:
    a, b = A[0, 0].copy(), RNG.standard_normal((2, 3)).astype(np.float32)
    expected = a.copy()
    expected[1:3, 2:5] = b + (expected[1:3, 2:5] if "acc" in name else 0)
    result = evaluate(
        lambda c, x, y: getattr(ops, name)(c, x, y, x.nb[1], x.nb[2], x.nb[3], x.nb[1] + 8), a, b
    )
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_set_1d_and_2d_write_a_part(evaluate: Evaluate) -> None:
    a, row = A[0, 0].copy(), np.arange(8, dtype=np.float32)
    one = evaluate(lambda c, x, y: ops.set_1d(c, x, y, x.nb[1]), a, row)
    expected = a.copy()
    expected[1] = row
    np.testing.assert_array_equal(one, expected)
    two = evaluate(lambda c, x, y: ops.set_2d(c, x, y, x.nb[1], x.nb[1] * 2), a, np.stack([row, row]))
    expected = a.copy()
    expected[2:4] = row
    np.testing.assert_array_equal(two, expected)


def test_scale_and_clamp(evaluate: Evaluate) -> None:
    np.testing.assert_allclose(evaluate(lambda c, a: ops.scale(c, a, 2.5), A), A * 2.5, rtol=1e-6)
    np.testing.assert_allclose(evaluate(lambda c, a: ops.scale_inplace(c, a, 2.5), A), A * 2.5, rtol=1e-6)
    np.testing.assert_allclose(
        evaluate(lambda c, a: ops.scale_bias(c, a, 2.5, 1), A), A * 2.5 + 1, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(evaluate(lambda c, a: ops.clamp(c, a, -0.5, 0.25), A), A.clip(-0.5, 0.25))


def test_leaky_relu_and_xielu(evaluate: Evaluate) -> None:
    leaky = evaluate(lambda c, a: ops.leaky_relu(c, a, 0.1, False), A)
    np.testing.assert_allclose(leaky, np.where(A > 0, A, 0.1 * A), rtol=1e-6)
    alpha_n, alpha_p, beta, eps = 0.8, 0.7, 0.5, -1e-6
    result = evaluate(lambda c, a: ops.xielu(c, a, alpha_n, alpha_p, beta, eps), A)
    an, ap = beta + math.log1p(math.exp(alpha_n)), math.log1p(math.exp(alpha_p))
    expected = np.where(A > 0, ap * A * A + beta * A, (np.expm1(np.minimum(A, eps)) - A) * an + beta * A)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_silu_back_is_the_gradient(evaluate: Evaluate) -> None:
    grad, x = A[0], A[1]
    expected = grad * sigmoid(x) * (1 + x * (1 - sigmoid(x)))
    np.testing.assert_allclose(evaluate(ops.silu_back, grad, x), expected, rtol=1e-5, atol=1e-6)


GATES: dict[str, tuple[Callable[[Any], Any], float]] = {
    "reglu": (UNARY["relu"][0], 0),
    "geglu": (gelu, 5e-3),
    "swiglu": (UNARY["silu"][0], 1e-5),
    "geglu_erf": (UNARY["gelu_erf"][0], 1e-5),
    "geglu_quick": (UNARY["gelu_quick"][0], 5e-3),
}


@pytest.mark.parametrize("name", GATES)
def test_gated_units_gate_with_the_first_half(name: str, evaluate: Evaluate) -> None:
    gate, tolerance = GATES[name]
    first, second = A[..., :4].copy(), A[..., 4:].copy()
    expected = gate(first) * second
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(evaluate(getattr(ops, name), A), expected, **close)
    np.testing.assert_allclose(evaluate(getattr(ops, f"{name}_split"), first, second), expected, **close)
    np.testing.assert_allclose(evaluate(lambda c, a: ops.glu(c, a, name, False), A), expected, **close)
    np.testing.assert_allclose(
        evaluate(lambda c, a, b: ops.glu_split(c, a, b, name), first, second), expected, **close
    )
    swapped = evaluate(getattr(ops, f"{name}_swapped"), A)
    np.testing.assert_allclose(swapped, first * gate(second), **close)


def test_swiglu_oai_clamps_both_sides(evaluate: Evaluate) -> None:
    gate, up = A[0] * 5, A[1] * 5
    g, u = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    expected = g * sigmoid(1.702 * g) * (u + 1)
    result = evaluate(lambda c, a, b: ops.swiglu_oai(c, a, b, 1.702, 7.0), gate, up)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
