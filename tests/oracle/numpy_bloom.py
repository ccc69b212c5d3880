"""A bloom forward pass in NumPy, float64, straight from a GGUF file: ALiBi by position, with a cache of its own.

Independent of ggml and of the package. The cache is a list of (position, key, value) in any order, from which
positions can be removed; GELU goes through half precision, as ggml's table does.
Upstream: models/bloom.cpp; ALiBi: Press et al. 2021, and its rule for head counts that are not powers of two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
MAX_BIAS = 8.0


def slopes(n_head: int) -> Array:
    """ALiBi's slope of every head: a geometric series, and every other member of a finer one for the rest."""
    n = 1 << int(math.log2(n_head))
    coarse = [2.0 ** (-MAX_BIAS * (h + 1) / n) for h in range(n)]
    fine = [2.0 ** (-MAX_BIAS / 2 * (2 * h + 1) / n) for h in range(n_head - n)]
    return np.array(coarse + fine)


@dataclasses.dataclass(slots=True)
class Cache:
    """Every layer's keys and values (n_tokens, n_head, head_dim), and positions (n_tokens,)."""

    keys: list[Array]
    values: list[Array]
    positions: Array

    def remove(self, p0: int, p1: int) -> None:
        """Forgets positions p0 to p1 - 1."""
        kept = (self.positions < p0) | (self.positions >= p1)
        self.positions = self.positions[kept]
        self.keys = [k[kept] for k in self.keys]
        self.values = [v[kept] for v in self.values]


class NumpyBloom:
    """`forward(tokens, first, cache)` gives the logits of tokens at positions from `first` on."""

    def __init__(self, path: Path | str) -> None:
        reader = gguf.GGUFReader(path)
        self.weights = {
            t.name: gguf.dequantize(t.data, t.tensor_type)
            .reshape(tuple(reversed(t.shape)))
            .astype(np.float64)
            for t in reader.tensors
        }
        self.n_layer = int(reader.get_field("bloom.block_count").contents())
        self.n_head = int(reader.get_field("bloom.attention.head_count").contents())
        self.eps = float(reader.get_field("bloom.attention.layer_norm_epsilon").contents())

    def new_cache(self) -> Cache:
        """An empty cache."""
        head_dim = self.weights["token_embd.weight"].shape[1] // self.n_head
        empty = np.zeros((0, self.n_head, head_dim))
        return Cache([empty] * self.n_layer, [empty] * self.n_layer, np.zeros(0))

    def forward(self, tokens: Sequence[int], first: int, cache: Cache) -> Array:
        """Logits (n_tokens, n_vocab); the tokens join the cache."""
        positions = np.arange(first, first + len(tokens), dtype=np.float64)
        cache.positions = np.concatenate([cache.positions, positions])
        x = self._norm("token_embd_norm", self.weights["token_embd.weight"][np.asarray(tokens)])
        for il in range(self.n_layer):
            x = x + self._attention(il, self._norm(f"blk.{il}.attn_norm", x), positions, cache)
            hidden = self._gelu(self._linear(f"blk.{il}.ffn_up", self._norm(f"blk.{il}.ffn_norm", x)))
            x = x + self._linear(f"blk.{il}.ffn_down", hidden)
        head = "output" if "output.weight" in self.weights else "token_embd"
        return self._norm("output_norm", x) @ self.weights[f"{head}.weight"].T

    def _norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        scale = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + self.eps)
        return np.asarray(centred / scale * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"])

    def _linear(self, name: str, x: Array) -> Array:
        return np.asarray(x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"])

    def _gelu(self, x: Array) -> Array:
        x = x.astype(np.float16).astype(np.float64)
        y = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))
        return y.astype(np.float16).astype(np.float64)

    def _attention(self, il: int, x: Array, positions: Array, cache: Cache) -> Array:
        n = len(x)
        heads = self._linear(f"blk.{il}.attn_qkv", x).reshape(n, 3, self.n_head, -1)
        q = heads[:, 0]
        cache.keys[il] = np.concatenate([cache.keys[il], heads[:, 1]])
        cache.values[il] = np.concatenate([cache.values[il], heads[:, 2]])
        scores = np.einsum("qhd,khd->hqk", q, cache.keys[il]) / math.sqrt(q.shape[-1])
        ahead = cache.positions[None, :] - positions[:, None]
        scores -= slopes(self.n_head)[:, None, None] * np.abs(ahead)
        scores = np.where(ahead <= 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, cache.values[il]).reshape(n, -1)
        return self._linear(f"blk.{il}.attn_output", mixed)
