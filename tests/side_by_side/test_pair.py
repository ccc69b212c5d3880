"""The comparison itself: one bit, one row, one refusal or one state byte of difference is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import pyggmlkv
from tests.oracle.libllama import Library
from tests.side_by_side import Comparison, Models, Pair, Setup

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def models(reference: Library, tiny_model: Callable[[str], Path]) -> Iterator[Models]:
    with Models(reference, tiny_model("llama")) as opened:
        yield opened


@pytest.fixture
def pair(models: Models) -> Iterator[Pair]:
    with Pair(models, Setup()) as opened:
        opened.decode([1, 2, 3])
        yield opened


def test_equal_rows_are_equal() -> None:
    found = Comparison()
    found.add(ROWS.copy(), ROWS, "rows")
    assert (found.rows, found.bits_equal, found.max_abs_diff, found.nmse) == (3, True, 0.0, 0.0)


def test_one_bit_is_noticed_and_located() -> None:
    found, other = Comparison(), ROWS.copy()
    other[2, 1] = np.nextafter(other[2, 1], np.float32(100))
    found.add(other, ROWS, "rows")
    assert not found.bits_equal
    assert 0 < found.max_abs_diff < 1e-5
    assert "1 of 3 rows differ, the first is row [2]" in found.first_difference


def test_a_zero_of_the_other_sign_is_noticed() -> None:
    found = Comparison()
    found.add(-np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32), "rows")
    assert not found.bits_equal


def test_missing_rows_are_noticed() -> None:
    found = Comparison()
    found.add(ROWS[:2], ROWS, "rows")
    assert "shape (2, 4), the reference has (3, 4)" in found.first_difference


def test_another_history_is_noticed(pair: Pair) -> None:
    pair.ours.decode(pyggmlkv.Batch([9]))
    pair.reference.decode([8])
    pair.decode([4])
    assert not pair.comparison.bits_equal


def test_a_refusal_on_one_side_is_noticed(pair: Pair) -> None:
    pair.reference.decode([8])
    pair.decode([4], pos=[4])
    assert not pair.comparison.bits_equal
    assert "the reference says ok, we say" in pair.comparison.first_difference


def test_another_answer_of_the_memory_is_noticed(pair: Pair) -> None:
    pair.reference.memory.seq_rm(0, 2, None)
    pair.compare_positions(1)
    assert "seq_pos_max(0,): the reference says 1, we say 2" in pair.comparison.first_difference
