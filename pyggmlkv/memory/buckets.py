"""T5's relative position buckets: small distances one by one, larger ones by their logarithm.

A table over distances is made once per setting; filling is one lookup. Knows nothing of attention.
Upstream: llama-graph.cpp, llama_relative_position_bucket; llama-kv-cache.cpp, set_input_pos_bucket.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.errors import CacheError
from pyggmlkv.memory.cells import Cells
from pyggmlkv.types import I32

MAX_DISTANCE = 128
"""Positions; every larger distance falls into the last bucket."""


@functools.lru_cache(maxsize=8)
def _table(n_buckets: int) -> I32:
    """Bucket of each distance 0 .. MAX_DISTANCE. The steps of float and double are upstream's."""
    max_exact = n_buckets // 2
    if not 1 <= max_exact < MAX_DISTANCE:
        raise CacheError(
            f"position buckets: {n_buckets} per direction given, 2 to {2 * MAX_DISTANCE - 1} expected",
            n_buckets=n_buckets,
        )
    table = np.arange(MAX_DISTANCE + 1, dtype=np.int32)
    for distance in range(max_exact, MAX_DISTANCE + 1):
        log = np.float32(math.log(np.float32(distance / max_exact))) * np.float32(n_buckets - max_exact)
        step = np.float32(max_exact + float(log) / math.log(MAX_DISTANCE / max_exact))
        table[distance] = min(math.floor(step), n_buckets - 1)
    table.flags.writeable = False
    return table


def relative_position_bucket(key: int, query: int, n_buckets: int, bidirectional: bool) -> int:
    """Bucket of a key's position as seen from a query's.  Raises: CacheError for a count out of range."""
    distance = key - query
    if not bidirectional:
        return int(_table(n_buckets)[min(max(-distance, 0), MAX_DISTANCE)])
    half = n_buckets // 2
    return int(_table(half)[min(abs(distance), MAX_DISTANCE)]) + (half if distance > 0 else 0)


def fill_pos_bucket(out: I32, cells: Cells, ubatch: UBatch, n_buckets: int) -> None:
    """Buckets of the first n_kv cells as seen from the tokens: `out` [n_kv, n_tokens] i32.

    Later keys share bucket 0; empty cells count as position -1 and are masked anyway.
    """
    pos = ubatch.pos[0]
    rows = out.reshape(pos.size, -1)
    distance = pos[:, None] - cells.pos[: rows.shape[1]]
    rows[...] = _table(n_buckets)[np.clip(distance, 0, MAX_DISTANCE, out=distance)]


def fill_pos_bucket_no_cache(out: I32, ubatch: UBatch, n_buckets: int) -> None:
    """Bidirectional buckets of tokens as seen from tokens: `out` [n_tokens, n_tokens] i32."""
    pos = ubatch.pos[0]
    rows = out.reshape(pos.size, pos.size)
    half = n_buckets // 2
    distance = pos[None, :] - pos[:, None]
    rows[...] = _table(half)[np.minimum(np.abs(distance), MAX_DISTANCE)]
    rows += np.int32(half) * (distance > 0)
