"""Attention rotation: block sizes, the matrix, and that attention does not notice it (case 02)."""

from __future__ import annotations

import numpy as np
import pytest

from pyggmlkv.memory.config import KVSpec, LayerSpec
from pyggmlkv.memory.rotation import block_size, hadamard, rotations

HEADS = {32: 0, 64: 64, 80: 0, 96: 0, 128: 128, 192: 64, 256: 256, 320: 64, 576: 64}


@pytest.mark.parametrize(("head_dim", "block"), HEADS.items())
def test_the_block_is_the_largest_power_of_two_that_divides_the_head(head_dim: int, block: int) -> None:
    assert block_size(head_dim) == block


@pytest.mark.parametrize("n", [1, 2, 64, 128, 256, 512])
def test_the_matrix_is_symmetric_and_its_own_inverse(n: int) -> None:
    h = hadamard(n)
    assert (h == h.T).all()
    assert np.abs(h @ h - np.eye(n)).max() < 1e-5
    assert np.unique(np.abs(h)).size == 1


@pytest.mark.parametrize("n", [0, 3, 96])
def test_a_size_that_is_no_power_of_two_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=str(n)):
        hadamard(n)


@pytest.mark.parametrize(("dim_k", "dim_v"), [(64, 64), (128, 64), (192, 128), (320, 192), (576, 512)])
def test_attention_is_the_same_with_and_without_rotation(dim_k: int, dim_v: int) -> None:
    rng = np.random.default_rng(dim_k)
    q, k = (rng.standard_normal((5, dim_k)).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((5, dim_v)).astype(np.float32)

    def turned(rows: np.ndarray, n: int) -> np.ndarray:
        return (rows.reshape(-1, n) @ hadamard(n)).reshape(rows.shape)

    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        scores = np.exp(q @ k.T / np.sqrt(dim_k))
        return scores / scores.sum(axis=1, keepdims=True) @ v

    block_k = block_size(dim_k)
    assert np.abs(turned(q, block_k) @ turned(k, block_k).T - q @ k.T).max() < 1e-4
    out = turned(attend(turned(q, block_k), turned(k, block_k), turned(v, 64)), 64)
    assert np.abs(out - attend(q, k, v)).max() < 1e-5


def spec(*heads: tuple[int, int], attn_rot: bool | None = None, has_v: bool = True) -> KVSpec:
    layers = tuple(LayerSpec(il, 1, k, v, has_v=has_v) for il, (k, v) in enumerate(heads))
    return KVSpec(layers, 32, attn_rot=attn_rot)


def sizes(spec: KVSpec, k: bool, v: bool) -> tuple[int, int]:
    return tuple(0 if m is None else len(m) for m in rotations(spec, k, v))  # type: ignore[return-value]


def test_k_and_v_are_decided_separately() -> None:
    assert sizes(spec((128, 64)), True, True) == (128, 64)
    assert sizes(spec((128, 64)), True, False) == (128, 0)
    assert sizes(spec((128, 64)), False, True) == (0, 64)
    assert sizes(spec((96, 128)), True, True) == (0, 64)
    assert sizes(spec((192, 320)), True, True) == (64, 64)


def test_layers_of_different_widths_are_left_alone() -> None:
    assert sizes(spec((128, 64), (64, 64)), True, True) == (0, 64)
    assert sizes(spec((64, 64), (64, 128)), True, True) == (64, 0)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes(spec((64, 64), attn_rot=False), True, True) == (0, 0)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    assert sizes(spec((64, 64)), True, True) == (0, 0)
    assert sizes(spec((64, 64), attn_rot=True), True, True) == (64, 64)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "0")
    assert sizes(spec((64, 64)), True, True) == (64, 64)


def test_a_latent_cache_is_never_rotated() -> None:
    assert sizes(spec((576, 512), has_v=False), True, True) == (0, 0)
