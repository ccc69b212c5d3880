"""A pair of contexts for every kind of memory that states are taken of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.oracle.libllama import Library
from tests.oracle.tiny_models import TinyModel
from tests.side_by_side import Models, Pair
from tests.state.kinds import KINDS, Kind

OpenModels = Callable[[TinyModel], Models]


@pytest.fixture(scope="session")
def open_models(reference: Library, tiny_model: Callable[[TinyModel], Path]) -> Iterator[OpenModels]:
    """Loads a tiny model on both sides, once."""
    opened: dict[Path, Models] = {}

    def models_of(model: TinyModel) -> Models:
        path = tiny_model(model)
        if path not in opened:
            opened[path] = Models(reference, path)
        return opened[path]

    yield models_of
    for models in opened.values():
        models.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def models(kind: Kind, open_models: OpenModels) -> Models:
    return open_models(kind.model)


@pytest.fixture
def pair(kind: Kind, models: Models) -> Iterator[Pair]:
    """Two empty contexts."""
    with Pair(models, kind.setup) as opened:
        assert opened.memory_kind == kind.memory
        yield opened
