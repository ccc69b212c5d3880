"""Misuse of operands, arithmetic, products, rows and views is a typed error with a useful message.

One process runs all of it: an abort would end the test run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyggmlkv.binding import RopeParams, TensorArena, ops
from pyggmlkv.errors import ArenaFullError, BindingError, ClosedError, DTypeError, ShapeError
from tests.binding.misuse import Case, Tools, case, check


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    with TensorArena(2000) as arena:
        yield Tools(arena)


CASES: dict[str, Case] = {
    # operands
    "add: an operand that is no tensor": case(
        lambda t: ops.add(t.c, t.f32(4), 3), BindingError, "expected a Tensor", "int"
    ),
    "silu: None": case(lambda t: ops.silu(t.c, None), BindingError, "expected a Tensor", "NoneType"),
    "mul_mat: an array": case(
        lambda t: ops.mul_mat(t.c, [1.0], t.f32(1)), BindingError, "expected a Tensor", "list"
    ),
    "rope_ext: no positions": case(
        lambda t: ops.rope_ext(t.c, t.f32(8, 1, 1), 5, None, RopeParams(8)), BindingError, "Tensor"
    ),
    "add: no arena": case(
        lambda t: ops.add(t.f32(4), t.f32(4), t.f32(4)), BindingError, "first argument", "TensorArena"
    ),
    "set_rows: no arena": case(
        lambda t: ops.set_rows(None, t.f32(4), t.f32(4), t.of("i64", 1)), BindingError, "TensorArena"
    ),
    "silu: a tensor of a closed arena": case(lambda t: ops.silu(t.c, t.closed()), ClosedError, "close()"),
    "set_rows: a tensor of a closed arena": case(
        lambda t: ops.set_rows(t.c, t.closed(), t.f32(4), t.of("i64", 1)), ClosedError, "close()"
    ),
    "silu: a full arena": case(
        lambda t: ops.silu(t.full(), t.f32(4)), ArenaFullError, "0 tensors", "n_tensors"
    ),
    "conv_2d: too little room": case(
        lambda t: ops.conv_2d(TensorArena(3), t.f32(2, 2, 1, 1), t.f32(4, 4, 1, 1), 1, 1, 0, 0, 1, 1),
        ArenaFullError,
        "7 needed",
    ),
    # element-wise
    "add: shapes": case(
        lambda t: ops.add(t.c, t.f32(4, 3), t.f32(3)), ShapeError, "a is f32 [4, 3]", "b is f32 [3]"
    ),
    "mul: b larger": case(lambda t: ops.mul(t.c, t.f32(4), t.f32(8)), ShapeError, "repeated"),
    "sub: empty b": case(lambda t: ops.sub(t.c, t.f32(4), t.f32(0)), ShapeError, "repeated"),
    "add: types": case(
        lambda t: ops.add(t.c, t.f32(32), t.of("f16", 32)), DTypeError, "f32 [32]", "f16 [32]"
    ),
    "mul: integers": case(lambda t: ops.mul(t.c, t.of("i32", 4), t.of("i32", 4)), DTypeError, "i32"),
    "mul: quantised": case(lambda t: ops.mul(t.c, t.of("q8_0", 32), t.f32(32)), DTypeError, "q8_0"),
    "add: quantised, repeated": case(
        lambda t: ops.add(t.c, t.of("q8_0", 32, 2), t.f32(32)), ShapeError, "own shape"
    ),
    "add: iq2_xxs cannot be written": case(
        lambda t: ops.add(t.c, t.of("iq2_xxs", 256), t.f32(256)), DTypeError, "iq2_xxs"
    ),
    "div: transposed a": case(
        lambda t: ops.div(t.c, t.turned(4, 3), t.f32(3, 4)), ShapeError, "permuted", "cont()"
    ),
    "add_id: ids": case(
        lambda t: ops.add_id(t.c, t.f32(4, 2, 3), t.f32(4, 5), t.f32(2, 3)), DTypeError, "ids", "i32"
    ),
    "add_cast: f32": case(lambda t: ops.add_cast(t.c, t.f32(4), t.f32(4), "f32"), DTypeError, "add_cast"),
    "add1: b": case(lambda t: ops.add1(t.c, t.f32(4), t.f32(2)), ShapeError, "one element"),
    "acc: out of bounds": case(
        lambda t: ops.acc(t.c, t.f32(4, 4), t.f32(4), 16, 64, 64, 60), ShapeError, "beyond the end"
    ),
    "set: larger b": case(lambda t: ops.set(t.c, t.f32(4), t.f32(8), 16, 16, 16, 0), ShapeError, "larger"),
    "set_1d: negative": case(lambda t: ops.set_1d(t.c, t.f32(4), t.f32(2), -4), ShapeError, "negative"),
    "scale: f16": case(lambda t: ops.scale(t.c, t.of("f16", 4), 2.0), DTypeError, "f16", "f32"),
    "scale: transposed": case(lambda t: ops.scale(t.c, t.turned(4, 3), 2.0), ShapeError, "contiguous"),
    "clamp: i32": case(lambda t: ops.clamp(t.c, t.of("i32", 4), 0, 1), DTypeError, "i32"),
    "silu: bf16": case(lambda t: ops.silu(t.c, t.of("bf16", 4)), DTypeError, "bf16", "f16, f32"),
    "relu: quantised": case(lambda t: ops.relu(t.c, t.of("q4_0", 32)), DTypeError, "q4_0"),
    "exp: transposed": case(lambda t: ops.exp(t.c, t.turned(4, 3)), ShapeError, "permuted"),
    "unary: name": case(lambda t: ops.unary(t.c, t.f32(4), "swish"), BindingError, "swish", "silu"),
    "swiglu: odd rows": case(lambda t: ops.swiglu(t.c, t.f32(5)), ShapeError, "even"),
    "swiglu_split: shapes": case(lambda t: ops.swiglu_split(t.c, t.f32(4), t.f32(2)), ShapeError, "differ"),
    "geglu_split: types": case(
        lambda t: ops.geglu_split(t.c, t.f32(4), t.of("f16", 4)), DTypeError, "same type"
    ),
    "glu: name": case(lambda t: ops.glu(t.c, t.f32(4), "silu", False), BindingError, "reglu"),
    # products
    "mul_mat: first dimensions": case(
        lambda t: ops.mul_mat(t.c, t.f32(64, 8), t.f32(32, 4)),
        ShapeError,
        "a is f32 [64, 8]",
        "b is f32 [32, 4]",
        "first",
    ),
    "mul_mat: heads": case(
        lambda t: ops.mul_mat(t.c, t.f32(4, 2, 3), t.f32(4, 2, 4)), ShapeError, "multiples"
    ),
    "mul_mat: transposed a": case(
        lambda t: ops.mul_mat(t.c, t.turned(4, 3), t.f32(3, 2)), ShapeError, "transposed"
    ),
    "mul_mat: transposed b": case(
        lambda t: ops.mul_mat(t.c, t.f32(3, 2), t.turned(4, 3)), ShapeError, "cont()"
    ),
    "mul_mat: f16 b": case(
        lambda t: ops.mul_mat(t.c, t.f32(4, 2), t.of("f16", 4, 2)), DTypeError, "expected b in f32"
    ),
    "mul_mat: i32 a": case(lambda t: ops.mul_mat(t.c, t.of("i32", 4, 2), t.f32(4, 2)), DTypeError, "i32"),
    "mul_mat: q8_1 a": case(lambda t: ops.mul_mat(t.c, t.of("q8_1", 32), t.f32(32)), DTypeError, "q8_1"),
    "mul_mat_set_prec: not a product": case(
        lambda t: ops.mul_mat_set_prec(t.f32(4), "f32"), BindingError, "mul_mat"
    ),
    "mul_mat_set_prec: name": case(
        lambda t: ops.mul_mat_set_prec(t.f32(4), "f64"), BindingError, "default, f32"
    ),
    "mul_mat_id: ids": case(
        lambda t: ops.mul_mat_id(t.c, t.f32(4, 4, 3), t.f32(4, 1, 2), t.of("i64", 2, 2)),
        DTypeError,
        "ids",
        "i32",
    ),
    "mul_mat_id: tokens": case(
        lambda t: ops.mul_mat_id(t.c, t.f32(4, 4, 3), t.f32(4, 1, 2), t.of("i32", 2, 3)),
        ShapeError,
        "each token",
    ),
    "mul_mat_id: used": case(
        lambda t: ops.mul_mat_id(t.c, t.f32(4, 4, 3), t.f32(4, 3, 2), t.of("i32", 4, 2)),
        ShapeError,
        "one for each id",
    ),
    "out_prod: rows": case(lambda t: ops.out_prod(t.c, t.f32(4, 3), t.f32(4, 2)), ShapeError, "second"),
    "solve_tri: upper": case(
        lambda t: ops.solve_tri(t.c, t.f32(3, 3), t.f32(2, 3), True, False, False), BindingError, "lower"
    ),
    "solve_tri: not square": case(
        lambda t: ops.solve_tri(t.c, t.f32(3, 4), t.f32(2, 3), True, True, False), ShapeError, "square"
    ),
    # rows
    "get_rows: index type": case(
        lambda t: ops.get_rows(t.c, t.f32(4, 3), t.of("i64", 2)), DTypeError, "i64", "i32"
    ),
    "get_rows: batches": case(lambda t: ops.get_rows(t.c, t.f32(4, 3, 2), t.of("i32", 2)), ShapeError, "ne2"),
    "get_rows: i16": case(lambda t: ops.get_rows(t.c, t.of("i16", 4, 3), t.of("i32", 2)), DTypeError, "i16"),
    "set_rows: index type": case(
        lambda t: ops.set_rows(t.c, t.f32(4, 3), t.f32(4, 2), t.f32(2)), DTypeError, "i32, i64"
    ),
    "set_rows: index count": case(
        lambda t: ops.set_rows(t.c, t.f32(4, 3), t.f32(4, 2), t.of("i64", 3)),
        ShapeError,
        "index for each row",
    ),
    "set_rows: row length": case(
        lambda t: ops.set_rows(t.c, t.f32(4, 3), t.f32(5, 2), t.of("i64", 2)), ShapeError, "number of rows"
    ),
    "set_rows: into iq1_s": case(
        lambda t: ops.set_rows(t.c, t.of("iq1_s", 256, 3), t.f32(256, 2), t.of("i64", 2)), DTypeError, "iq1_s"
    ),
    "set_rows: from bf16": case(
        lambda t: ops.set_rows(t.c, t.f32(4, 3), t.of("bf16", 4, 2), t.of("i64", 2)), DTypeError, "bf16"
    ),
    "concat: dimension": case(lambda t: ops.concat(t.c, t.f32(4), t.f32(4), 4), ShapeError, "0 to 3"),
    "concat: shapes": case(
        lambda t: ops.concat(t.c, t.f32(4, 2), t.f32(4, 3), 0), ShapeError, "all dimensions but 0"
    ),
    "concat: types": case(lambda t: ops.concat(t.c, t.f32(4), t.of("f16", 4), 0), DTypeError, "types differ"),
    "repeat: shape": case(lambda t: ops.repeat(t.c, t.f32(4), t.f32(6)), ShapeError, "repeated"),
    "repeat: i64": case(lambda t: ops.repeat(t.c, t.of("i64", 2), t.f32(4)), DTypeError, "i64"),
    "diag: matrix": case(lambda t: ops.diag(t.c, t.f32(4, 4)), ShapeError, "[n, 1, x, y]"),
    "diag_mask_inf: past": case(lambda t: ops.diag_mask_inf(t.c, t.f32(4, 4), -1), ShapeError, "n_past"),
    "tri: rectangle": case(lambda t: ops.tri(t.c, t.f32(4, 3), "lower"), ShapeError, "square"),
    # views
    "reshape: count": case(
        lambda t: ops.reshape_2d(t.c, t.f32(4, 3), 5, 2), ShapeError, "12 elements", "10 elements"
    ),
    "reshape: transposed": case(
        lambda t: ops.reshape_1d(t.c, t.turned(4, 3), 12), ShapeError, "contiguous", "cont_2d"
    ),
    "reshape: blocks": case(
        lambda t: ops.reshape_2d(t.c, t.of("q8_0", 32, 2), 16, 4), ShapeError, "whole blocks of 32"
    ),
    "view_1d: beyond": case(lambda t: ops.view_1d(t.c, t.f32(4), 4, 4), ShapeError, "byte 20 of 16"),
    "view_2d: stride": case(
        lambda t: ops.view_2d(t.c, t.f32(4, 4), 4, 4, 32, 0), ShapeError, "byte 112 of 64"
    ),
    "view_1d: negative": case(lambda t: ops.view_1d(t.c, t.f32(4), -1, 0), ShapeError, "negative"),
    "view_1d: offset": case(lambda t: ops.view_1d(t.c, t.f32(4), 1, -4), ShapeError, "negative"),
    "permute: axes": case(lambda t: ops.permute(t.c, t.f32(4), 0, 0, 1, 2), ShapeError, "0, 1, 2, 3"),
    "cpy: count": case(lambda t: ops.cpy(t.c, t.f32(4), t.f32(5)), ShapeError, "numbers of elements"),
    "cpy: i32 to f16": case(
        lambda t: ops.cpy(t.c, t.of("i32", 4), t.of("f16", 4)), DTypeError, "i32 [4]", "f16"
    ),
    "cpy: q8_0 to f16": case(
        lambda t: ops.cpy(t.c, t.of("q8_0", 32), t.of("f16", 32)), DTypeError, "q8_0", "f16"
    ),
    "cast: to iq2_xxs": case(lambda t: ops.cast(t.c, t.f32(256), "iq2_xxs"), DTypeError, "iq2_xxs"),
    "cast: blocks": case(lambda t: ops.cast(t.c, t.f32(20), "q8_0"), ShapeError, "whole blocks"),
    "cast: name": case(
        lambda t: ops.cast(t.c, t.f32(4), "float"), DTypeError, "unknown element type 'float'"
    ),
    "cont_2d: count": case(lambda t: ops.cont_2d(t.c, t.f32(4, 3), 4, 4), ShapeError, "12 elements"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_misuse_is_a_typed_error_with_a_useful_message(tools: Tools, case: Case) -> None:
    check(case, tools)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60
