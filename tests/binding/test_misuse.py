"""Misuse of the op layer is a typed error with a useful message, never an abort: one process runs all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from pyggmlkv.binding import RopeParams, Tensor, TensorArena, ops
from pyggmlkv.errors import ArenaFullError, BindingError, ClosedError, DTypeError, PyggmlkvError, ShapeError


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


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    with TensorArena(2000) as arena:
        yield Tools(arena)


def case(call: Callable[[Any], object], error: type[PyggmlkvError], *words: str) -> Case:
    return Case(call, error, words)


NORMAL = RopeParams(8)
CASES: dict[str, Case] = {
    # operands
    "add: an operand that is no tensor": case(lambda t: ops.add(t.c, t.f32(4), 3), BindingError, "expected a Tensor", "int"),
    "silu: None": case(lambda t: ops.silu(t.c, None), BindingError, "expected a Tensor", "NoneType"),
    "mul_mat: an array": case(lambda t: ops.mul_mat(t.c, [1.0], t.f32(1)), BindingError, "expected a Tensor", "list"),
    "rope_ext: no positions": case(lambda t: ops.rope_ext(t.c, t.f32(8, 1, 1), 5, None, NORMAL), BindingError, "Tensor"),
    "add: no arena": case(lambda t: ops.add(t.f32(4), t.f32(4), t.f32(4)), BindingError, "first argument", "TensorArena"),
    "set_rows: no arena": case(lambda t: ops.set_rows(None, t.f32(4), t.f32(4), t.of("i64", 1)), BindingError, "TensorArena"),
    "silu: a tensor of a closed arena": case(lambda t: ops.silu(t.c, t.closed()), ClosedError, "close()"),
    "set_rows: a tensor of a closed arena": case(
        lambda t: ops.set_rows(t.c, t.closed(), t.f32(4), t.of("i64", 1)), ClosedError, "close()"
    ),
    "silu: a full arena": case(lambda t: ops.silu(t.full(), t.f32(4)), ArenaFullError, "0 tensors", "n_tensors"),
    "conv_2d: too little room": case(
        lambda t: ops.conv_2d(TensorArena(3), t.f32(2, 2, 1, 1), t.f32(4, 4, 1, 1), 1, 1, 0, 0, 1, 1), ArenaFullError, "7 needed"
    ),
    # element-wise
    "add: shapes": case(lambda t: ops.add(t.c, t.f32(4, 3), t.f32(3)), ShapeError, "a is f32 [4, 3]", "b is f32 [3]"),
    "mul: b larger": case(lambda t: ops.mul(t.c, t.f32(4), t.f32(8)), ShapeError, "repeated"),
    "sub: empty b": case(lambda t: ops.sub(t.c, t.f32(4), t.f32(0)), ShapeError, "repeated"),
    "add: types": case(lambda t: ops.add(t.c, t.f32(32), t.of("f16", 32)), DTypeError, "f32 [32]", "f16 [32]"),
    "mul: integers": case(lambda t: ops.mul(t.c, t.of("i32", 4), t.of("i32", 4)), DTypeError, "i32"),
    "mul: quantised": case(lambda t: ops.mul(t.c, t.of("q8_0", 32), t.f32(32)), DTypeError, "q8_0"),
    "add: quantised, repeated": case(lambda t: ops.add(t.c, t.of("q8_0", 32, 2), t.f32(32)), ShapeError, "own shape"),
    "add: iq2_xxs cannot be written": case(lambda t: ops.add(t.c, t.of("iq2_xxs", 256), t.f32(256)), DTypeError, "iq2_xxs"),
    "div: transposed a": case(lambda t: ops.div(t.c, t.turned(4, 3), t.f32(3, 4)), ShapeError, "permuted", "cont()"),
    "add_id: ids": case(lambda t: ops.add_id(t.c, t.f32(4, 2, 3), t.f32(4, 5), t.f32(2, 3)), DTypeError, "ids", "i32"),
    "add_cast: f32": case(lambda t: ops.add_cast(t.c, t.f32(4), t.f32(4), "f32"), DTypeError, "add_cast"),
    "add1: b": case(lambda t: ops.add1(t.c, t.f32(4), t.f32(2)), ShapeError, "one element"),
    "acc: out of bounds": case(lambda t: ops.acc(t.c, t.f32(4, 4), t.f32(4), 16, 64, 64, 60), ShapeError, "beyond the end"),
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
    "geglu_split: types": case(lambda t: ops.geglu_split(t.c, t.f32(4), t.of("f16", 4)), DTypeError, "same type"),
    "glu: name": case(lambda t: ops.glu(t.c, t.f32(4), "silu", False), BindingError, "reglu"),
    # products
    "mul_mat: first dimensions": case(
        lambda t: ops.mul_mat(t.c, t.f32(64, 8), t.f32(32, 4)), ShapeError, "a is f32 [64, 8]", "b is f32 [32, 4]", "first"
    ),
    "mul_mat: heads": case(lambda t: ops.mul_mat(t.c, t.f32(4, 2, 3), t.f32(4, 2, 4)), ShapeError, "multiples"),
    "mul_mat: transposed a": case(lambda t: ops.mul_mat(t.c, t.turned(4, 3), t.f32(3, 2)), ShapeError, "transposed"),
    "mul_mat: transposed b": case(lambda t: ops.mul_mat(t.c, t.f32(3, 2), t.turned(4, 3)), ShapeError, "cont()"),
    "mul_mat: f16 b": case(lambda t: ops.mul_mat(t.c, t.f32(4, 2), t.of("f16", 4, 2)), DTypeError, "expected b in f32"),
    "mul_mat: i32 a": case(lambda t: ops.mul_mat(t.c, t.of("i32", 4, 2), t.f32(4, 2)), DTypeError, "i32"),
    "mul_mat: q8_1 a": case(lambda t: ops.mul_mat(t.c, t.of("q8_1", 32), t.f32(32)), DTypeError, "q8_1"),
    "mul_mat_set_prec: not a product": case(lambda t: ops.mul_mat_set_prec(t.f32(4), "f32"), BindingError, "mul_mat"),
    "mul_mat_set_prec: name": case(lambda t: ops.mul_mat_set_prec(t.f32(4), "f64"), BindingError, "default, f32"),
    "mul_mat_id: ids": case(
        lambda t: ops.mul_mat_id(t.c, t.f32(4, 4, 3), t.f32(4, 1, 2), t.of("i64", 2, 2)), DTypeError, "ids", "i32"
    ),
    "mul_mat_id: tokens": case(
        lambda t: ops.mul_mat_id(t.c, t.f32(4, 4, 3), t.f32(4, 1, 2), t.of("i32", 2, 3)), ShapeError, "each token"
    ),
    "mul_mat_id: used": case(
        lambda t: ops.mul_mat_id(t.c, t.f32(4, 4, 3), t.f32(4, 3, 2), t.of("i32", 4, 2)), ShapeError, "one for each id"
    ),
    "out_prod: rows": case(lambda t: ops.out_prod(t.c, t.f32(4, 3), t.f32(4, 2)), ShapeError, "second"),
    "solve_tri: upper": case(lambda t: ops.solve_tri(t.c, t.f32(3, 3), t.f32(2, 3), True, False, False), BindingError, "lower"),
    "solve_tri: not square": case(
        lambda t: ops.solve_tri(t.c, t.f32(3, 4), t.f32(2, 3), True, True, False), ShapeError, "square"
    ),
    # rows
    "get_rows: index type": case(lambda t: ops.get_rows(t.c, t.f32(4, 3), t.of("i64", 2)), DTypeError, "i64", "i32"),
    "get_rows: batches": case(lambda t: ops.get_rows(t.c, t.f32(4, 3, 2), t.of("i32", 2)), ShapeError, "ne2"),
    "get_rows: i16": case(lambda t: ops.get_rows(t.c, t.of("i16", 4, 3), t.of("i32", 2)), DTypeError, "i16"),
    "set_rows: index type": case(lambda t: ops.set_rows(t.c, t.f32(4, 3), t.f32(4, 2), t.f32(2)), DTypeError, "i32, i64"),
    "set_rows: index count": case(
        lambda t: ops.set_rows(t.c, t.f32(4, 3), t.f32(4, 2), t.of("i64", 3)), ShapeError, "index for each row"
    ),
    "set_rows: row length": case(lambda t: ops.set_rows(t.c, t.f32(4, 3), t.f32(5, 2), t.of("i64", 2)), ShapeError, "number of rows"),
    "set_rows: into iq1_s": case(
        lambda t: ops.set_rows(t.c, t.of("iq1_s", 256, 3), t.f32(256, 2), t.of("i64", 2)), DTypeError, "iq1_s"
    ),
    "set_rows: from bf16": case(
        lambda t: ops.set_rows(t.c, t.f32(4, 3), t.of("bf16", 4, 2), t.of("i64", 2)), DTypeError, "bf16"
    ),
    "concat: dimension": case(lambda t: ops.concat(t.c, t.f32(4), t.f32(4), 4), ShapeError, "0 to 3"),
    "concat: shapes": case(lambda t: ops.concat(t.c, t.f32(4, 2), t.f32(4, 3), 0), ShapeError, "all dimensions but 0"),
    "concat: types": case(lambda t: ops.concat(t.c, t.f32(4), t.of("f16", 4), 0), DTypeError, "types differ"),
    "repeat: shape": case(lambda t: ops.repeat(t.c, t.f32(4), t.f32(6)), ShapeError, "repeated"),
    "repeat: i64": case(lambda t: ops.repeat(t.c, t.of("i64", 2), t.f32(4)), DTypeError, "i64"),
    "diag: matrix": case(lambda t: ops.diag(t.c, t.f32(4, 4)), ShapeError, "[n, 1, x, y]"),
    "diag_mask_inf: past": case(lambda t: ops.diag_mask_inf(t.c, t.f32(4, 4), -1), ShapeError, "n_past"),
    "tri: rectangle": case(lambda t: ops.tri(t.c, t.f32(4, 3), "lower"), ShapeError, "square"),
    # views
    "reshape: count": case(lambda t: ops.reshape_2d(t.c, t.f32(4, 3), 5, 2), ShapeError, "12 elements", "10 elements"),
    "reshape: transposed": case(lambda t: ops.reshape_1d(t.c, t.turned(4, 3), 12), ShapeError, "contiguous", "cont_2d"),
    "reshape: blocks": case(lambda t: ops.reshape_2d(t.c, t.of("q8_0", 32, 2), 16, 4), ShapeError, "whole blocks of 32"),
    "view_1d: beyond": case(lambda t: ops.view_1d(t.c, t.f32(4), 4, 4), ShapeError, "byte 20 of 16"),
    "view_2d: stride": case(lambda t: ops.view_2d(t.c, t.f32(4, 4), 4, 4, 32, 0), ShapeError, "byte 112 of 64"),
    "view_1d: negative": case(lambda t: ops.view_1d(t.c, t.f32(4), -1, 0), ShapeError, "negative"),
    "view_1d: offset": case(lambda t: ops.view_1d(t.c, t.f32(4), 1, -4), ShapeError, "negative"),
    "permute: axes": case(lambda t: ops.permute(t.c, t.f32(4), 0, 0, 1, 2), ShapeError, "0, 1, 2, 3"),
    "cpy: count": case(lambda t: ops.cpy(t.c, t.f32(4), t.f32(5)), ShapeError, "numbers of elements"),
    "cpy: i32 to f16": case(lambda t: ops.cpy(t.c, t.of("i32", 4), t.of("f16", 4)), DTypeError, "i32 [4]", "f16"),
    "cpy: q8_0 to f16": case(lambda t: ops.cpy(t.c, t.of("q8_0", 32), t.of("f16", 32)), DTypeError, "q8_0", "f16"),
    "cast: to iq2_xxs": case(lambda t: ops.cast(t.c, t.f32(256), "iq2_xxs"), DTypeError, "iq2_xxs"),
    "cast: blocks": case(lambda t: ops.cast(t.c, t.f32(20), "q8_0"), ShapeError, "whole blocks"),
    "cast: name": case(lambda t: ops.cast(t.c, t.f32(4), "float"), DTypeError, "unknown element type 'float'"),
    "cont_2d: count": case(lambda t: ops.cont_2d(t.c, t.f32(4, 3), 4, 4), ShapeError, "12 elements"),
    # norm, rope, attention
    "rms_norm: f16": case(lambda t: ops.rms_norm(t.c, t.of("f16", 4), 1e-5), DTypeError, "f16"),
    "rms_norm: negative": case(lambda t: ops.rms_norm(t.c, t.f32(4), -1.0), ShapeError, "eps"),
    "rms_norm: not a number": case(lambda t: ops.rms_norm(t.c, t.f32(4), float("nan")), ShapeError, "eps"),
    "group_norm: groups": case(lambda t: ops.group_norm(t.c, t.f32(4), 0, 1e-5), ShapeError, "n_groups"),
    "rope: positions": case(
        lambda t: ops.rope_ext(t.c, t.f32(8, 2, 3), t.of("i32", 2), None, NORMAL), ShapeError, "[3] positions"
    ),
    "rope: position type": case(
        lambda t: ops.rope_ext(t.c, t.f32(8, 2, 3), t.of("i64", 3), None, NORMAL), DTypeError, "i64"
    ),
    "rope: head": case(lambda t: ops.rope_ext(t.c, t.f32(4, 2, 3), t.of("i32", 3), None, NORMAL), ShapeError, "more than", "4"),
    "rope: odd": case(lambda t: RopeParams(7), ShapeError, "even"),
    "rope: mode": case(lambda t: RopeParams(8, "gptj"), BindingError, "neox"),  # type: ignore[arg-type]
    "rope: factors": case(
        lambda t: ops.rope_ext(t.c, t.f32(8, 2, 3), t.of("i32", 3), t.f32(3), NORMAL), ShapeError, "n_dims/2 = 4"
    ),
    "rope: quantised": case(
        lambda t: ops.rope_ext(t.c, t.of("q8_0", 32, 1, 3), t.of("i32", 3), None, NORMAL), DTypeError, "q8_0"
    ),
    "rope: sections missing": case(lambda t: RopeParams(8, "mrope"), ShapeError, "sections"),
    "rope: multi by rope_ext": case(
        lambda t: ops.rope_ext(t.c, t.f32(8, 2, 3), t.of("i32", 12), None, RopeParams(8, "mrope", sections=(2, 2, 0, 0))),
        BindingError, "rope_multi",
    ),
    "soft_max_ext: ALiBi": case(lambda t: ops.soft_max_ext(t.c, t.f32(4), None, 1.0, 8.0), BindingError, "mask"),
    "soft_max_ext: mask shape": case(
        lambda t: ops.soft_max_ext(t.c, t.f32(4, 3), t.f32(4, 2), 1.0, 0.0), ShapeError, "mask is f32 [4, 2]"
    ),
    "soft_max_ext: mask type": case(
        lambda t: ops.soft_max_ext(t.c, t.f32(4), t.of("i32", 4), 1.0, 0.0), DTypeError, "mask", "i32"
    ),
    "soft_max_add_sinks: heads": case(
        lambda t: ops.soft_max_add_sinks(ops.soft_max(t.c, t.f32(4, 3, 2)), t.f32(3)), ShapeError, "expected [2]"
    ),
    "soft_max_add_sinks: op": case(lambda t: ops.soft_max_add_sinks(t.f32(4), t.f32(1)), BindingError, "not the result"),
    "flash_attn: mask type": case(
        lambda t: ops.flash_attn_ext(t.c, t.f32(8, 2, 4), t.f32(8, 6, 2), t.f32(8, 6, 2), t.f32(6, 2), 1.0, 0.0, 0.0),
        DTypeError, "mask", "f16",
    ),
    "flash_attn: heads": case(
        lambda t: ops.flash_attn_ext(t.c, t.f32(8, 2, 4), t.f32(8, 6, 3), t.f32(8, 6, 3), None, 1.0, 0.0, 0.0),
        ShapeError, "multiple",
    ),
    "flash_attn: transposed v": case(
        lambda t: ops.flash_attn_ext(t.c, t.f32(8, 2, 4), t.f32(8, 6, 2), t.f32(6, 8, 2), None, 1.0, 0.0, 0.0),
        ShapeError, "n_kv",
    ),
    "flash_attn: small mask": case(
        lambda t: ops.flash_attn_ext(
            t.c, t.f32(8, 3, 4), t.f32(8, 6, 2), t.f32(8, 6, 2), t.of("f16", 6, 2), 1.0, 0.0, 0.0
        ),
        ShapeError, "at least n_tokens",
    ),
    "flash_attn_back": case(
        lambda t: ops.flash_attn_back(t.c, t.f32(4), t.f32(4), t.f32(4), t.f32(4), False), BindingError, "not implemented"
    ),
    # reductions, numbers
    "argsort: order": case(lambda t: ops.argsort(t.c, t.f32(4), "up"), BindingError, "asc, desc"),
    "argsort: i32": case(lambda t: ops.argsort(t.c, t.of("i32", 4), "asc"), DTypeError, "i32"),
    "top_k: k": case(lambda t: ops.top_k(t.c, t.f32(4), 5), ShapeError, "1 to the 4"),
    "argmax: cube": case(lambda t: ops.argmax(t.c, t.f32(4, 3, 2)), ShapeError, "more than 2 dimensions"),
    "sum_rows: f16": case(lambda t: ops.sum_rows(t.c, t.of("f16", 4)), DTypeError, "f16"),
    "count_equal: f32": case(lambda t: ops.count_equal(t.c, t.f32(4), t.f32(4)), DTypeError, "i32"),
    "arange: backwards": case(lambda t: ops.arange(t.c, 3.0, 1.0, 1.0), ShapeError, "start < stop"),
    "arange: no step": case(lambda t: ops.arange(t.c, 0.0, 1.0, 0.0), ShapeError, "step > 0"),
    "fill: i32": case(lambda t: ops.fill(t.c, t.of("i32", 4), 1.0), DTypeError, "i32"),
    # recurrent, convolutions, images, training
    "ssm_conv: channels": case(lambda t: ops.ssm_conv(t.c, t.f32(7, 3, 1), t.f32(4, 2)), ShapeError, "d_inner"),
    "ssm_scan: ids": case(
        lambda t: ops.ssm_scan(
            t.c, t.f32(8, 1, 4, 2), t.f32(1, 4, 3, 2), t.f32(4, 3, 2), t.f32(8, 4), t.f32(8, 1, 3, 2), t.f32(8, 1, 3, 2),
            t.of("i32", 3),
        ),
        ShapeError, "ids", "[2,",
    ),
    "rwkv_wkv7: head size": case(
        lambda t: ops.rwkv_wkv7(t.c, *[t.f32(8, 2, 3)] * 6, t.f32(128, 1)), ShapeError, "multiple of 64"
    ),
    "gated_delta_net: state": case(
        lambda t: ops.gated_delta_net(
            t.c, t.f32(16, 2, 3), t.f32(16, 2, 3), t.f32(16, 2, 3), t.f32(1, 2, 3), t.f32(1, 2, 3), t.f32(16, 8, 2)
        ),
        ShapeError, "state",
    ),
    "conv_2d: channels": case(
        lambda t: ops.conv_2d(t.c, t.f32(3, 3, 2, 4), t.f32(8, 8, 3), 1, 1, 0, 0, 1, 1), ShapeError, "b is f32 [8, 8, 3]"
    ),
    "conv_2d: kernel too large": case(
        lambda t: ops.conv_2d(t.c, t.f32(9, 9, 3, 4), t.f32(8, 8, 3), 1, 1, 0, 0, 1, 1), ShapeError, "larger"
    ),
    "conv_2d: stride": case(
        lambda t: ops.conv_2d(t.c, t.f32(3, 3, 3, 4), t.f32(8, 8, 3), 0, 1, 0, 0, 1, 1), ShapeError, "s0 must be positive"
    ),
    "conv_transpose_1d: padding": case(
        lambda t: ops.conv_transpose_1d(t.c, t.f32(3, 2, 4), t.f32(8, 4), 1, 1, 1), ShapeError, "p0 = 0"
    ),
    "pool_2d: window": case(
        lambda t: ops.pool_2d(t.c, t.f32(2, 2), "max", 3, 3, 1, 1, 0, 0), ShapeError, "window of [3, 3]"
    ),
    "pool_1d: op": case(lambda t: ops.pool_1d(t.c, t.f32(4), "sum", 2, 2, 0), BindingError, "max, avg"),
    "pad_reflect_1d": case(lambda t: ops.pad_reflect_1d(t.c, t.f32(4), 4, 0), ShapeError, "less than a row"),
    "roll: shift": case(lambda t: ops.roll(t.c, t.f32(4), 4, 0, 0, 0), ShapeError, "smaller than the sizes"),
    "interpolate: antialias": case(
        lambda t: ops.interpolate(t.c, t.f32(4, 4), 2, 2, 1, 1, "nearest", antialias=True), BindingError, "bilinear"
    ),
    "win_unpart: windows": case(lambda t: ops.win_unpart(t.c, t.f32(3, 4, 4, 3), 7, 5, 4), ShapeError, "[any, 4, 4, 4]"),
    "opt_step_sgd: not trainable": case(
        lambda t: ops.opt_step_sgd(t.c, t.f32(4), t.f32(4), t.f32(2)), BindingError, "set_param()"
    ),
    "cross_entropy_loss: shapes": case(lambda t: ops.cross_entropy_loss(t.c, t.f32(4), t.f32(5)), ShapeError, "differ"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_misuse_is_a_typed_error_with_a_useful_message(tools: Tools, case: Case) -> None:
    with pytest.raises(PyggmlkvError) as caught:
        case.call(tools)
    assert type(caught.value) is case.error
    for word in case.words:
        assert word in str(caught.value)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60
