"""A small model and context of every memory kind, for tests of the names that users call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pyggmlkv

N_TOKENS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A recipe and settings that give a context with this kind of memory. layer: one that has keys and values."""

    recipe: str
    settings: dict[str, Any]
    layer: int | None = 0
    n_stream: int = 1

    @property
    def is_recurrent(self) -> bool:
        """Whether a part of it holds states, which cannot forget a part of a sequence."""
        return self.recipe in ("mamba", "jamba")


KINDS = {
    "kv": Kind("llama", {"n_seq_max": 2, "kv_unified": True}),
    "streams": Kind("llama", {"n_seq_max": 2}, n_stream=2),
    "iswa": Kind("gemma3", {"n_seq_max": 2, "kv_unified": True}),
    "recurrent": Kind("mamba", {"n_seq_max": 2}, layer=None),
    "hybrid": Kind("jamba", {"n_seq_max": 2, "kv_unified": True}, layer=1),
}


@pytest.fixture(scope="session")
def model_of(tiny_model: Callable[[str], Path]) -> Iterator[Callable[[str], pyggmlkv.Model]]:
    """Loads a tiny model of a recipe, once."""
    opened: dict[str, pyggmlkv.Model] = {}

    def load(recipe: str) -> pyggmlkv.Model:
        if recipe not in opened:
            opened[recipe] = pyggmlkv.Model.load(tiny_model(recipe))
        return opened[recipe]

    yield load
    for model in opened.values():
        model.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def ctx(kind: Kind, model_of: Callable[[str], pyggmlkv.Model]) -> Iterator[pyggmlkv.Context]:
    """A context of that kind with 20 tokens of sequence 0 in its memory."""
    with pyggmlkv.Context(model_of(kind.recipe), n_ctx=64, n_threads=1, **kind.settings) as ctx:
        ctx.decode(pyggmlkv.Batch(range(N_TOKENS)))
        yield ctx
