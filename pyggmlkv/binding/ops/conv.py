"""Convolutions, by im2col and a matrix product or directly. Kernels come first,
[KW, KH, channels in, channels out].

Sizes are elements, s stride, p padding, d dilation, one each dimension. Upstream: ggml.c, ggml_im2col ...
ggml_conv_3d.
"""

from __future__ import annotations

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.dtypes import BF16, F16, F32, dtype_info
from pyggmlkv.binding.ops.checks import (
    F32_F16,
    FLOAT,
    dtype_error,
    enter,
    enter1,
    shape_error,
    show,
    want_contiguous,
    want_dims,
    want_dtype,
    want_f32,
    want_ne,
    want_not_negative,
    want_positive,
)
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import DTypeError, ShapeError

_HALF = frozenset({F16, BF16})


def _out(size: int, kernel: int, s: int, p: int, d: int) -> int:
    """Upstream: ggml_calc_conv_output_size (C division: a negative window counts as none)."""
    window = size + 2 * p - d * (kernel - 1) - 1
    return window // s + 1 if window >= 0 else 0


def _steps(name: str, s: tuple[int, ...], p: tuple[int, ...], d: tuple[int, ...]) -> None:
    for i, value in enumerate(s):
        want_positive(name, **{f"s{i}": value})
    for i, value in enumerate(p):
        want_not_negative(name, **{f"p{i}": value})
    for i, value in enumerate(d):
        want_positive(name, **{f"d{i}": value})


def _want_data(name: str, a: Tensor, b: Tensor) -> None:
    if 0 in a.ne or 0 in b.ne:
        raise shape_error(name, "there is nothing to convolve", a=a, b=b)


def _windows(name: str, a: Tensor, b: Tensor, steps: list[tuple[int, int, int]]) -> list[int]:
    """Output sizes. Raises: ShapeError if the kernel does not fit."""
    _want_data(name, a, b)
    sizes = [_out(b.ne[i], a.ne[i], s, p, d) for i, (s, p, d) in enumerate(steps)]
    if min(sizes) <= 0:
        raise shape_error(name, "the kernel is larger than the padded data", a=a, b=b)
    return sizes


def im2col(
    ctx: TensorArena, a: Tensor, b: Tensor,
    s0: int, s1: int, p0: int, p1: int, d0: int, d1: int, is_2D: bool, dst_type: str,
) -> Tensor:  # fmt: skip
    """Patches of `b` as rows, for kernel `a`, in `f32` or `f16`.

    1-D: a [K, IC, OC], b [L, IC, N] -> [IC * K, OL, N]. 2-D: a [KW, KH, IC, OC], b [W, H, IC, N]
    -> [IC * KH * KW, OW, OH, N].
    """
    name = "im2col"
    enter(ctx, 1, a, b)
    info = dtype_info(dst_type)
    if info.number not in F32_F16:
        raise DTypeError(f"{name}: dst_type must be f32 or f16, got {info.name}", dst_type=info.name)
    want_dtype(name, "b", b, F32_F16 if info.number == F16 else frozenset({F32}))
    want_contiguous(name, b=b)
    if is_2D:
        _steps(name, (s0, s1), (p0, p1), (d0, d1))
        want_ne(name, "b", b, None, None, a.ne[2])
        _windows(name, a, b, [(s0, p0, d0), (s1, p1, d1)])
    else:
        _steps(name, (s0,), (p0,), (d0,))
        want_ne(name, "b", b, None, a.ne[1], None, 1)
        _windows(name, a, b, [(s0, p0, d0)])
    return ctx._made(lib.ggml_im2col(ctx._p, a._p, b._p, s0, s1, p0, p1, d0, d1, is_2D, info.number))


def im2col_back(
    ctx: TensorArena, a: Tensor, b: Tensor, ne: tuple[int, int, int, int],
    s0: int, s1: int, p0: int, p1: int, d0: int, d1: int, is_2D: bool,
) -> Tensor:  # fmt: skip
    """Gradient of `im2col`: a is that of its result, b the kernel, `ne` the shape of its data -> `ne` f32.

    Upstream's header names the two operands the other way round; this is what its code does.
    """
    name = "im2col_back"
    enter(ctx, 1, a, b)
    want_f32(name, a=a)
    want_dtype(name, "b", b, F32_F16)
    want_contiguous(name, a=a)
    if len(ne) != 4 or min(ne) < 1:
        raise ShapeError(f"{name}: ne must be four positive sizes, got {ne}", ne=ne)
    _steps(name, (s0, s1) if is_2D else (s0,), (p0, p1) if is_2D else (p0,), (d0, d1) if is_2D else (d0,))
    columns = _out(ne[0], b.ne[0], s0, p0, d0)
    if is_2D:
        want_ne(name, "b", b, None, None, ne[2])
        expected = (b.ne[0] * b.ne[1] * b.ne[2], columns, _out(ne[1], b.ne[1], s1, p1, d1), ne[3])
    else:
        want_ne(name, "b", b, None, ne[1])
        expected = (b.ne[0] * b.ne[1], columns, ne[2], 1)
    want_ne(name, "a", a, *expected)
    return ctx._made(
        lib.ggml_im2col_back(ctx._p, a._p, b._p, ffi.new("int64_t[4]", ne), s0, s1, p0, p1, d0, d1, is_2D)
    )


