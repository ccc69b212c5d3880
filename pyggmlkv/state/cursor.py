"""A reading position in untrusted bytes: every number and slice is checked against what is left before it is taken.

Knows nothing of the format but its scalars, which are in host byte order as upstream writes them from memory.
Upstream: llama-io.h, llama_io_read_i.
"""

from __future__ import annotations

import struct
from typing import NoReturn

from pyggmlkv.errors import StateError

_U32, _I32, _U64 = struct.Struct("=I"), struct.Struct("=i"), struct.Struct("=Q")


class Cursor:
    """Reads forward through `data`; `where` names the part being read and leads every message."""

    __slots__ = ("data", "end", "offset", "where")

    def __init__(self, data: memoryview, offset: int = 0) -> None:
        self.data = data
        self.offset = offset
        self.end = len(data)
        self.where = "state"

    @property
    def left(self) -> int:
        """Bytes not yet read."""
        return self.end - self.offset

    def fail(self, field: str, expected: object, found: object, at: int | None = None) -> NoReturn:
        """Raises: StateError, naming the field, what was expected, what was found and the byte offset."""
        offset = self.offset if at is None else at
        raise StateError(
            f"{self.where}: {field}: found {found}, expected {expected} (byte {offset})",
            field=f"{self.where}: {field}",
            expected=expected,
            found=found,
            offset=offset,
        )

    def need(self, nbytes: int, field: str) -> None:
        """Checks that `nbytes` are left."""
        if nbytes > self.left:
            self.fail(field, f"{nbytes} bytes", f"{self.left} bytes, the data is cut off")

    def take(self, nbytes: int, field: str) -> memoryview:
        """The next bytes, not copied."""
        self.need(nbytes, field)
        view = self.data[self.offset : self.offset + nbytes]
        self.offset += nbytes
        return view

    def u32(self, field: str) -> int:
        return self._number(_U32, field)

    def i32(self, field: str) -> int:
        return self._number(_I32, field)

    def u64(self, field: str) -> int:
        return self._number(_U64, field)

    def _number(self, kind: struct.Struct, field: str) -> int:
        self.need(kind.size, field)
        value: int = kind.unpack_from(self.data, self.offset)[0]
        self.offset += kind.size
        return value

    def equal(self, found: int, expected: int, field: str, width: int = 4) -> None:
        """Checks a number of `width` bytes that was just read."""
        if found != expected:
            self.fail(field, expected, found, at=self.offset - width)

    def count(self, most: int, item_bytes: int, field: str) -> int:
        """Reads a u32 count of items of at least `item_bytes` each; it must fit a limit and the bytes left."""
        n = self.u32(field)
        if n > most:
            self.fail(field, f"at most {most}", n, at=self.offset - 4)
        if n * item_bytes > self.left:
            self.fail(
                field,
                f"at most {self.left // item_bytes}, as {self.left} bytes are left",
                n,
                at=self.offset - 4,
            )
        return n

    def finish(self) -> None:
        """Checks that nothing is left."""
        if self.left:
            self.fail("end", "no further bytes", f"{self.left} bytes more")
