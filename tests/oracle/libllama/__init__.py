"""The reference libllama, in this process, on the same libggml as the package under test.

Imports nothing of pyggmlkv but `pyggmlkv._ggml`, and that only so that its ggml libraries are the ones in the
process. Names and defaults are llama.cpp's. Built by scripts/build_reference.py.
"""

from .context import DecodeError, RefContext
from .library import Library, OracleError, load
from .memory import Cells, RefMemory
from .model import RefModel
from .params import ContextParams

__all__ = [
    "Cells",
    "ContextParams",
    "DecodeError",
    "Library",
    "OracleError",
    "RefContext",
    "RefMemory",
    "RefModel",
    "load",
]
