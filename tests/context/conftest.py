"""A tiny llama for tests of the context itself; none of them needs the reference at run time but to write it once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pyggmlkv


@pytest.fixture(scope="session")
def llama_path(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def model(llama_path: Path) -> Iterator[pyggmlkv.Model]:
    with pyggmlkv.Model.load(llama_path) as model:
        yield model
