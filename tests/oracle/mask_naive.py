"""Masks entry by entry, and T5 buckets by the formula: from positions and sequence sets only.

Written from the rules, imports nothing of pyggmlkv.
"""

from __future__ import annotations

import math
import struct


def is_masked(swa_type, n_swa, pos_key, pos_query):
    """Whether the window hides the key."""
    if swa_type == "standard":
        return pos_query - pos_key >= n_swa
    if swa_type == "chunked":
        return pos_key // n_swa < pos_query // n_swa
    if swa_type == "symmetric":
        return abs(pos_query - pos_key) > n_swa // 2
    return False


def mask_entry(key, query, causal=True, swa=("none", 0), alibi=False):
    """`key` is None or (pos, ids, (x, y)); `query` is (pos, id, (x, y) or None)."""
    pos, seq, place = query
    if key is None or seq not in key[1]:
        return -math.inf
    if causal and key[0] > pos:
        return -math.inf
    if causal and place is not None and key[0] == pos:
        (x, y), (qx, qy) = key[2], place
        if (y, x) > (qy, qx):
            return -math.inf
    if is_masked(*swa, key[0], pos):
        return -math.inf
    return float(-abs(key[0] - pos)) if alibi else 0.0


def _f32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def bucket(key, query, n_buckets, bidirectional, max_distance=128):
    """T5's rule, with the roundings of a float logarithm."""
    base, distance = 0, key - query
    if bidirectional:
        n_buckets //= 2
        base = n_buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = n_buckets // 2
    if distance < exact:
        return base + distance
    log = _f32(_f32(math.log(_f32(distance / exact))) * (n_buckets - exact))
    large = math.floor(_f32(exact + log / math.log(max_distance / exact)))
    return base + min(large, n_buckets - 1)
