"""Fixtures that everybody uses: the reference libllama, tiny random models, the pinned real models.

Nothing here is skipped silently: a reference that cannot be built, or a model that cannot be fetched, is an
error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.oracle.libllama import Library, load
from tests.oracle.tiny_models import TinyModel, write

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD_SECONDS = 1800
TinyModels = Callable[[str | TinyModel], Path]


class ReferenceMissing(Exception):
    """The reference could not be built; tests that need it fail with this."""


@pytest.fixture(scope="session")
def reference_module() -> Path:
    """The compiled oracle module; built first where it is missing (`make reference` does the same)."""
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "build_reference.py"), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_SECONDS,
    )
    if done.returncode:
        raise ReferenceMissing(f"scripts/build_reference.py failed; run `make reference`.\n{done.stderr}")
    return Path(json.loads(done.stdout)["module"])


@pytest.fixture(scope="session")
def reference(reference_module: Path) -> Library:
    """The reference libllama, in this process, on the package's own libggml."""
    return load(reference_module)


@pytest.fixture(scope="session")
def tiny_model(reference: Library, tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Writes a tiny random model, once a session, and gives its path: by recipe name or as a TinyModel."""
    folder = tmp_path_factory.mktemp("tiny-models")

    def path_of(model: str | TinyModel) -> Path:
        return write(reference, TinyModel(model) if isinstance(model, str) else model, folder)

    return path_of


def pinned_model(name: str, variable: str) -> Path:
    """A pinned model's file: from an environment variable, else fetched into the cache folder."""
    if given := os.environ.get(variable):
        return Path(given)
    from pyggmlkv.fetch import fetch

    return fetch(name)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1 (`PYGGMLKV_SMOLLM2` names another copy)."""
    return pinned_model("smollm2-135m", "PYGGMLKV_SMOLLM2")


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    """Gemma-3-270M Q4_K_M (`PYGGMLKV_GEMMA3` names another copy)."""
    return pinned_model("gemma3-270m", "PYGGMLKV_GEMMA3")
