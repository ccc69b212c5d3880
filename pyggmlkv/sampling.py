"""Picks the next token from a row of logits: greedy, or top-k, top-p and temperature in NumPy.

Knows one row of numbers; no model, no context. Upstream: the sampler chain of llama-sampling.cpp, its plain core.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggmlkv.errors import UsageError
from pyggmlkv.types import F32


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """`temp` 0 is greedy. `top_k` 0 and `top_p` 1 keep everything. `seed` None draws a new one."""

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temp >= 0.0:
            raise UsageError(f"temp is {self.temp}, expected 0 (greedy) or more", temp=self.temp)
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}, expected 0 (all tokens) or more", top_k=self.top_k)
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p is {self.top_p}, expected more than 0 and at most 1", top_p=self.top_p)


class Sampler:
    """Draws tokens by the settings; equal seeds and logits give equal tokens."""

    def __init__(self, settings: SamplerSettings | None = None) -> None:
        self.settings = settings or SamplerSettings()
        self._random = np.random.default_rng(self.settings.seed)

    def __call__(self, logits: F32) -> int:
        """The next token for `logits`, shape (n_vocab,)."""
        if self.settings.temp == 0.0:
            return int(logits.argmax())
        tokens, scores = self._candidates(logits)
        probabilities = np.exp((scores - scores[0]) / self.settings.temp, dtype=np.float64)
        return int(self._random.choice(tokens, p=probabilities / probabilities.sum()))

    def _candidates(self, logits: F32) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], F32]:
        """Tokens that pass top-k, then top-p, best first, with their logits."""
        k = min(self.settings.top_k or logits.size, logits.size)
        tokens = np.argpartition(logits, logits.size - k)[logits.size - k :]
        tokens = tokens[np.lexsort((tokens, -logits[tokens]))]
        scores = logits[tokens]
        if self.settings.top_p < 1.0:
            weights = np.exp(scores - scores[0], dtype=np.float64)
            cumulative = np.cumsum(weights) / weights.sum()
            keep = int(np.searchsorted(cumulative, self.settings.top_p)) + 1
            tokens, scores = tokens[:keep], scores[:keep]
        return tokens, scores
