"""Misuse of norms, RoPE, attention, recurrent and image ops is a typed error with a useful message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyggmlkv.binding import RopeParams, TensorArena, ops
from pyggmlkv.errors import BindingError, DTypeError, ShapeError
from tests.binding.misuse import Case, Tools, case, check


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    with TensorArena(2000) as arena:
        yield Tools(arena)


NORMAL = RopeParams(8)
CASES: dict[str, Case] = {
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
    "rope: head": case(
        lambda t: ops.rope_ext(t.c, t.f32(4, 2, 3), t.of("i32", 3), None, NORMAL),
        ShapeError,
        "more than",
        "4",
    ),
    "rope: odd": case(lambda t: RopeParams(7), ShapeError, "even"),
    "rope: mode": case(lambda t: RopeParams(8, "gptj"), BindingError, "neox"),  # type: ignore[arg-type]
    "rope: factors": case(
        lambda t: ops.rope_ext(t.c, t.f32(8, 2, 3), t.of("i32", 3), t.f32(3), NORMAL),
        ShapeError,
        "n_dims/2 = 4",
    ),
    "rope: quantised": case(
        lambda t: ops.rope_ext(t.c, t.of("q8_0", 32, 1, 3), t.of("i32", 3), None, NORMAL), DTypeError, "q8_0"
    ),
    "rope: sections missing": case(lambda t: RopeParams(8, "mrope"), ShapeError, "sections"),
    "rope: multi by rope_ext": case(
        lambda t: ops.rope_ext(
            t.c, t.f32(8, 2, 3), t.of("i32", 12), None, RopeParams(8, "mrope", sections=(2, 2, 0, 0))
        ),
        BindingError,
        "rope_multi",
    ),
    "soft_max_ext: ALiBi": case(
        lambda t: ops.soft_max_ext(t.c, t.f32(4), None, 1.0, 8.0), BindingError, "mask"
    ),
    "soft_max_ext: mask shape": case(
        lambda t: ops.soft_max_ext(t.c, t.f32(4, 3), t.f32(4, 2), 1.0, 0.0), ShapeError, "mask is f32 [4, 2]"
    ),
    "soft_max_ext: mask type": case(
        lambda t: ops.soft_max_ext(t.c, t.f32(4), t.of("i32", 4), 1.0, 0.0), DTypeError, "mask", "i32"
    ),
    "soft_max_add_sinks: heads": case(
        lambda t: ops.soft_max_add_sinks(ops.soft_max(t.c, t.f32(4, 3, 2)), t.f32(3)),
        ShapeError,
        "expected [2]",
    ),
    "soft_max_add_sinks: op": case(
        lambda t: ops.soft_max_add_sinks(t.f32(4), t.f32(1)), BindingError, "not the result"
    ),
    "flash_attn: mask type": case(
        lambda t: ops.flash_attn_ext(
            t.c, t.f32(8, 2, 4), t.f32(8, 6, 2), t.f32(8, 6, 2), t.f32(6, 2), 1.0, 0.0, 0.0
        ),
        DTypeError,
        "mask",
        "f16",
    ),
    "flash_attn: heads": case(
        lambda t: ops.flash_attn_ext(
            t.c, t.f32(8, 2, 4), t.f32(8, 6, 3), t.f32(8, 6, 3), None, 1.0, 0.0, 0.0
        ),
        ShapeError,
        "multiple",
    ),
    "flash_attn: transposed v": case(
        lambda t: ops.flash_attn_ext(
            t.c, t.f32(8, 2, 4), t.f32(8, 6, 2), t.f32(6, 8, 2), None, 1.0, 0.0, 0.0
        ),
        ShapeError,
        "n_kv",
    ),
    "flash_attn: small mask": case(
        lambda t: ops.flash_attn_ext(
            t.c, t.f32(8, 3, 4), t.f32(8, 6, 2), t.f32(8, 6, 2), t.of("f16", 6, 2), 1.0, 0.0, 0.0
        ),
        ShapeError,
        "at least n_tokens",
    ),
    "flash_attn_back": case(
        lambda t: ops.flash_attn_back(t.c, t.f32(4), t.f32(4), t.f32(4), t.f32(4), False),
        BindingError,
        "not implemented",
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
    "ssm_conv: channels": case(
        lambda t: ops.ssm_conv(t.c, t.f32(7, 3, 1), t.f32(4, 2)), ShapeError, "d_inner"
    ),
    "ssm_scan: ids": case(
        lambda t: ops.ssm_scan(
            t.c,
            t.f32(8, 1, 4, 2),
            t.f32(1, 4, 3, 2),
            t.f32(4, 3, 2),
            t.f32(8, 4),
            t.f32(8, 1, 3, 2),
            t.f32(8, 1, 3, 2),
            t.of("i32", 3),
        ),
        ShapeError,
        "ids",
        "[2,",
    ),
    "rwkv_wkv7: head size": case(
        lambda t: ops.rwkv_wkv7(t.c, *[t.f32(8, 2, 3)] * 6, t.f32(128, 1)), ShapeError, "multiple of 64"
    ),
    "gated_delta_net: state": case(
        lambda t: ops.gated_delta_net(
            t.c,
            t.f32(16, 2, 3),
            t.f32(16, 2, 3),
            t.f32(16, 2, 3),
            t.f32(1, 2, 3),
            t.f32(1, 2, 3),
            t.f32(16, 8, 2),
        ),
        ShapeError,
        "state",
    ),
    "conv_2d: channels": case(
        lambda t: ops.conv_2d(t.c, t.f32(3, 3, 2, 4), t.f32(8, 8, 3), 1, 1, 0, 0, 1, 1),
        ShapeError,
        "b is f32 [8, 8, 3]",
    ),
    "conv_2d: kernel too large": case(
        lambda t: ops.conv_2d(t.c, t.f32(9, 9, 3, 4), t.f32(8, 8, 3), 1, 1, 0, 0, 1, 1), ShapeError, "larger"
    ),
    "conv_2d: stride": case(
        lambda t: ops.conv_2d(t.c, t.f32(3, 3, 3, 4), t.f32(8, 8, 3), 0, 1, 0, 0, 1, 1),
        ShapeError,
        "s0 must be positive",
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
        lambda t: ops.interpolate(t.c, t.f32(4, 4), 2, 2, 1, 1, "nearest", antialias=True),
        BindingError,
        "bilinear",
    ),
    "win_unpart: windows": case(
        lambda t: ops.win_unpart(t.c, t.f32(3, 4, 4, 3), 7, 5, 4), ShapeError, "[any, 4, 4, 4]"
    ),
    "opt_step_sgd: not trainable": case(
        lambda t: ops.opt_step_sgd(t.c, t.f32(4), t.f32(4), t.f32(2)), BindingError, "set_param()"
    ),
    "cross_entropy_loss: shapes": case(
        lambda t: ops.cross_entropy_loss(t.c, t.f32(4), t.f32(5)), ShapeError, "differ"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_misuse_is_a_typed_error_with_a_useful_message(tools: Tools, case: Case) -> None:
    check(case, tools)
