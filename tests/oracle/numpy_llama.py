"""A llama forward pass in NumPy, float64, straight from a GGUF file, with and without a cache.

Independent of ggml and of the package: weights are read and dequantised with the `gguf` package, attention is
a plain softmax over the positions not later than the query's. Dense llama with grouped heads, optional biases
and RoPE factors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(slots=True)
class Cache:
    """Every layer's keys and values so far (n_tokens, n_head_kv, head_dim), and positions (n_tokens,)."""

    keys: list[Array]
    values: list[Array]
    positions: Array


class NumpyLlama:
    """`forward(tokens)` gives logits; `forward(tokens, cache=cache)` goes on after what the cache holds."""

    def __init__(self, path: Path | str) -> None:
        reader = gguf.GGUFReader(path)
        self.weights = {
            t.name: gguf.dequantize(t.data, t.tensor_type)
            .reshape(tuple(reversed(t.shape)))
            .astype(np.float64)
            for t in reader.tensors
        }

        def key(name: str) -> Any:
            field = reader.get_field(f"llama.{name}")
            return None if field is None else field.contents()

        self.n_layer: int = key("block_count")
        self.n_head: int = key("attention.head_count")
        self.n_head_kv: int = key("attention.head_count_kv") or self.n_head
        self.head_dim: int = key("attention.key_length") or key("embedding_length") // self.n_head
        self.eps: float = key("attention.layer_norm_rms_epsilon")
        self.freq_base: float = key("rope.freq_base") or 10000.0
        self.freq_scale: float = 1.0 / (key("rope.scaling.factor") or 1.0)

    def new_cache(self) -> Cache:
        """An empty cache."""
        empty = np.zeros((0, self.n_head_kv, self.head_dim))
        return Cache([empty] * self.n_layer, [empty] * self.n_layer, np.zeros(0))

    def forward(self, tokens: Sequence[int], cache: Cache | None = None) -> Array:
        """Logits of every token (n_tokens, n_vocab)."""
        cache = cache or self.new_cache()
        first = len(cache.positions)
        positions = np.arange(first, first + len(tokens), dtype=np.float64)
        cache.positions = np.concatenate([cache.positions, positions])
        x = self.weights["token_embd.weight"][np.asarray(tokens)]
        for il in range(self.n_layer):
            x = x + self._attention(il, self._norm(f"blk.{il}.attn_norm", x), positions, cache)
            x = x + self._feed_forward(il, self._norm(f"blk.{il}.ffn_norm", x))
        head = "output" if "output.weight" in self.weights else "token_embd"
        return self._linear(head, self._norm("output_norm", x))

    def _norm(self, name: str, x: Array) -> Array:
        scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + self.eps)
        return np.asarray(x / scale * self.weights[f"{name}.weight"])

    def _linear(self, name: str, x: Array) -> Array:
        out = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return np.asarray(out if bias is None else out + bias)

    def _rotate(self, x: Array, positions: Array) -> Array:
        """RoPE on neighbouring pairs; x is (n_tokens, n_head, head_dim)."""
        half = self.head_dim // 2
        turns = self.freq_base ** (-np.arange(half) / half) * self.freq_scale
        factors = self.weights.get("rope_freqs.weight")
        angle = positions[:, None, None] * (turns if factors is None else turns / factors)
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
        return out

    def _attention(self, il: int, x: Array, positions: Array, cache: Cache) -> Array:
        n = len(x)
        q = self._linear(f"blk.{il}.attn_q", x).reshape(n, self.n_head, self.head_dim)
        k = self._linear(f"blk.{il}.attn_k", x).reshape(n, self.n_head_kv, self.head_dim)
        v = self._linear(f"blk.{il}.attn_v", x).reshape(n, self.n_head_kv, self.head_dim)
        cache.keys[il] = np.concatenate([cache.keys[il], self._rotate(k, positions)])
        cache.values[il] = np.concatenate([cache.values[il], v])
        group = self.n_head // self.n_head_kv
        keys = np.repeat(cache.keys[il], group, axis=1)
        values = np.repeat(cache.values[il], group, axis=1)
        scores = np.einsum("qhd,khd->hqk", self._rotate(q, positions), keys) / np.sqrt(self.head_dim)
        scores = np.where(cache.positions[None, None, :] <= positions[None, :, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, values).reshape(n, -1)
        return self._linear(f"blk.{il}.attn_output", mixed)

    def _feed_forward(self, il: int, x: Array) -> Array:
        gate = self._linear(f"blk.{il}.ffn_gate", x)
        up = self._linear(f"blk.{il}.ffn_up", x)
        return self._linear(f"blk.{il}.ffn_down", gate / (1 + np.exp(-gate)) * up)
