"""Random scripts over every kind of memory: after every step the package holds what the reference holds, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.oracle.libllama import Library
from tests.oracle.tiny_models import TinyModel
from tests.random_scripts.kinds import KINDS
from tests.random_scripts.soak import run_kind

N_SHORT, SHORT = 40, 12
N_LONG, LONG = 500, 24
FIRST_LONG = 1000
"""Long scripts have other numbers, and so other seeds, than the short ones."""


@pytest.mark.parametrize("kind", KINDS)
def test_forty_scripts_are_equal(
    reference: Library, tiny_model: Callable[[TinyModel], Path], kind: str
) -> None:
    tally = run_kind(reference, tiny_model, kind, range(N_SHORT), SHORT)
    assert not tally.failures, "\n" + tally.failures[0]
    assert tally.n_scripts == N_SHORT and tally.n_rows > 0 and tally.n_refused > 0 and tally.n_loads > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_five_hundred_long_scripts_are_equal(
    reference: Library, tiny_model: Callable[[TinyModel], Path], kind: str
) -> None:
    tally = run_kind(reference, tiny_model, kind, range(FIRST_LONG, FIRST_LONG + N_LONG), LONG)
    assert not tally.failures, "\n" + tally.failures[0]
    assert tally.n_scripts == N_LONG
