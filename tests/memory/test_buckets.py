"""T5's position buckets against the formula."""

from __future__ import annotations

import numpy as np
import pytest

from pyggmlkv.errors import CacheError
from pyggmlkv.memory import buckets
from pyggmlkv.memory.cells import Cells
from tests.memory.ubatches import ubatch
from tests.oracle.mask_naive import bucket


@pytest.mark.parametrize("bidirectional", [False, True], ids=["decoder", "encoder"])
@pytest.mark.parametrize("n_buckets", [32, 64, 20])
def test_bucket_equals_the_formula_at_every_distance(n_buckets: int, bidirectional: bool) -> None:
    for distance in range(-400, 401):
        key, query = max(distance, 0), max(-distance, 0)
        assert buckets.relative_position_bucket(key, query, n_buckets, bidirectional) == bucket(
            key, query, n_buckets, bidirectional
        ), distance


@pytest.mark.parametrize(
    ("distance", "want"),
    [(0, 0), (15, 15), (16, 16), (20, 17), (40, 23), (90, 29), (127, 31), (128, 31), (9999, 31)],
)
def test_decoder_buckets_of_32(distance: int, want: int) -> None:
    assert buckets.relative_position_bucket(0, distance, 32, False) == want


def test_cached_buckets_follow_cell_positions_and_count_empty_cells_as_minus_one() -> None:
    cells = Cells(6, 1)
    cells.put(np.array([0, 2, 5]), np.array([40, 3, 300], np.int32), np.ones((1, 3), np.uint64))
    tokens = ubatch([(41, 0), (299, 0)], 1)
    out = np.full((2, 6), -7, np.int32)
    buckets.fill_pos_bucket(out, cells, tokens, 32)
    keys = [40, -1, 3, -1, -1, 300]
    assert out.tolist() == [[bucket(key, query, 32, False) for key in keys] for query in (41, 299)]


def test_cached_buckets_fill_only_the_first_n_kv_cells() -> None:
    cells = Cells(6, 1)
    cells.put(np.array([0, 1]), np.array([0, 1], np.int32), np.ones((1, 2), np.uint64))
    out = np.zeros(4, np.int32)
    buckets.fill_pos_bucket(out, cells, ubatch([(5, 0)], 1), 32)
    assert out.tolist() == [5, 4, 6, 6]


def test_encoder_buckets_tell_the_two_directions_apart() -> None:
    pos = [0, 1, 9, 200]
    out = np.zeros((4, 4), np.int32)
    buckets.fill_pos_bucket_no_cache(out, ubatch([(p, 0) for p in pos], 1), 32)
    assert out.tolist() == [[bucket(key, query, 32, True) for key in pos] for query in pos]
    assert out[0, 1] != out[1, 0]


@pytest.mark.parametrize("n_buckets", [0, 1, 256, 1000])
def test_bucket_count_out_of_range_is_refused(n_buckets: int) -> None:
    with pytest.raises(CacheError, match="expected"):
        buckets.relative_position_bucket(0, 1, n_buckets, False)
