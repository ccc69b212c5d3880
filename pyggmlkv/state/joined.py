"""One bytes object out of many pieces, as `b"".join` makes it; large ones get huge pages first.

A fresh block of 34 MB has 8,600 small pages, and their faults cost three times what the copy does. NumPy asks for huge
pages for its own arrays, Python does not for bytes. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

from pyggmlkv.state.parts import Buffer

LARGE = 4 << 20
"""Bytes from which on huge pages are asked for."""
PAGE = 4096
MADV_HUGEPAGE = 14
"""Linux only; madvise(2)."""


def joined(pieces: Sequence[Buffer]) -> bytes:
    """The pieces in one."""
    n = sum(piece.nbytes if isinstance(piece, memoryview) else len(piece) for piece in pieces)
    if n < LARGE or sys.platform != "linux" or sys.implementation.name != "cpython":
        return b"".join(pieces)
    new, address_of = ctypes.pythonapi.PyBytes_FromStringAndSize, ctypes.pythonapi.PyBytes_AsString
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
    address_of.restype, address_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)
    out: bytes = new(None, n)
    address: int = address_of(out)
    first = -(-address // PAGE) * PAGE
    # refused by a kernel without huge pages, which costs nothing
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(first), ctypes.c_size_t((address + n - first) // PAGE * PAGE), MADV_HUGEPAGE
    )
    # filled before anybody else sees it, as CPython's own constructors do
    target = memoryview((ctypes.c_char * n).from_address(address)).cast("B")
    at = 0
    for piece in pieces:
        end = at + len(piece)
        target[at:end] = piece
        at = end
    return out
