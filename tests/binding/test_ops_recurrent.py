"""Recurrent ops give what a plain loop over tokens gives."""

from __future__ import annotations

import numpy as np
import pytest

from pyggmlkv.binding import ops
from tests.binding.conftest import Evaluate

RNG = np.random.default_rng(13)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def test_ssm_conv_is_a_causal_depthwise_convolution(evaluate: Evaluate) -> None:
    sx, c = normal(2, 6, 3 + 5), normal(6, 4)
    expected = np.stack([(sx[:, :, t : t + 4] * c).sum(-1) for t in range(5)], axis=1)
    np.testing.assert_allclose(evaluate(ops.ssm_conv, sx, c), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mamba2", [False, True], ids=["mamba", "mamba2"])
def test_ssm_scan_is_the_recurrence(mamba2: bool, evaluate: Evaluate) -> None:
    n_seqs, n_t, n_head, head_dim, d_state, n_group = 2, 3, 4, (2 if mamba2 else 1), 8, 2
    s, x = normal(n_seqs, n_head, head_dim, d_state), normal(n_seqs, n_t, n_head, head_dim)
    dt = normal(n_seqs, n_t, n_head)
    a = -np.abs(normal(n_head, 1 if mamba2 else d_state))
    b, c = normal(n_seqs, n_t, n_group, d_state), normal(n_seqs, n_t, n_group, d_state)
    ids = np.array([1, 0], np.int32)
    state, y = s[ids].astype(np.float64), np.empty_like(x)
    for t in range(n_t):
        step = softplus(dt[:, t])[:, :, None, None]
        bt, ct = (np.repeat(m[:, t], n_head // n_group, axis=1)[:, :, None, :] for m in (b, c))
        state = state * np.exp(step * a[None, :, None, :]) + bt * x[:, t][..., None] * step
        y[:, t] = (state * ct).sum(-1)
    result = evaluate(ops.ssm_scan, s, x, dt, a, b, c, ids)
    np.testing.assert_allclose(result, np.concatenate([y.ravel(), state.ravel()]), rtol=1e-4, atol=1e-4)


def test_rwkv_wkv6_is_the_recurrence(evaluate: Evaluate) -> None:
    n_seqs, n_t, h, s = 2, 3, 2, 4
    k, v, r, td = (normal(n_seqs * n_t, h, s) for _ in range(4))
    td = np.abs(td) / 4
    tf, state = normal(h, s), normal(n_seqs, h, s, s)
    new, out = state.astype(np.float64), np.empty((n_seqs, n_t, h, s))
    for q in range(n_seqs):
        for t in range(n_t):
            i = q * n_t + t
            kv = k[i][:, :, None] * v[i][:, None, :]
            out[q, t] = (r[i][:, :, None] * (tf[:, :, None] * kv + new[q])).sum(1)
            new[q] = new[q] * td[i][:, :, None] + kv
    result = evaluate(ops.rwkv_wkv6, k, v, r, tf, td, state.reshape(n_seqs, -1))
    np.testing.assert_allclose(
        result.ravel(), np.concatenate([out.ravel(), new.ravel()]), rtol=1e-4, atol=1e-4
    )


def test_gated_linear_attn_is_the_recurrence(evaluate: Evaluate) -> None:
    n_seqs, n_t, h, s, scale = 2, 3, 2, 4, 0.5
    k, v, q, g = (normal(n_seqs * n_t, h, s) for _ in range(4))
    g = np.abs(g) / 4
    state = normal(n_seqs, h, s, s)
    new, out = state.astype(np.float64), np.empty((n_seqs, n_t, h, s))
    for n in range(n_seqs):
        for t in range(n_t):
            i = n * n_t + t
            new[n] = new[n] * g[i][:, :, None] + k[i][:, :, None] * v[i][:, None, :]
            out[n, t] = (q[i][:, :, None] * scale * new[n]).sum(1)
    result = evaluate(
        lambda c, *x: ops.gated_linear_attn(c, *x, scale), k, v, q, g, state.reshape(n_seqs, -1)
    )
    np.testing.assert_allclose(
        result.ravel(), np.concatenate([out.ravel(), new.ravel()]), rtol=1e-4, atol=1e-4
    )


def test_rwkv_wkv7_is_the_recurrence(evaluate: Evaluate) -> None:
    n_seqs, n_t, h, s = 2, 3, 2, 64
    r, w, k, v, a, b = (normal(n_seqs * n_t, h, s) / 8 for _ in range(6))
    state = normal(n_seqs, h, s, s)
    new, out = state.astype(np.float64), np.empty((n_seqs, n_t, h, s))
    for n in range(n_seqs):
        for t in range(n_t):
            i = n * n_t + t
            sa = (new[n] * a[i][:, None, :]).sum(-1)  # per value row
            new[n] = (
                new[n] * w[i][:, None, :]
                + v[i][:, :, None] * k[i][:, None, :]
                + sa[:, :, None] * b[i][:, None, :]
            )
            out[n, t] = (new[n] * r[i][:, None, :]).sum(-1)
    result = evaluate(ops.rwkv_wkv7, r, w, k, v, a, b, state.reshape(n_seqs, -1))
    np.testing.assert_allclose(
        result.ravel(), np.concatenate([out.ravel(), new.ravel()]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("n_gates", [1, 16], ids=["scalar", "per element"])
def test_gated_delta_net_is_the_recurrence(n_gates: int, evaluate: Evaluate) -> None:
    n_seqs, n_t, h, h_k, s = 2, 3, 4, 2, 16
    q, k = normal(n_seqs, n_t, h_k, s) / 4, normal(n_seqs, n_t, h_k, s) / 4
    v, g = normal(n_seqs, n_t, h, s), -np.abs(normal(n_seqs, n_t, h, n_gates))
    beta, state = RNG.uniform(0, 1, (n_seqs, n_t, h, 1)).astype(np.float32), normal(n_seqs, h, s, s) / 4
    new, out = state.astype(np.float64), np.empty((n_seqs, n_t, h, s))
    for t in range(n_t):
        kt, qt = (np.tile(m[:, t], (1, h // h_k, 1)) for m in (k, q))  # heads of q and k repeat, tiled
        new = new * np.exp(g[:, t])[:, :, None, :]  # rows are values, columns keys
        error = (v[:, t] - (new * kt[:, :, None, :]).sum(-1)) * beta[:, t]
        new = new + error[..., None] * kt[:, :, None, :]
        out[:, t] = (new * qt[:, :, None, :]).sum(-1) / np.sqrt(s)
    result = evaluate(ops.gated_delta_net, q, k, v, g, beta, state)
    np.testing.assert_allclose(
        result.ravel(), np.concatenate([out.ravel(), new.ravel()]), rtol=1e-3, atol=1e-4
    )


def test_lightning_indexer_scores_keys(evaluate: Evaluate) -> None:
    q, k, w = normal(3, 4, 16), normal(5, 1, 16), normal(3, 4)
    mask = np.where(RNG.random((3, 5)) < 0.3, -np.inf, 0).astype(np.float16)
    dots = np.maximum(np.einsum("thd,kd->tkh", q, k[:, 0]), 0)
    expected = (dots * w[:, None, :]).sum(-1) + mask
    np.testing.assert_allclose(evaluate(ops.lightning_indexer, q, k, w, mask), expected, rtol=1e-4, atol=1e-4)


def test_hyper_connections_mix_streams(evaluate: Evaluate) -> None:
    x, w = normal(3, 4, 8), normal(3, 4)
    np.testing.assert_allclose(
        evaluate(ops.dsv4_hc_pre, x, w), (x * w[..., None]).sum(1), rtol=1e-5, atol=1e-5
    )
    layer, post, comb = normal(3, 8), normal(3, 4), normal(3, 4, 4)  # comb (tokens, source, target)
    expected = layer[:, None] * post[..., None] + np.einsum("tse,tsd->tde", x, comb)
    np.testing.assert_allclose(
        evaluate(ops.dsv4_hc_post, layer, x, post, comb), expected, rtol=1e-4, atol=1e-4
    )


def test_hyper_connection_weights_are_normalised(evaluate: Evaluate) -> None:
    mixes, scale, base = normal(5, 24), np.abs(normal(3)), normal(24)
    result = evaluate(lambda c, *x: ops.dsv4_hc_comb(c, *x, 1e-6, 20), mixes, scale, base)
    assert result.shape == (5, 4, 4)
    np.testing.assert_allclose(result.sum(1), 1, atol=1e-3)
    np.testing.assert_allclose(result.sum(2), 1, atol=1e-3)
