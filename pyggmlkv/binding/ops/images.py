"""Pooling, resizing, padding and windows of image-like tensors; f32 unless said otherwise.

Upstream: ggml.c, ggml_pool_1d ... ggml_roll, ggml_win_part ... ggml_add_rel_pos.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pyggmlkv._ggml import lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.dtypes import F16
from pyggmlkv.binding.ops.checks import (
    F32_F16,
    choice,
    enter,
    enter1,
    enter2,
    shape_error,
    want_contiguous,
    want_dims,
    want_dtype,
    want_f32,
    want_ne,
    want_not_negative,
    want_positive,
    want_rows,
    want_same_shape,
)
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import BindingError, ShapeError

_POOLS: Mapping[str, int] = MappingProxyType({"max": lib.GGML_OP_POOL_MAX, "avg": lib.GGML_OP_POOL_AVG})
_SCALE_MODES: Mapping[str, int] = MappingProxyType(
    {
        "nearest": lib.GGML_SCALE_MODE_NEAREST,
        "bilinear": lib.GGML_SCALE_MODE_BILINEAR,
        "bicubic": lib.GGML_SCALE_MODE_BICUBIC,
    }
)


def _pooled(size: int, k: int, s: int, p: float) -> int:
    """Upstream: ggml_calc_pool_output_size (float arithmetic, truncated)."""
    return int((size + 2 * p - k) / s + 1)


def pool_1d(ctx: TensorArena, a: Tensor, op: str, k0: int, s0: int, p0: int) -> Tensor:
    """`max` or `avg` of windows of `k0` in each row, `s0` apart; a f32 or f16 -> f32."""
    number = choice("pool_1d", "op", op, _POOLS)
    enter1(ctx, a)
    want_dtype("pool_1d", "a", a, F32_F16)
    want_contiguous("pool_1d", a=a)
    want_positive("pool_1d", k0=k0, s0=s0)
    want_not_negative("pool_1d", p0=p0)
    if a.ne[0] + 2 * p0 < k0:
        raise shape_error("pool_1d", f"a window of {k0} is larger than a padded row", a=a)
    return ctx._made(lib.ggml_pool_1d(ctx._p, a._p, number, k0, s0, p0))


def pool_2d(
    ctx: TensorArena, a: Tensor, op: str, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float
) -> Tensor:
    """`max` or `avg` of windows [k0, k1] of each image, [s0, s1] apart; a f32 or f16 -> f32."""
    number = choice("pool_2d", "op", op, _POOLS)
    enter1(ctx, a)
    want_dtype("pool_2d", "a", a, F32_F16)
    want_contiguous("pool_2d", a=a)
    _check_windows("pool_2d", (k0, k1, s0, s1), (p0, p1))
    if a.ne[0] + 2 * p0 < k0 or a.ne[1] + 2 * p1 < k1:
        raise shape_error("pool_2d", f"a window of {[k0, k1]} is larger than a padded image", a=a)
    return ctx._made(lib.ggml_pool_2d(ctx._p, a._p, number, k0, k1, s0, s1, p0, p1))


def _check_windows(name: str, kernel_stride: tuple[int, int, int, int], padding: tuple[float, float]) -> None:
    k0, k1, s0, s1 = kernel_stride
    want_positive(name, k0=k0, k1=k1, s0=s0, s1=s1)
    want_not_negative(name, p0=padding[0], p1=padding[1])


def pool_2d_back(
    ctx: TensorArena, a: Tensor, af: Tensor, op: str, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float
) -> Tensor:
    """Gradient of `pool_2d`: a is that of the result, af what was pooled; f32 -> the shape of `af`."""
    number = choice("pool_2d_back", "op", op, _POOLS)
    enter2(ctx, a, af)
    want_f32("pool_2d_back", a=a, af=af)
    want_contiguous("pool_2d_back", a=a, af=af)
    _check_windows("pool_2d_back", (k0, k1, s0, s1), (p0, p1))
    want_ne("pool_2d_back", "a", a, _pooled(af.ne[0], k0, s0, p0), _pooled(af.ne[1], k1, s1, p1), *af.ne[2:])
    return ctx._made(lib.ggml_pool_2d_back(ctx._p, a._p, af._p, number, k0, k1, s0, s1, p0, p1))


def upscale(ctx: TensorArena, a: Tensor, scale_factor: int, mode: str) -> Tensor:
    """Images `scale_factor` times as wide and high: `nearest`, `bilinear`, `bicubic`."""
    number = choice("upscale", "mode", mode, _SCALE_MODES)
    enter1(ctx, a)
    want_f32("upscale", a=a)
    if not 1 < scale_factor < 2**15:
        raise ShapeError(
            f"upscale: scale_factor must be above 1, got {scale_factor}", scale_factor=scale_factor
        )
    _want_pixels("upscale", a)
    return ctx._made(lib.ggml_upscale(ctx._p, a._p, scale_factor, number))


def _want_pixels(name: str, a: Tensor) -> None:
    if 0 in a.ne:
        raise shape_error(name, "there is nothing to scale", a=a)


def interpolate(
    ctx: TensorArena, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, mode: str,
    align_corners: bool = False, antialias: bool = False,
) -> Tensor:  # fmt: skip
    """Images resized to [ne0, ne1, ne2, ne3]; `antialias` for bilinear only.

    Differs: upstream takes the flags in `mode`.
    """
    number = choice("interpolate", "mode", mode, _SCALE_MODES)
    enter1(ctx, a)
    want_f32("interpolate", a=a)
    want_positive("interpolate", ne0=ne0, ne1=ne1, ne2=ne2, ne3=ne3)
    if antialias and mode != "bilinear":
        raise BindingError(f"interpolate: antialias needs mode bilinear, got {mode}", mode=mode)
    _want_pixels("interpolate", a)
    flags = lib.GGML_SCALE_FLAG_ALIGN_CORNERS if align_corners else 0
    flags |= lib.GGML_SCALE_FLAG_ANTIALIAS if antialias else 0
    return ctx._made(lib.ggml_interpolate(ctx._p, a._p, ne0, ne1, ne2, ne3, number | flags))


def upscale_ext(ctx: TensorArena, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, mode: str) -> Tensor:
    """`interpolate` without flags. Upstream prefers `interpolate`."""
    return interpolate(ctx, a, ne0, ne1, ne2, ne3, mode)


def _pad(name: str, function: Any, ctx: TensorArena, a: Tensor, padding: tuple[int, ...]) -> Tensor:
    enter1(ctx, a)
    want_f32(name, a=a)
    if min(padding) < 0 or max(padding) >= 2**31:
        raise ShapeError(f"{name}: padding must not be negative, got {list(padding)}", padding=padding)
    if 0 in a.ne:
        raise shape_error(name, "there is nothing to pad", a=a)
    return ctx._made(function(ctx._p, a._p, *padding))


def pad(ctx: TensorArena, a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
    """Zeros after the end of each dimension."""
    return _pad("pad", lib.ggml_pad, ctx, a, (p0, p1, p2, p3))


def pad_circular(ctx: TensorArena, a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
    """After the end of each dimension, its start again."""
    return _pad("pad_circular", lib.ggml_pad_circular, ctx, a, (p0, p1, p2, p3))


def pad_ext(
    ctx: TensorArena, a: Tensor,
    lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int,
) -> Tensor:  # fmt: skip
    """Zeros before (`lp`) and after (`rp`) each dimension."""
    return _pad("pad_ext", lib.ggml_pad_ext, ctx, a, (lp0, rp0, lp1, rp1, lp2, rp2, lp3, rp3))


def pad_ext_circular(
    ctx: TensorArena, a: Tensor,
    lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int,
) -> Tensor:  # fmt: skip
    """The other end of the dimension before (`lp`) and after (`rp`) it, as on a torus."""
    return _pad(
        "pad_ext_circular", lib.ggml_pad_ext_circular, ctx, a, (lp0, rp0, lp1, rp1, lp2, rp2, lp3, rp3)
    )


def pad_reflect_1d(ctx: TensorArena, a: Tensor, p0: int, p1: int) -> Tensor:
    """Rows mirrored at both ends: [a, b, c, d] -> [b, a, b, c, d, c]."""
    enter1(ctx, a)
    want_f32("pad_reflect_1d", a=a)
    want_contiguous("pad_reflect_1d", a=a)
    if not (0 <= p0 < a.ne[0] and 0 <= p1 < a.ne[0]):
        raise shape_error("pad_reflect_1d", f"padding must be less than a row, got {p0} and {p1}", a=a)
    return ctx._made(lib.ggml_pad_reflect_1d(ctx._p, a._p, p0, p1))


def roll(ctx: TensorArena, a: Tensor, shift0: int, shift1: int, shift2: int, shift3: int) -> Tensor:
    """Elements moved up by `shift` in each dimension; what leaves at the end enters at the start."""
    enter1(ctx, a)
    want_f32("roll", a=a)
    want_rows("roll", "a", a)
    shifts = (shift0, shift1, shift2, shift3)
    if any(not -size < shift < size for shift, size in zip(shifts, a.ne, strict=True)):
        raise shape_error("roll", f"shifts must be smaller than the sizes, got {list(shifts)}", a=a)
    return ctx._made(lib.ggml_roll(ctx._p, a._p, *shifts))


def win_part(ctx: TensorArena, a: Tensor, w: int) -> Tensor:
    """Windows of `w` by `w` pixels, zero-padded: [C, W, H] -> [C, w, w, n_windows]."""
    enter1(ctx, a)
    want_f32("win_part", a=a)
    want_contiguous("win_part", a=a)
    want_dims("win_part", "a", a, 3)
    want_positive("win_part", w=w)
    return ctx._made(lib.ggml_win_part(ctx._p, a._p, w))


def win_unpart(ctx: TensorArena, a: Tensor, w0: int, h0: int, w: int) -> Tensor:
    """The image of w0 by h0 pixels that `win_part` took apart."""
    enter1(ctx, a)
    want_f32("win_unpart", a=a)
    want_contiguous("win_unpart", a=a)
    want_positive("win_unpart", w0=w0, h0=h0, w=w)
    want_ne("win_unpart", "a", a, None, w, w, -(-w0 // w) * -(-h0 // w))
    return ctx._made(lib.ggml_win_unpart(ctx._p, a._p, w0, h0, w))


def get_rel_pos(ctx: TensorArena, a: Tensor, qh: int, kh: int) -> Tensor:
    """Relative position embeddings: a [C, 2 * qh - 1] f16 -> [C, kh, qh] f16; qh = kh."""
    enter1(ctx, a)
    want_dtype("get_rel_pos", "a", a, frozenset({F16}))
    want_contiguous("get_rel_pos", a=a)
    want_positive("get_rel_pos", qh=qh, kh=kh)
    if qh != kh:
        raise ShapeError(f"get_rel_pos: qh and kh must be equal, got {qh} and {kh}", qh=qh, kh=kh)
    want_ne("get_rel_pos", "a", a, None, 2 * qh - 1, 1, 1)
    return ctx._made(lib.ggml_get_rel_pos(ctx._p, a._p, qh, kh))


def _add_rel_pos(
    name: str, function: Any, ctx: TensorArena, operands: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    a, pw, ph = operands
    enter(ctx, 1, a, pw, ph)
    want_f32(name, a=a, pw=pw, ph=ph)
    want_same_shape(name, pw, ph)
    want_contiguous(name, a=a, pw=pw, ph=ph)
    if (
        pw.ne[3] != a.ne[2]
        or pw.ne[0] * pw.ne[0] != a.ne[0]
        or pw.ne[1] * pw.ne[2] != a.ne[1]
        or a.ne[3] != 1
    ):
        raise shape_error(
            name, "expected a [n * n, w * h, heads], pw and ph [n, w, h, heads]", a=a, pw=pw, ph=ph
        )
    return ctx._made(function(ctx._p, a._p, pw._p, ph._p))


def add_rel_pos(ctx: TensorArena, a: Tensor, pw: Tensor, ph: Tensor) -> Tensor:
    """Attention scores plus relative positions in width and height."""
    return _add_rel_pos("add_rel_pos", lib.ggml_add_rel_pos, ctx, (a, pw, ph))


def add_rel_pos_inplace(ctx: TensorArena, a: Tensor, pw: Tensor, ph: Tensor) -> Tensor:
    """As `add_rel_pos`, written into a."""
    return _add_rel_pos("add_rel_pos_inplace", lib.ggml_add_rel_pos_inplace, ctx, (a, pw, ph))
