"""The example in KVCache's docstring runs as it stands, and does what it says."""

from __future__ import annotations

import inspect
import re

import numpy as np

import pyggmlkv
from tests.oracle.rope_naive import turned


def example() -> str:
    found = re.search(r"```python\n(.*?)```", inspect.getdoc(pyggmlkv.KVCache) or "", re.DOTALL)
    assert found
    return inspect.cleandoc("\n" + found[1])


def test_example_is_at_most_30_lines() -> None:
    assert len(example().splitlines()) <= 30


def test_example_writes_shifts_defragments_and_reads_back() -> None:
    names: dict = {}
    exec(example(), names)
    rows, pos = names["rows"].astype(np.float16), names["pos"]
    assert sorted(pos.tolist()) == [0, 1, 2, 3, 4]
    before = np.where(pos < 2, pos, pos + 3)  # where each key was computed
    assert (names["v"].reshape(5, 2, 64) == rows[before]).all()
    keys = names["k"].reshape(5, 2, 64).astype(np.float32)
    want = turned(rows[before].astype(np.float32), pos - before)
    np.testing.assert_allclose(keys, want, atol=2e-3)
    assert np.abs(keys[pos >= 2] - rows[before[pos >= 2]]).max() > 0.1
    report = names["report"]
    assert (report.n_cells, report.done, report.fragmentation_after) == (3, True, 0.0)
