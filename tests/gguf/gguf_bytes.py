"""Hand-made GGUF files, so that every field can be wrong. Independent of pyggmlkv and of `gguf`."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
FORMATS = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?",
    U64: "Q", I64: "q", F64: "d",
}  # fmt: skip


def string(raw: bytes, order: str = "<") -> bytes:
    return struct.pack(order + "Q", len(raw)) + raw


def value(kind: int, v: object, order: str = "<") -> bytes:
    """A value without its type."""
    if kind == STR:
        assert isinstance(v, bytes)
        return string(v, order)
    return struct.pack(order + FORMATS[kind], v)


def scalar(key: bytes, kind: int, v: object, order: str = "<") -> bytes:
    return string(key, order) + struct.pack(order + "I", kind) + value(kind, v, order)


def array(key: bytes, kind: int, vs: list[object], order: str = "<") -> bytes:
    head = string(key, order) + struct.pack(order + "IIQ", ARR, kind, len(vs))
    return head + b"".join(value(kind, v, order) for v in vs)


@dataclass
class TensorEntry:
    """One line of the tensor table; `data` is written where the layout says, whatever `offset` claims."""

    name: bytes
    ne: tuple[int, ...]
    type: int = 0
    offset: int | None = None
    n_dims: int | None = None
    data: bytes = b""

    def head(self, offset: int, order: str = "<") -> bytes:
        n_dims = len(self.ne) if self.n_dims is None else self.n_dims
        dims = b"".join(struct.pack(order + "Q", d) for d in self.ne)
        at = offset if self.offset is None else self.offset
        return (
            string(self.name, order)
            + struct.pack(order + "I", n_dims)
            + dims
            + struct.pack(order + "IQ", self.type, at)
        )


@dataclass
class FileBytes:
    """A whole file; the counts can lie."""

    keys: list[bytes] = field(default_factory=list)
    tensors: list[TensorEntry] = field(default_factory=list)
    version: int = 3
    n_kv: int | None = None
    n_tensors: int | None = None
    alignment: int = 32
    order: str = "<"
    magic: bytes = b"GGUF"

    def build(self) -> bytes:
        o = self.order
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_kv = len(self.keys) if self.n_kv is None else self.n_kv
        out = self.magic + struct.pack(o + "IQQ", self.version, n_tensors, n_kv) + b"".join(self.keys)
        offset = 0
        for t in self.tensors:
            out += t.head(offset, o)
            offset += self._padded(len(t.data))
        out += b"\0" * (self._padded(len(out)) - len(out))
        return out + b"".join(
            t.data + b"\0" * (self._padded(len(t.data)) - len(t.data)) for t in self.tensors
        )

    def _padded(self, n: int) -> int:
        return -(-n // self.alignment) * self.alignment


def f32_tensor(name: bytes, *ne: int) -> TensorEntry:
    n = 1
    for d in ne:
        n *= d
    return TensorEntry(name, ne, 0, data=struct.pack(f"<{n}f", *range(n)))


def tiny() -> FileBytes:
    """A valid file with every kind of value, and two tensors."""
    scalars = [
        scalar(b"general.architecture", STR, b"llama"),
        scalar(b"a.u8", U8, 200),
        scalar(b"a.i8", I8, -5),
        scalar(b"a.u16", U16, 60000),
        scalar(b"a.i16", I16, -300),
        scalar(b"a.u32", U32, 4_000_000_000),
        scalar(b"a.i32", I32, -70000),
        scalar(b"a.u64", U64, 2**63 + 1),
        scalar(b"a.i64", I64, -(2**62)),
        scalar(b"a.f32", F32, 0.5),
        scalar(b"a.f64", F64, 0.1),
        scalar(b"a.bool", BOOL, True),
    ]
    arrays = [
        array(b"b.u8", U8, [1, 2, 255]),
        array(b"b.i32", I32, [-1, 2, 3]),
        array(b"b.u64", U64, [2**63]),
        array(b"b.f32", F32, [0.5, 0.25]),
        array(b"b.bool", BOOL, [True, False, True]),
        array(b"b.str", STR, [b"one", b"", "drei \u00e9".encode()]),
        array(b"b.empty", F64, []),
    ]
    return FileBytes(scalars + arrays, [f32_tensor(b"t.weight", 4, 3), f32_tensor(b"u.weight", 8)])
