"""RoPE in NumPy, adjacent pairs ("normal") or halves ("neox"), for keys turned by a change of position."""

from __future__ import annotations

import numpy as np


def turned(
    rows: np.ndarray,
    delta: np.ndarray,
    freq_base: float = 10000.0,
    n_rot: int | None = None,
    neox: bool = False,
) -> np.ndarray:
    """`rows` (n, n_head, head_dim) turned by `delta` (n,) positions, computed in f64."""
    n = rows.shape[-1] if n_rot is None else n_rot
    angle = np.asarray(delta, np.float64)[:, None] * freq_base ** (-np.arange(0, n, 2) / n)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out = rows.astype(np.float64)
    first, second = (
        (slice(0, n // 2), slice(n // 2, n)) if neox else (slice(0, n, 2), slice(1, n, 2))
    )  # pairs
    x, y = rows[..., first].astype(np.float64), rows[..., second].astype(np.float64)
    out[..., first], out[..., second] = x * cos - y * sin, x * sin + y * cos
    return out