def col2im_1d(ctx: TensorArena, a: Tensor, s0: int, oc: int, p0: int) -> Tensor:
    """Columns added up to a signal: a [K * oc, T_in] -> [(T_in - 1) * s0 + K - 2 * p0, oc]."""
    name = "col2im_1d"
    enter1(ctx, a)
    want_dtype(name, "a", a, FLOAT)
    want_dims(name, "a", a, 2)
    want_contiguous(name, a=a)
    want_positive(name, s0=s0, oc=oc)
    want_not_negative(name, p0=p0)
    k = a.ne[0] // oc
    if a.ne[0] % oc or k == 0 or (a.ne[1] - 1) * s0 + k - 2 * p0 <= 0:
        raise shape_error(name, f"expected [K * {oc}, T] that gives at least one sample", a=a)
    return ctx._made(lib.ggml_col2im_1d(ctx._p, a._p, s0, oc, p0))


def conv_1d(ctx: TensorArena, a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
    """a [K, IC, OC] f32 or f16, b [L, IC, N] f32 -> [OL, OC, N] f32 (data pass through f16)."""
    name = "conv_1d"
    enter(ctx, 5, a, b)
    want_dtype(name, "a", a, F32_F16)
    want_dtype(name, "b", b, F32_F16)
    want_contiguous(name, a=a, b=b)
    want_dims(name, "a", a, 3)
    _steps(name, (s0,), (p0,), (d0,))
    want_ne(name, "b", b, None, a.ne[1], None, 1)
    _windows(name, a, b, [(s0, p0, d0)])
    return ctx._made_many(lib.ggml_conv_1d(ctx._p, a._p, b._p, s0, p0, d0), 5)


def conv_1d_ph(ctx: TensorArena, a: Tensor, b: Tensor, s: int, d: int) -> Tensor:
    """`conv_1d` padded by half the kernel."""
    enter(ctx, 5, a, b)
    return conv_1d(ctx, a, b, s, a.ne[0] // 2, d)


def conv_1d_dw(ctx: TensorArena, a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
    """Depthwise: a [K, 1, C] f32 or f16, b [L, C] f32 -> [OL, C] f32."""
    name = "conv_1d_dw"
    enter(ctx, 4, a, b)
    want_dtype(name, "a", a, F32_F16)
    want_dtype(name, "b", b, F32_F16)
    want_contiguous(name, a=a, b=b)
    _steps(name, (s0,), (p0,), (d0,))
    want_ne(name, "a", a, None, 1, b.ne[1], 1)
    want_dims(name, "b", b, 2)
    _windows(name, a, b, [(s0, p0, d0)])
    return ctx._made_many(lib.ggml_conv_1d_dw(ctx._p, a._p, b._p, s0, p0, d0), 4)


def conv_1d_dw_ph(ctx: TensorArena, a: Tensor, b: Tensor, s0: int, d0: int) -> Tensor:
    """`conv_1d_dw` padded by half the kernel."""
    enter(ctx, 4, a, b)
    return conv_1d_dw(ctx, a, b, s0, a.ne[0] // 2, d0)


def conv_transpose_1d(ctx: TensorArena, a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
    """a [K, OC, IC] f32 or f16, b [L, IC] f32 -> [(L - 1) * s0 + K, OC] f32. Upstream has p0 = 0, d0 = 1
    only.
    """
    name = "conv_transpose_1d"
    enter(ctx, 1, a, b)
    want_dtype(name, "a", a, F32_F16)
    want_f32(name, b=b)
    want_contiguous(name, a=a, b=b)
    want_positive(name, s0=s0)
    if p0 != 0 or d0 != 1:
        raise ShapeError(f"{name}: upstream has p0 = 0 and d0 = 1 only, got {p0} and {d0}", p0=p0, d0=d0)
    want_dims(name, "a", a, 3)
    want_ne(name, "b", b, None, a.ne[2], 1, 1)
    _want_data(name, a, b)
    return ctx._made(lib.ggml_conv_transpose_1d(ctx._p, a._p, b._p, s0, p0, d0))


def conv_2d(
    ctx: TensorArena, a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int
) -> Tensor:
    """a [KW, KH, IC, OC] f32 or f16, b [W, H, IC, N] f32 -> [OW, OH, OC, N] f32 (data pass through f16)."""
    name = "conv_2d"
    enter(ctx, 7, a, b)
    want_dtype(name, "a", a, F32_F16)
    want_dtype(name, "b", b, F32_F16)
    want_contiguous(name, a=a, b=b)
    _steps(name, (s0, s1), (p0, p1), (d0, d1))
    want_ne(name, "b", b, None, None, a.ne[2])
    _windows(name, a, b, [(s0, p0, d0), (s1, p1, d1)])
    return ctx._made_many(lib.ggml_conv_2d(ctx._p, a._p, b._p, s0, s1, p0, p1, d0, d1), 7)


def conv_2d_sk_p0(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """`conv_2d` with the kernel's size as stride and no padding."""
    enter(ctx, 7, a, b)
    return conv_2d(ctx, a, b, a.ne[0], a.ne[1], 0, 0, 1, 1)


def conv_2d_s1_ph(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """`conv_2d` with stride 1, padded by half the kernel."""
    enter(ctx, 7, a, b)
    return conv_2d(ctx, a, b, 1, 1, a.ne[0] // 2, a.ne[1] // 2, 1, 1)


def conv_2d_dw(
    ctx: TensorArena, a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int
) -> Tensor:
    """Depthwise, by im2col: a [KW, KH, 1, C] f16 or bf16, b [W, H, C, N] f32 -> [OW, OH, C, N] f32."""
    name = "conv_2d_dw"
    enter(ctx, 7, a, b)
    want_dtype(name, "a", a, _HALF)
    want_f32(name, b=b)
    want_contiguous(name, a=a, b=b)
    _steps(name, (s0, s1), (p0, p1), (d0, d1))
    if a.ne[2] * a.ne[3] != b.ne[2]:
        raise shape_error(name, "a must have one kernel for each channel of b", a=a, b=b)
    _windows(name, a, b, [(s0, p0, d0), (s1, p1, d1)])
    return ctx._made_many(lib.ggml_conv_2d_dw(ctx._p, a._p, b._p, s0, s1, p0, p1, d0, d1), 7)


def conv_2d_dw_direct(
    ctx: TensorArena, a: Tensor, b: Tensor,
    stride0: int, stride1: int, pad0: int, pad1: int, dilation0: int, dilation1: int,
) -> Tensor:  # fmt: skip
    """Depthwise without im2col: a [KW, KH, 1, C] f32 or f16, b [W, H, C, N] f32 -> [OW, OH, C, N] f32."""
    name = "conv_2d_dw_direct"
    enter(ctx, 1, a, b)
    want_dtype(name, "a", a, F32_F16)
    want_f32(name, b=b)
    _steps(name, (stride0, stride1), (pad0, pad1), (dilation0, dilation1))
    want_ne(name, "a", a, None, None, 1, b.ne[2])
    _windows(name, a, b, [(stride0, pad0, dilation0), (stride1, pad1, dilation1)])
    if lib.ggml_is_contiguous(b._p):
        want_contiguous(name, a=a)
    elif not lib.ggml_is_contiguous_channels(b._p):
        raise shape_error(name, "b must be contiguous, or have its channels side by side", b=b)
    elif not (a.nb[0] >= a.nb[2] and a.nb[1] >= a.nb[0]):
        raise shape_error(name, "the channels of b lie side by side, so must those of a", a=a, b=b)
    return ctx._made(
        lib.ggml_conv_2d_dw_direct(ctx._p, a._p, b._p, stride0, stride1, pad0, pad1, dilation0, dilation1)
    )


def conv_2d_direct(
    ctx: TensorArena, a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int
) -> Tensor:
    """Without im2col as a node: a [KW, KH, IC, OC] f32 or f16, b [W, H, IC, N] f32 -> [OW, OH, OC, N] f32."""
    name = "conv_2d_direct"
    enter(ctx, 1, a, b)
    want_dtype(name, "a", a, F32_F16)
    want_f32(name, b=b)
    want_contiguous(name, a=a, b=b)
    _steps(name, (s0, s1), (p0, p1), (d0, d1))
    want_ne(name, "b", b, None, None, a.ne[2])
    _windows(name, a, b, [(s0, p0, d0), (s1, p1, d1)])
    return ctx._made(lib.ggml_conv_2d_direct(ctx._p, a._p, b._p, s0, s1, p0, p1, d0, d1))


def conv_transpose_2d_p0(ctx: TensorArena, a: Tensor, b: Tensor, stride: int) -> Tensor:
    """a [KW, KH, OC, IC] f32 or f16, b [W, H, IC, N] f32 -> [(W - 1) * stride + KW, ..., OC, N] f32, no
    padding.
    """
    name = "conv_transpose_2d_p0"
    enter(ctx, 1, a, b)
    if a._type not in F32_F16:
        raise dtype_error(name, "a", a, F32_F16)
    want_f32(name, b=b)
    want_contiguous(name, a=a, b=b)
    want_positive(name, stride=stride)
    want_ne(name, "b", b, None, None, a.ne[3])
    _want_data(name, a, b)
    return ctx._made(lib.ggml_conv_transpose_2d_p0(ctx._p, a._p, b._p, stride))


def _check_3d(name: str, a: Tensor, b: Tensor, ic: int, steps: list[tuple[int, int, int]]) -> None:
    want_positive(name, IC=ic)
    _steps(name, *(tuple(step[i] for step in steps) for i in range(3)))
    if a.ne[3] % ic or b.ne[3] % ic:
        raise ShapeError(
            f"{name}: a is {show(a)}, b is {show(b)}: the last sizes must be multiples of IC = {ic}"
        )
    want_contiguous(name, a=a, b=b)
    _windows(name, a, b, steps)


def im2col_3d(
    ctx: TensorArena, a: Tensor, b: Tensor, IC: int,
    s0: int, s1: int, s2: int, p0: int, p1: int, p2: int, d0: int, d1: int, d2: int, dst_type: str,
) -> Tensor:  # fmt: skip
    """a [KW, KH, KD, OC * IC], b [W, H, D, N * IC] f32 -> [KW * KH * KD * IC, OW, OH, OD * N], in f32 or
    f16.
    """
    enter(ctx, 1, a, b)
    info = dtype_info(dst_type)
    if info.number not in F32_F16:
        raise DTypeError(f"im2col_3d: dst_type must be f32 or f16, got {info.name}", dst_type=info.name)
    want_f32("im2col_3d", b=b)
    _check_3d("im2col_3d", a, b, IC, [(s0, p0, d0), (s1, p1, d1), (s2, p2, d2)])
    return ctx._made(
        lib.ggml_im2col_3d(ctx._p, a._p, b._p, IC, s0, s1, s2, p0, p1, p2, d0, d1, d2, info.number)
    )


def conv_3d(
    ctx: TensorArena, a: Tensor, b: Tensor, IC: int,
    s0: int, s1: int, s2: int, p0: int, p1: int, p2: int, d0: int, d1: int, d2: int,
) -> Tensor:  # fmt: skip
    """a [KW, KH, KD, OC * IC] f32 or f16, b [W, H, D, N * IC] f32 -> [OW, OH, OD, N * OC] f32."""
    enter(ctx, 8, a, b)
    want_dtype("conv_3d", "a", a, F32_F16)
    want_f32("conv_3d", b=b)
    _check_3d("conv_3d", a, b, IC, [(s0, p0, d0), (s1, p1, d1), (s2, p2, d2)])
    return ctx._made_many(lib.ggml_conv_3d(ctx._p, a._p, b._p, IC, s0, s1, s2, p0, p1, p2, d0, d1, d2), 8)


def conv_3d_direct(
    ctx: TensorArena, a: Tensor, b: Tensor,
    s0: int, s1: int, s2: int, p0: int, p1: int, p2: int, d0: int, d1: int, d2: int,
    n_channels: int, n_batch: int, n_channels_out: int,
) -> Tensor:  # fmt: skip
    """a [KW, KH, KD, IC * OC] f32 or f16, b [W, H, D, IC * N] f32 -> [OW, OH, OD, OC * N] f32."""
    name = "conv_3d_direct"
    enter(ctx, 1, a, b)
    want_dtype(name, "a", a, F32_F16)
    want_f32(name, b=b)
    want_positive(name, n_channels=n_channels, n_batch=n_batch, n_channels_out=n_channels_out)
    want_ne(name, "a", a, None, None, None, n_channels * n_channels_out)
    want_ne(name, "b", b, None, None, None, n_channels * n_batch)
    _check_3d(name, a, b, n_channels, [(s0, p0, d0), (s1, p1, d1), (s2, p2, d2)])
    steps = (s0, s1, s2, p0, p1, p2, d0, d1, d2)
    return ctx._made(lib.ggml_conv_3d_direct(ctx._p, a._p, b._p, *steps, n_channels, n_batch, n_channels_out))
