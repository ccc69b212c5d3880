"""Convolutions, pooling, resizing, windows, losses and optimiser steps give what NumPy gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyggmlkv.binding import TensorArena, ops
from tests.binding.conftest import Evaluate, tensor_of

RNG = np.random.default_rng(17)
HALF = {"rtol": 5e-3, "atol": 2e-2}


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def convolve(data: np.ndarray, kernel: np.ndarray, stride: int, pad: int, dilation: int) -> np.ndarray:
    """data (n, ic, h, w), kernel (oc, ic, kh, kw) -> (n, oc, oh, ow)."""
    padded = np.pad(data, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    kh, kw = kernel.shape[2:]
    oh = (padded.shape[2] - dilation * (kh - 1) - 1) // stride + 1
    ow = (padded.shape[3] - dilation * (kw - 1) - 1) // stride + 1
    out = np.zeros((data.shape[0], kernel.shape[0], oh, ow))
    for i in range(kh):
        for j in range(kw):
            rows = slice(i * dilation, i * dilation + stride * (oh - 1) + 1, stride)
            columns = slice(j * dilation, j * dilation + stride * (ow - 1) + 1, stride)
            out += np.einsum("nihw,oi->nohw", padded[:, :, rows, columns], kernel[:, :, i, j])
    return out


@pytest.mark.parametrize(("stride", "pad", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2)])
@pytest.mark.parametrize("name", ["conv_2d", "conv_2d_direct"])
def test_conv_2d(name: str, stride: int, pad: int, dilation: int, evaluate: Evaluate) -> None:
    data, kernel = normal(2, 3, 8, 9), normal(4, 3, 3, 3)
    op = getattr(ops, name)
    result = evaluate(lambda c, a, b: op(c, a, b, stride, stride, pad, pad, dilation, dilation), kernel, data)
    np.testing.assert_allclose(result, convolve(data, kernel, stride, pad, dilation), **HALF)


def test_conv_2d_with_set_strides(evaluate: Evaluate) -> None:
    data, kernel = normal(1, 3, 8, 8), normal(4, 3, 2, 2)
    np.testing.assert_allclose(
        evaluate(ops.conv_2d_sk_p0, kernel, data), convolve(data, kernel, 2, 0, 1)[0], **HALF
    )
    kernel = normal(4, 3, 3, 3)
    np.testing.assert_allclose(
        evaluate(ops.conv_2d_s1_ph, kernel, data), convolve(data, kernel, 1, 1, 1)[0], **HALF
    )


@pytest.mark.parametrize("direct", [False, True], ids=["im2col", "direct"])
def test_conv_2d_depthwise(direct: bool, evaluate: Evaluate) -> None:
    data, kernel = normal(2, 3, 8, 9), normal(3, 1, 3, 3)
    op = ops.conv_2d_dw_direct if direct else ops.conv_2d_dw
    result = evaluate(lambda c, a, b: op(c, a, b, 1, 1, 1, 1, 1, 1), kernel.astype(np.float16), data)
    expected = np.concatenate(
        [convolve(data[:, i : i + 1], kernel[i : i + 1], 1, 1, 1) for i in range(3)], axis=1
    )
    np.testing.assert_allclose(result, expected, **HALF)


def test_conv_1d(evaluate: Evaluate) -> None:
    data, kernel = normal(3, 12), normal(4, 3, 3)
    expected = convolve(data[None, :, None], kernel[:, :, None], 1, 0, 1)[0, :, 0]
    np.testing.assert_allclose(
        evaluate(lambda c, a, b: ops.conv_1d(c, a, b, 1, 0, 1), kernel, data), expected, **HALF
    )
    padded = np.pad(data, ((0, 0), (1, 1)))
    expected = convolve(padded[None, :, None], kernel[:, :, None], 1, 0, 1)[0, :, 0]
    np.testing.assert_allclose(
        evaluate(lambda c, a, b: ops.conv_1d_ph(c, a, b, 1, 1), kernel, data), expected, **HALF
    )


def test_conv_1d_depthwise(evaluate: Evaluate) -> None:
    data, kernel = normal(3, 12), normal(3, 1, 3)
    padded = np.pad(data, ((0, 0), (1, 1)))
    expected = np.stack([np.convolve(padded[i], kernel[i, 0, ::-1], "valid") for i in range(3)])
    for op in (
        lambda c, a, b: ops.conv_1d_dw(c, a, b, 1, 1, 1),
        lambda c, a, b: ops.conv_1d_dw_ph(c, a, b, 1, 1),
    ):
        np.testing.assert_allclose(evaluate(op, kernel, data), expected, **HALF)


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
def test_conv_transpose(dtype: Any, evaluate: Evaluate) -> None:
    data, kernel = normal(2, 5), normal(2, 3, 4).astype(dtype)  # (ic, l), (ic, oc, k)
    expected = np.zeros((3, 4 * 2 + 4))
    for t in range(5):
        expected[:, t * 2 : t * 2 + 4] += np.einsum("i,iok->ok", data[:, t], kernel.astype(np.float32))
    result = evaluate(lambda c, a, b: ops.conv_transpose_1d(c, a, b, 2, 0, 1), kernel, data)
    np.testing.assert_allclose(result, expected, **HALF)
    image, kernel = normal(2, 4, 5), normal(2, 3, 2, 2).astype(dtype)
    expected = np.zeros((3, 3 * 2 + 2, 4 * 2 + 2))
    for y in range(4):
        for x in range(5):
            patch = np.einsum("i,iokl->okl", image[:, y, x], kernel.astype(np.float32))
            expected[:, y * 2 : y * 2 + 2, x * 2 : x * 2 + 2] += patch
    result = evaluate(lambda c, a, b: ops.conv_transpose_2d_p0(c, a, b, 2), kernel, image)
    np.testing.assert_allclose(result, expected, **HALF)


def test_im2col_and_back(evaluate: Evaluate) -> None:
    data, kernel = normal(1, 2, 5, 5), normal(3, 2, 3, 3)
    args = (1, 1, 0, 0, 1, 1, True)
    columns = evaluate(lambda c, a, b: ops.im2col(c, a, b, *args, "f32"), kernel, data)
    expected = [data[0, :, y : y + 3, x : x + 3].ravel() for y in range(3) for x in range(3)]
    np.testing.assert_array_equal(columns.reshape(9, 18), expected)
    back = evaluate(
        lambda c, a, b: ops.im2col_back(c, a, b, (5, 5, 2, 1), *args), np.ones_like(columns), kernel
    )
    counts = np.array([1, 2, 3, 2, 1])
    np.testing.assert_array_equal(back, np.broadcast_to(np.outer(counts, counts), (2, 5, 5)))


def test_col2im_1d_adds_columns(evaluate: Evaluate) -> None:
    columns = normal(4, 2 * 3)  # (t_in, oc * k)
    expected = np.zeros((2, 3 * 2 + 3), np.float32)
    for t in range(4):
        expected[:, t * 2 : t * 2 + 3] += columns[t].reshape(2, 3)
    np.testing.assert_allclose(
        evaluate(lambda c, a: ops.col2im_1d(c, a, 2, 2, 0), columns), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("direct", [False, True], ids=["im2col", "direct"])
def test_conv_3d(direct: bool, evaluate: Evaluate) -> None:
    ic, oc = 2, 3
    data, kernel = normal(ic, 4, 5, 6), normal(oc * ic, 2, 2, 2)
    expected = np.zeros((oc, 3, 4, 5))
    for o in range(oc):
        for i in range(ic):
            for z, y, x in np.ndindex(2, 2, 2):
                expected[o] += data[i, z : z + 3, y : y + 4, x : x + 5] * kernel[o * ic + i, z, y, x]
    steps = (1, 1, 1, 0, 0, 0, 1, 1, 1)
    if direct:
        result = evaluate(lambda c, a, b: ops.conv_3d_direct(c, a, b, *steps, ic, 1, oc), kernel, data)
    else:
        result = evaluate(lambda c, a, b: ops.conv_3d(c, a, b, ic, *steps), kernel, data)
    np.testing.assert_allclose(result, expected, **HALF)


@pytest.mark.parametrize(("op", "reduce"), [("max", np.max), ("avg", np.mean)])
def test_pooling(op: str, reduce: Any, evaluate: Evaluate) -> None:
    a = normal(3, 8, 6)
    rows = reduce(a.reshape(3, 8, 3, 2), axis=-1)
    np.testing.assert_allclose(
        evaluate(lambda c, x: ops.pool_1d(c, x, op, 2, 2, 0), a), rows, rtol=1e-5, atol=1e-6
    )
    blocks = reduce(a.reshape(3, 4, 2, 3, 2), axis=(2, 4))
    result = evaluate(lambda c, x: ops.pool_2d(c, x, op, 2, 2, 2, 2, 0, 0), a)
    np.testing.assert_allclose(result, blocks, rtol=1e-5, atol=1e-6)


def test_pool_2d_back_shares_the_gradient(evaluate: Evaluate) -> None:
    grad, a = normal(2, 2), normal(4, 4)
    result = evaluate(lambda c, g, x: ops.pool_2d_back(c, g, x, "avg", 2, 2, 2, 2, 0, 0), grad, a)
    np.testing.assert_allclose(result, np.kron(grad, np.full((2, 2), 0.25)), rtol=1e-5)


def test_resizing(evaluate: Evaluate) -> None:
    a = normal(2, 3, 4)
    nearest = evaluate(lambda c, x: ops.upscale(c, x, 2, "nearest"), a)
    np.testing.assert_array_equal(nearest, a.repeat(2, -1).repeat(2, -2))
    corners = evaluate(lambda c, x: ops.interpolate(c, x, 7, 5, 2, 1, "bilinear", align_corners=True), a)
    np.testing.assert_allclose(corners[:, ::2, ::2], a, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        evaluate(lambda c, x: ops.upscale_ext(c, x, 8, 6, 2, 1, "nearest"), a), nearest
    )


def test_padding_and_rolling(evaluate: Evaluate) -> None:
    a = normal(2, 3, 4)
    np.testing.assert_array_equal(
        evaluate(lambda c, x: ops.pad(c, x, 1, 2, 0, 0), a), np.pad(a, ((0, 0), (0, 2), (0, 1)))
    )
    around = ((0, 1), (1, 0), (2, 1))
    sides = (2, 1, 1, 0, 0, 1, 0, 0)
    np.testing.assert_array_equal(evaluate(lambda c, x: ops.pad_ext(c, x, *sides), a), np.pad(a, around))
    np.testing.assert_array_equal(
        evaluate(lambda c, x: ops.pad_ext_circular(c, x, *sides), a), np.pad(a, around, "wrap")
    )
    wrapped = evaluate(lambda c, x: ops.pad_circular(c, x, 1, 0, 0, 0), a)
    np.testing.assert_array_equal(wrapped, np.pad(a, ((0, 0), (0, 0), (0, 1)), "wrap"))
    mirrored = evaluate(lambda c, x: ops.pad_reflect_1d(c, x, 1, 2), a)
    np.testing.assert_array_equal(mirrored, np.pad(a, ((0, 0), (0, 0), (1, 2)), "reflect"))
    rolled = evaluate(lambda c, x: ops.roll(c, x, 1, -2, 1, 0), a)
    np.testing.assert_array_equal(rolled, np.roll(a, (1, -2, 1), (2, 1, 0)))


def test_windows_come_apart_and_together(evaluate: Evaluate) -> None:
    a = normal(5, 7, 3)
    parts = evaluate(lambda c, x: ops.win_part(c, x, 4), a)
    padded = np.pad(a, ((0, 3), (0, 1), (0, 0)))
    expected = padded.reshape(2, 4, 2, 4, 3).swapaxes(1, 2).reshape(4, 4, 4, 3)
    np.testing.assert_array_equal(parts, expected)
    np.testing.assert_array_equal(evaluate(lambda c, x: ops.win_unpart(c, x, 7, 5, 4), parts), a)


def test_relative_positions(evaluate: Evaluate) -> None:
    table = normal(5, 4).astype(np.float16)
    expected = np.array([[table[2 - k + q] for k in range(3)] for q in range(3)])
    np.testing.assert_array_equal(evaluate(lambda c, a: ops.get_rel_pos(c, a, 3, 3), table), expected)
    scores, pw, ph = normal(2, 9, 9), normal(2, 3, 3, 3), normal(2, 3, 3, 3)
    square = scores.reshape(2, 9, 3, 3) + pw.reshape(2, 9, 1, 3) + ph.reshape(2, 9, 3, 1)
    result = evaluate(ops.add_rel_pos, scores, pw, ph)
    np.testing.assert_allclose(result, square.reshape(2, 9, 9), rtol=1e-5, atol=1e-6)


def test_cross_entropy_loss_and_its_gradient(evaluate: Evaluate) -> None:
    logits = normal(3, 5)
    wanted = RNG.dirichlet(np.ones(5), 3).astype(np.float32)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss = evaluate(ops.cross_entropy_loss, logits, wanted)
    np.testing.assert_allclose(loss, [-(wanted * log_p).sum() / 3], rtol=1e-5)
    grad = evaluate(ops.cross_entropy_loss_back, np.array([2.0], np.float32), logits, wanted)
    np.testing.assert_allclose(grad, (np.exp(log_p) - wanted) * 2 / 3, rtol=1e-4, atol=1e-6)


def test_optimiser_steps(evaluate: Evaluate, ctx: TensorArena) -> None:
    weights, grad, m, v = normal(6), normal(6), normal(6), np.abs(normal(6))
    alpha, beta1, beta2, eps, wd, beta1h, beta2h = 0.1, 0.9, 0.99, 1e-8, 0.01, 1.2, 1.1
    m2, v2 = m * beta1 + grad * (1 - beta1), v * beta2 + grad**2 * (1 - beta2)
    expected = weights * (1 - alpha * wd) - alpha * m2 * beta1h / (np.sqrt(v2 * beta2h) + eps)
    a = tensor_of(ctx, weights)
    a.set_param()
    params = tensor_of(ctx, np.array([alpha, beta1, beta2, eps, wd, beta1h, beta2h], np.float32))
    evaluate.run([ops.opt_step_adamw(ctx, a, *(tensor_of(ctx, x) for x in (grad, m, v)), params)])
    np.testing.assert_allclose(a.numpy(), expected, rtol=1e-4, atol=1e-5)
    b = tensor_of(ctx, weights)
    b.set_param()
    evaluate.run(
        [ops.opt_step_sgd(ctx, b, tensor_of(ctx, grad), tensor_of(ctx, np.array([alpha, wd], np.float32)))]
    )
    np.testing.assert_allclose(b.numpy(), weights * (1 - alpha * wd) - alpha * grad, rtol=1e-5, atol=1e-6)
