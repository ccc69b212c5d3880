"""Case 24 across threads: what a running decode reads cannot be closed under it; contexts of one model run side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.errors import BindingError

TOKENS = np.arange(3000) % 128


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Iterator[pyggmlkv.Model]:
    with pyggmlkv.Model.load(tiny_model("llama")) as model:
        yield model


def context(model: pyggmlkv.Model) -> pyggmlkv.Context:
    return pyggmlkv.Context(model, n_ctx=4096, n_batch=4096, n_ubatch=256, n_threads=1)


class Decoding:
    """A thread that decodes until it is stopped, over and over."""

    def __init__(self, ctx: pyggmlkv.Context) -> None:
        self._ctx = ctx
        self._stop = threading.Event()
        self.running = threading.Event()
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self._ctx.memory.clear(data=False)
                self.running.set()
                self._ctx.decode(Batch(TOKENS))
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self) -> Decoding:
        self._thread.start()
        self.running.wait(30)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("what", ["model", "memory", "context"])
def test_what_a_decode_reads_cannot_be_closed_under_it(model: pyggmlkv.Model, what: str) -> None:
    ctx = context(model)
    with Decoding(ctx) as decoding:
        close = {"model": model.close, "memory": ctx.memory.close, "context": ctx.close}[what]
        refused = 0
        for _ in range(2000):  # between two ubatches nothing runs: a close may come through there
            try:
                close()
                break
            except BindingError as error:
                assert "while C code is running" in str(error)
                refused += 1
    assert refused or decoding.errors
    ctx.close()
    ctx.close()


def test_contexts_of_one_model_decode_side_by_side(model: pyggmlkv.Model) -> None:
    with context(model) as alone:
        alone.decode(Batch(TOKENS))
        wanted = alone.logits
    contexts = [context(model) for _ in range(2)]
    threads = [threading.Thread(target=ctx.decode, args=(Batch(TOKENS),)) for ctx in contexts]
    for thread in threads:
        thread.start()
    context(model).close()
    for thread in threads:
        thread.join()
    for ctx in contexts:
        np.testing.assert_array_equal(ctx.logits, wanted)
        ctx.close()
