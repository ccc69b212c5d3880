"""Architectures by the name that GGUF files give them; each is one module of this package, imported when asked for.

An architecture's module offers `MEMORY`, `load_hparams`, `load_weights` and `build`: see CONTRIBUTING.
Upstream: llm_arch, llama_model::load_arch.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from pyggmlkv.errors import ArchitectureError
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.memory.create import MemoryKind
from pyggmlkv.models.loading import WeightLoader

MODULES = {
    "bloom": "bloom",
    "deepseek2": "deepseek2",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gpt-oss": "gpt_oss",
    "jamba": "jamba",
    "lfm2": "lfm2",
    "llama": "llama",
    "llama4": "llama4",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "phi3": "phi3",
    "qwen2vl": "qwen2vl",
    "qwen3": "qwen3",
    "t5": "t5",
    "t5encoder": "t5encoder",
}

ENCODER_ARCHS = frozenset({"t5", "t5encoder"})
"""Architectures with an encoder."""


class Architecture(Protocol):
    """What an architecture's module offers. Its weights are its own type, opaque to everybody else."""

    MEMORY: MemoryKind

    def load_hparams(self, kv: KeyReader, hp: HParams) -> HParams: ...

    def load_weights(self, t: WeightLoader, hp: HParams) -> Any: ...

    def build(self, g: GraphBuilder, w: Any) -> None: ...


def architecture(arch: str) -> Architecture:
    """The module that implements `arch`.

    Raises:
        ArchitectureError: not implemented; the message lists what is.
    """
    name = MODULES.get(arch)
    if name is None:
        known = ", ".join(sorted(MODULES))
        raise ArchitectureError(f"architecture {arch!r} is not implemented; there are: {known}", arch=arch)
    return cast(Architecture, importlib.import_module(f"pyggmlkv.models.{name}"))
