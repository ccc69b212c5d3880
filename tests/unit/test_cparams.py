"""Cells a stream: rounded as llama.cpp rounds them, but small contexts stay as asked."""

from __future__ import annotations

import pytest

from pyggmlkv.cparams import cells_per_stream


@pytest.mark.parametrize(
    ("n_ctx", "n_streams", "cells"),
    [
        (16, 1, 16), (64, 4, 16), (128, 1, 128), (255, 1, 255), (3, 8, 1),
        (256, 1, 256), (257, 1, 512), (512, 2, 256), (512, 3, 256), (768, 3, 256), (1024, 3, 512), (1000, 2, 512),
    ],
)  # fmt: skip
def test_streams_of_larger_contexts_hold_a_multiple_of_256(n_ctx: int, n_streams: int, cells: int) -> None:
    assert cells_per_stream(n_ctx, n_streams) == cells
