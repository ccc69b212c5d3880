"""llama.cpp's memory layer, scriptable from Python, on real ggml graphs.

Names load on first use: the pure modules import without the C library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyggmlkv.batch import Batch as Batch
    from pyggmlkv.context import Context as Context
    from pyggmlkv.memory.config import KVSpec as KVSpec
    from pyggmlkv.memory.config import LayerSpec as LayerSpec
    from pyggmlkv.memory.config import RopeSpec as RopeSpec
    from pyggmlkv.memory.hybrid import HybridMemory as HybridMemory
    from pyggmlkv.memory.kv.cache import KVCache as KVCache
    from pyggmlkv.memory.kv.shared import SharedKVCache as SharedKVCache
    from pyggmlkv.memory.kv.shared import SharedSlidingKVCache as SharedSlidingKVCache
    from pyggmlkv.memory.recurrent.memory import RecurrentMemory as RecurrentMemory
    from pyggmlkv.memory.recurrent.memory import RecurrentSpec as RecurrentSpec
    from pyggmlkv.memory.sliding import SlidingKVCache as SlidingKVCache
    from pyggmlkv.memory.standalone import plan as plan
    from pyggmlkv.model import Model as Model

_HOMES: dict[str, str] = {
    "Batch": "pyggmlkv.batch",
    "Context": "pyggmlkv.context",
    "HybridMemory": "pyggmlkv.memory.hybrid",
    "KVCache": "pyggmlkv.memory.kv",
    "KVSpec": "pyggmlkv.memory.config",
    "LayerSpec": "pyggmlkv.memory.config",
    "Model": "pyggmlkv.model",
    "RecurrentMemory": "pyggmlkv.memory.recurrent.memory",
    "RecurrentSpec": "pyggmlkv.memory.recurrent.memory",
    "RopeSpec": "pyggmlkv.memory.config",
    "SharedKVCache": "pyggmlkv.memory.kv.shared",
    "SharedSlidingKVCache": "pyggmlkv.memory.kv.shared",
    "SlidingKVCache": "pyggmlkv.memory.sliding",
    "errors": "",
    "plan": "pyggmlkv.memory.standalone",
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
