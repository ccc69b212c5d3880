"""Attention rotation: which Hadamard matrix spreads quantised K and V rows, and whether one does.

Pure NumPy; graphs apply the matrix.  Upstream: llama-kv-cache.cpp, ggml_gen_hadamard, build_input_k_rot / _v_rot.
"""

from __future__ import annotations

import os

import numpy as np

from pyggmlkv.memory.config import KVSpec
from pyggmlkv.types import F32

MIN_BLOCK = 64
"""Elements of the smallest block that is rotated; heads that it does not divide are left alone."""


def hadamard(n: int) -> F32:
    """The orthonormal Walsh-Hadamard matrix (n, n) f32; `n` a power of two. It is symmetric and its own inverse."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"hadamard: {n} is not a power of two")
    h = np.full((1, 1), np.float32(1.0 / np.sqrt(np.float32(n))), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return np.ascontiguousarray(h)


def block_size(head_dim: int) -> int:
    """Largest power of two that divides `head_dim`, 0 (no rotation) if that is below 64 elements."""
    block = head_dim & -head_dim
    return block if block >= MIN_BLOCK else 0


def _wanted(asked: bool | None, quantised: bool) -> bool:
    if asked is not None:
        return asked and quantised
    off = os.environ.get("LLAMA_ATTN_ROT_DISABLE", "0").strip()
    return quantised and (not off.lstrip("-").isdigit() or int(off) == 0)


def rotations(spec: KVSpec, quantised_k: bool, quantised_v: bool) -> tuple[F32 | None, F32 | None]:
    """The matrices for K and for V, each None where that side is not rotated.

    A side is rotated when its type is quantised, all its heads are equally wide and 64 divides that width; V always
    in blocks of 64. A latent (MLA) cache has no V and is never rotated: its K is read as V too.
    """
    if any(not layer.has_v for layer in spec.layers):
        return None, None
    heads_k = {layer.head_dim_k for layer in spec.layers}
    heads_v = {layer.head_dim_v for layer in spec.layers}
    k = v = None
    if len(heads_k) == 1 and _wanted(spec.attn_rot, quantised_k) and (n := block_size(heads_k.pop())):
        k = hadamard(n)
    if len(heads_v) == 1 and _wanted(spec.attn_rot, quantised_v) and block_size(heads_v.pop()):
        v = hadamard(MIN_BLOCK)
    return k, v
