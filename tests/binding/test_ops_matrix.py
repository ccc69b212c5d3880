"""Products, rows, views, norms, reductions and attention give what NumPy gives."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from pyggmlkv.binding import RopeParams, Tensor, TensorArena, ops
from tests.binding.conftest import Evaluate, tensor_of

RNG = np.random.default_rng(11)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("f32", 1e-5), ("f16", 1e-2), ("bf16", 6e-2), ("q8_0", 6e-2), ("q4_K", 2.0)]
)
def test_mul_mat_multiplies_rows(dtype: str, tolerance: float, evaluate: Evaluate) -> None:
    a, b = normal(6, 256), normal(4, 256)
    np.testing.assert_allclose(
        evaluate(ops.mul_mat, (dtype, a), b), b @ a.T, atol=tolerance * 4, rtol=tolerance
    )


def test_mul_mat_repeats_the_matrices_of_a(evaluate: Evaluate) -> None:
    a, b = normal(2, 5, 16), normal(6, 3, 16)
    expected = np.einsum("hnk,hmk->hmn", np.repeat(a, 3, axis=0), b)
    np.testing.assert_allclose(evaluate(ops.mul_mat, a, b), expected, rtol=1e-4, atol=1e-5)


def test_mul_mat_precision_and_hint_are_kept(ctx: TensorArena) -> None:
    result = ops.mul_mat(ctx, tensor_of(ctx, normal(8, 8)), tensor_of(ctx, normal(2, 8)))
    ops.mul_mat_set_prec(result, "f32")
    ops.mul_mat_set_hint(result, "src0_is_hadamard")
    ops.mul_mat_set_hint(result, "none")


@pytest.mark.parametrize("n", [4, 64, 256])
def test_mul_mat_with_the_hadamard_hint_is_the_product(n: int, evaluate: Evaluate) -> None:
    hadamard = np.array([[1.0]], np.float32)
    while len(hadamard) < n:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]]) / np.sqrt(2, dtype=np.float32)
    x = normal(3, n)

    def build(c: TensorArena, a: Tensor, b: Tensor) -> Tensor:
        result = ops.mul_mat(c, a, b)
        ops.mul_mat_set_hint(result, "src0_is_hadamard")
        return result

    np.testing.assert_allclose(evaluate(build, hadamard, x), x @ hadamard.T, rtol=1e-4, atol=1e-5)


def test_mul_mat_id_uses_the_named_expert(evaluate: Evaluate) -> None:
    experts, x = normal(4, 6, 32), normal(5, 1, 32)
    ids = np.stack([RNG.permutation(4)[:2] for _ in range(5)]).astype(np.int32)
    expected = np.einsum("tunk,tk->tun", experts[ids], x[:, 0])
    np.testing.assert_allclose(evaluate(ops.mul_mat_id, experts, x, ids), expected, rtol=1e-4, atol=1e-5)


def test_out_prod_sums_outer_products(evaluate: Evaluate) -> None:
    a, b = normal(7, 4), normal(7, 3)
    np.testing.assert_allclose(evaluate(ops.out_prod, a, b), b.T @ a, rtol=1e-5, atol=1e-5)


def test_solve_tri_solves(evaluate: Evaluate) -> None:
    a = np.tril(normal(5, 5)) + 4 * np.eye(5, dtype=np.float32)
    b = normal(5, 3)
    result = evaluate(lambda c, x, y: ops.solve_tri(c, x, y, True, True, False), a, b)
    np.testing.assert_allclose(result, np.linalg.solve(a, b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_get_rows_takes_rows_as_f32(dtype: str, evaluate: Evaluate) -> None:
    a = normal(9, 32)
    index = np.array([3, 0, 8, 3], np.int32)
    np.testing.assert_allclose(evaluate(ops.get_rows, (dtype, a), index), a[index], atol=0.03)


@pytest.mark.parametrize("index_type", [np.int32, np.int64], ids=["i32", "i64"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_set_rows_writes_the_named_rows(
    dtype: str, index_type: Any, evaluate: Evaluate, ctx: TensorArena
) -> None:
    rows = normal(3, 32)
    target = tensor_of(ctx, (dtype, np.zeros((8, 32), np.float32)))
    index = tensor_of(ctx, np.array([6, 1, 4], index_type))
    result = ops.set_rows(ctx, target, tensor_of(ctx, rows), index)
    evaluate.run([result])
    expected = np.zeros((8, 32), np.float32)
    expected[[6, 1, 4]] = rows
    np.testing.assert_allclose(
        target.to_numpy().astype(np.float32), expected, atol=0.4 if dtype == "q4_0" else 0.03
    )


def test_get_rows_back_scatters(evaluate: Evaluate) -> None:
    grad, index = normal(4, 8), np.array([2, 0, 2, 1], np.int32)
    expected = np.zeros((5, 8), np.float32)
    np.add.at(expected, index, grad)
    np.testing.assert_allclose(
        evaluate(ops.get_rows_back, grad, index, np.zeros((5, 8), np.float32)), expected, rtol=1e-5
    )


@pytest.mark.parametrize("dim", range(4))
def test_concat_joins_along_any_dimension(dim: int, evaluate: Evaluate) -> None:
    shape = [2, 3, 4, 5]
    a = normal(*shape)
    shape[3 - dim] = 6
    b = normal(*shape)
    result = evaluate(lambda c, x, y: ops.concat(c, x, y, dim), a, b)
    np.testing.assert_array_equal(result, np.concatenate([a, b], axis=3 - dim))


def test_repeat_and_repeat_back(evaluate: Evaluate, ctx: TensorArena) -> None:
    a, like = normal(1, 4), np.zeros((3, 8), np.float32)
    expected = np.tile(a, (3, 2))
    np.testing.assert_array_equal(evaluate(ops.repeat, a, like), expected)
    np.testing.assert_array_equal(evaluate(lambda c, x: ops.repeat_4d(c, x, 8, 3, 1, 1), a), expected)
    summed = expected.reshape(3, 2, 4).sum(axis=(0, 1))
    np.testing.assert_allclose(evaluate(ops.repeat_back, expected, a[0]), summed, rtol=1e-5)


def test_diagonals_and_triangles(evaluate: Evaluate) -> None:
    v, m = normal(1, 5), normal(5, 5)
    np.testing.assert_array_equal(evaluate(ops.diag, v), np.diag(v[0]))
    masked = evaluate(lambda c, a: ops.diag_mask_inf(c, a, 1), m)
    np.testing.assert_array_equal(masked, np.where(np.tri(5, 5, 1, dtype=bool), m, -np.inf))
    zeroed = evaluate(lambda c, a: ops.diag_mask_zero_inplace(c, a, 1), m)
    np.testing.assert_array_equal(zeroed, np.where(np.tri(5, 5, 1, dtype=bool), m, 0))
    np.testing.assert_array_equal(evaluate(lambda c, a: ops.tri(c, a, "lower_diag"), m), np.tril(m))
    np.testing.assert_array_equal(evaluate(lambda c, a: ops.tri(c, a, "upper"), m), np.triu(m, 1))


def test_views_show_the_same_memory(ctx: TensorArena) -> None:
    a = normal(2, 3, 4, 5)
    t = tensor_of(ctx, a)
    np.testing.assert_array_equal(ops.reshape_2d(ctx, t, 20, 6).numpy(), a.reshape(6, 20))
    np.testing.assert_array_equal(ops.permute(ctx, t, 1, 2, 0, 3).numpy(), _permuted(a, (1, 2, 0, 3)))
    np.testing.assert_array_equal(ops.transpose(ctx, t).numpy(), a.swapaxes(-1, -2))
    np.testing.assert_array_equal(ops.view_1d(ctx, t, 7, 8).numpy(), a.ravel()[2:9])
    np.testing.assert_array_equal(ops.view_2d(ctx, t, 3, 2, t.nb[1], 4).numpy(), a[0, 0, :2, 1:4])
    np.testing.assert_array_equal(ops.view_3d(ctx, t, 3, 2, 3, t.nb[1], t.nb[2], 4).numpy(), a[0, :, :2, 1:4])
    np.testing.assert_array_equal(ops.view_4d(ctx, t, 5, 2, 2, 2, *t.nb[1:], t.nb[2]).numpy(), a[:, 1:, :2])


def _permuted(a: np.ndarray, axes: tuple[int, int, int, int]) -> np.ndarray:
    """ggml: dimension i (from the innermost) becomes dimension axes[i]."""
    order = [0] * 4
    for source, target in enumerate(axes):
        order[3 - target] = 3 - source
    return a.transpose(order)


def test_copies_are_contiguous(evaluate: Evaluate) -> None:
    a = normal(2, 3, 4, 5)
    swapped = evaluate(lambda c, x: ops.cont(c, ops.permute(c, x, 0, 2, 1, 3)), a)
    np.testing.assert_array_equal(swapped, a.swapaxes(1, 2))
    flat = evaluate(lambda c, x: ops.cont_2d(c, ops.transpose(c, x), 20, 6), a)
    np.testing.assert_array_equal(flat, a.swapaxes(2, 3).reshape(6, 20))
    np.testing.assert_array_equal(evaluate(ops.dup, a), a)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "i32", "q8_0", "f32"])
def test_cast_and_cpy_convert(dtype: str, evaluate: Evaluate, ctx: TensorArena) -> None:
    a = normal(4, 32) * 10
    expected = np.trunc(a) if dtype == "i32" else a
    cast = evaluate(lambda c, x: ops.cast(c, x, dtype), a).astype(np.float32)
    np.testing.assert_allclose(cast, expected, rtol=0.01, atol=0.2)
    target = ctx.new_tensor(dtype, 32, 4)
    evaluate.run([ops.cpy(ctx, tensor_of(ctx, a), target)])
    np.testing.assert_array_equal(target.to_numpy().astype(np.float32), cast)


def test_norms(evaluate: Evaluate) -> None:
    a, eps = normal(2, 3, 16) * 3 + 1, 1e-5
    centred = a - a.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    rms = a / np.sqrt((a**2).mean(-1, keepdims=True) + eps)
    l2 = a / np.maximum(np.linalg.norm(a, axis=-1, keepdims=True), eps)
    for suffix in ("", "_inplace"):
        for name, wanted in (("norm", expected), ("rms_norm", rms), ("l2_norm", l2)):
            op = getattr(ops, name + suffix)
            result = evaluate(partial(lambda op, c, x: op(c, x, eps), op), a)
            np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)


def test_group_norm(evaluate: Evaluate) -> None:
    a, eps = normal(4, 3, 5), 1e-5
    grouped = a.reshape(2, -1)
    centred = grouped - grouped.mean(-1, keepdims=True)
    expected = (centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)).reshape(a.shape)
    np.testing.assert_allclose(
        evaluate(lambda c, x: ops.group_norm(c, x, 2, eps), a), expected, rtol=1e-4, atol=1e-5
    )


def test_rms_norm_back_is_the_gradient(evaluate: Evaluate) -> None:
    grad, x, eps, h = normal(8), normal(8).astype(np.float64), 1e-5, 1e-6

    def loss(v: np.ndarray) -> float:
        return float((grad * v / np.sqrt((v**2).mean() + eps)).sum())

    numeric = [(loss(x + h * e) - loss(x - h * e)) / (2 * h) for e in np.eye(8)]
    result = evaluate(lambda c, a, b: ops.rms_norm_back(c, a, b, eps), grad, x.astype(np.float32))
    np.testing.assert_allclose(result, numeric, rtol=1e-3, atol=1e-4)


def test_reductions(evaluate: Evaluate) -> None:
    a = normal(3, 4, 6)
    np.testing.assert_allclose(evaluate(ops.sum, a), [a.sum()], rtol=1e-5)
    np.testing.assert_allclose(evaluate(ops.sum_rows, a), a.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(evaluate(ops.mean, a), a.mean(-1, keepdims=True), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(evaluate(ops.cumsum, a), a.cumsum(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(evaluate(ops.argmax, a[0]), a[0].argmax(-1))
    i = RNG.integers(0, 3, (2, 9)).astype(np.int32)
    np.testing.assert_array_equal(evaluate(ops.count_equal, i[0], i[1]), [(i[0] == i[1]).sum()])


def test_sorting(evaluate: Evaluate) -> None:
    a = normal(3, 10)
    np.testing.assert_array_equal(evaluate(lambda c, x: ops.argsort(c, x, "asc"), a), a.argsort(-1))
    np.testing.assert_array_equal(evaluate(lambda c, x: ops.argsort(c, x, "desc"), a), (-a).argsort(-1))
    np.testing.assert_array_equal(
        evaluate(lambda c, x: ops.argsort_top_k(c, x, 4), a), (-a).argsort(-1)[:, :4]
    )
    top = evaluate(lambda c, x: ops.top_k(c, x, 4), a)
    np.testing.assert_array_equal(np.sort(top), np.sort((-a).argsort(-1)[:, :4]))


def test_numbers_alone(evaluate: Evaluate) -> None:
    np.testing.assert_allclose(evaluate(lambda c: ops.arange(c, 1.0, 3.0, 0.5)), np.arange(1, 3, 0.5))
    np.testing.assert_array_equal(
        evaluate(lambda c, a: ops.fill(c, a, 2.5), normal(2, 3)), np.full((2, 3), 2.5)
    )
    steps = np.array([0.0, 3.0], np.float32)
    freqs = np.exp(-math.log(10000) * np.arange(4) / 4)
    angles = steps[:, None] * freqs
    result = evaluate(lambda c, t: ops.timestep_embedding(c, t, 8, 10000), steps)
    np.testing.assert_allclose(
        result, np.concatenate([np.cos(angles), np.sin(angles)], -1), rtol=1e-5, atol=1e-6
    )


def soft_max(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_soft_max_ext_scales_and_masks(dtype: str, evaluate: Evaluate) -> None:
    a, mask = normal(4, 3, 8), np.where(RNG.random((3, 8)) < 0.3, -np.inf, 0).astype(np.float32)
    mask[:, 0] = 0
    result = evaluate(lambda c, x, m: ops.soft_max_ext(c, x, m, 0.5, 0.0), a, (dtype, mask))
    np.testing.assert_allclose(result, soft_max(a * 0.5 + mask), rtol=1e-5, atol=1e-6)


def test_soft_max_with_sinks_gives_them_a_share(evaluate: Evaluate) -> None:
    a, sinks = normal(2, 3, 8), normal(2)

    def build(c: Any, x: Any, s: Any) -> Any:
        result = ops.soft_max(c, x)
        ops.soft_max_add_sinks(result, s)
        return result

    full = soft_max(np.concatenate([a, np.broadcast_to(sinks[:, None, None], (2, 3, 1))], -1))
    np.testing.assert_allclose(evaluate(build, a, sinks), full[..., :-1], rtol=1e-5, atol=1e-6)


def test_soft_max_ext_back_is_the_gradient(evaluate: Evaluate) -> None:
    grad, y = normal(3, 6), soft_max(normal(3, 6))
    expected = (grad - (grad * y).sum(-1, keepdims=True)) * y * 0.5
    result = evaluate(lambda c, a, b: ops.soft_max_ext_back(c, a, b, 0.5, 0.0), grad, y)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_flash_attn_ext_is_attention(dtype: str, evaluate: Evaluate) -> None:
    q, k, v = normal(4, 3, 32), normal(2, 7, 32), normal(2, 7, 32)
    mask = np.triu(np.full((3, 7), -np.inf, np.float32), 5)
    keys, values = np.repeat(k, 2, axis=0), np.repeat(v, 2, axis=0)
    scores = np.einsum("hqd,hkd->hqk", q, keys) / math.sqrt(32) + mask
    expected = np.einsum("hqk,hkd->qhd", soft_max(scores), values)

    def build(c: Any, q: Any, k: Any, v: Any, m: Any) -> Any:
        result = ops.flash_attn_ext(c, q, k, v, m, 1 / math.sqrt(32), 0.0, 0.0)
        ops.flash_attn_ext_set_prec(result, "f32")
        assert ops.flash_attn_ext_get_prec(result) == "f32"
        return result

    result = evaluate(build, q, (dtype, k), (dtype, v), ("f16", mask))
    np.testing.assert_allclose(result, expected, rtol=0.03, atol=0.03)


def rope_reference(x: np.ndarray, pos: np.ndarray, params: RopeParams, factors: Any = 1.0) -> np.ndarray:
    half = params.n_dims // 2
    theta = (
        pos[:, None]
        * params.freq_base ** (-2.0 * np.arange(half) / params.n_dims)
        / factors
        * params.freq_scale
    )
    cos, sin = np.cos(theta)[:, None, :], np.sin(theta)[:, None, :]
    out = x.astype(np.float64).copy()
    if params.mode == "neox":
        first, second = slice(0, half), slice(half, params.n_dims)
    else:
        first, second = slice(0, params.n_dims, 2), slice(1, params.n_dims, 2)
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


@pytest.mark.parametrize("mode", ["normal", "neox"])
def test_rope_ext_turns_pairs(mode: Any, evaluate: Evaluate) -> None:
    x, pos = normal(5, 3, 16), np.array([0, 3, 17, 2, 100], np.int32)
    params = RopeParams(12, mode, freq_base=500.0, freq_scale=0.5)
    factors = RNG.uniform(1, 2, 6).astype(np.float32)
    result = evaluate(lambda c, a, b, f: ops.rope_ext(c, a, b, f, params), x, pos, factors)
    np.testing.assert_allclose(result, rope_reference(x, pos, params, factors), rtol=1e-3, atol=1e-4)
    back = evaluate(lambda c, a, b, f: ops.rope_ext_back(c, a, b, f, params), result, pos, factors)
    np.testing.assert_allclose(back, x, rtol=1e-3, atol=1e-4)
    plain = evaluate(lambda c, a, b: ops.rope(c, a, b, 12, mode), x, pos)
    np.testing.assert_allclose(plain, rope_reference(x, pos, RopeParams(12, mode)), rtol=1e-3, atol=1e-3)


def test_rope_multi_with_equal_positions_is_neox(evaluate: Evaluate) -> None:
    x, pos = normal(5, 3, 16), np.array([0, 3, 17, 2, 100], np.int32)
    params = RopeParams(16, "mrope", sections=(4, 2, 2, 0))
    result = evaluate(lambda c, a, b: ops.rope_multi(c, a, b, None, params), x, np.tile(pos, 4))
    np.testing.assert_allclose(result, rope_reference(x, pos, RopeParams(16, "neox")), rtol=1e-3, atol=1e-3)
