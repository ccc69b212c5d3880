"""llama.cpp's memory layer, scriptable from Python, on real ggml graphs.

Names load on first use: the pure modules import without the C library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyggmlkv.batch import Batch as Batch
    from pyggmlkv.context import Context as Context
    from pyggmlkv.memory.kv import KVCache as KVCache
    from pyggmlkv.model import Model as Model

_HOMES: dict[str, str] = {
    "Batch": "pyggmlkv.batch",
    "Context": "pyggmlkv.context",
    "KVCache": "pyggmlkv.memory.kv",
    "Model": "pyggmlkv.model",
    "errors": "",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name) if home else import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOMES))
