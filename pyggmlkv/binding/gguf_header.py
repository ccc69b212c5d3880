"""A bounded walk over a GGUF header, done before C sees the file: every count, length, offset and type is
checked against the bytes that are really there, in Python integers, which do not wrap.

Knows the layout only; reads no value but `general.alignment`, and no tensor data.
Upstream: gguf.cpp, gguf_init_from_reader. Differs: tensor data must lie inside the file (upstream's loader
checks that later); empty tensor names and zero bytes in names are refused; counts have a limit.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import GGUFFormatError, GGUFKeyError

MetadataValue = int | float | bool | str | list[str] | npt.NDArray[np.generic]

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMS: Final = 4
MAX_NAME: Final = 64
"""Bytes of a tensor name with its closing zero (`GGML_MAX_NAME`)."""
MAX_HEADER: Final = 1 << 28
"""Bytes before the tensor data. ggml would take 1 GiB a string; the largest headers of models are some 20 MB."""
MAX_STRINGS: Final = 1 << 22
"""Elements of an array of strings: a vocabulary has a few hundred thousand."""
MAX_COUNT: Final = 1 << 14
"""Keys, and tensors, of one file. ggml compares every name with every other; more than this is no model."""
INT64_MAX: Final = (1 << 63) - 1

VALUE_FORMAT: Final[Mapping[int, str]] = {
    0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32", 7: "bool", 8: "str", 9: "arr",
    10: "u64", 11: "i64", 12: "f64",
}  # fmt: skip
"""Value type numbers of the file format (`gguf_type_name`)."""
VALUE_SIZE: Final[Mapping[str, int]] = {
    "u8": 1, "i8": 1, "bool": 1, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "f32": 4,
    "u64": 8, "i64": 8, "f64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TypeTraits:
    """Name and block of one element type: `block_size` elements take `type_size` bytes."""

    name: str
    block_size: int
    type_size: int


TypeTable = Mapping[int, TypeTraits]


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One key: `type` is `u32`, ..., `str` or `arr`, and then `array_type` and `n` elements count."""

    index: int
    type: str
    array_type: str | None
    n: int

    @property
    def type_name(self) -> str:
        return self.type if self.array_type is None else f"arr[{self.array_type}]"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. `ne` is ggml order (4 dims); `offset` counts bytes of the data section."""

    name: str
    dtype: str
    ne: tuple[int, int, int, int]
    offset: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """NumPy order, without the closing dims of 1 that ggml pads with."""
        n = max((i + 1 for i, d in enumerate(self.ne) if d != 1), default=1)
        return tuple(reversed(self.ne[:n]))

    @property
    def n_elements(self) -> int:
        return math.prod(self.ne)


@dataclass(frozen=True, slots=True)
class Header:
    """What a checked header says. `data_offset` and `end` count bytes from the start of the file."""

    version: int
    alignment: int
    data_offset: int
    end: int
    keys: Mapping[str, KeyInfo]
    tensors: Mapping[str, TensorInfo]
    raw: bytes
    """The bytes that were checked, up to the data section: C parses these and not the file again."""


class Metadata(Mapping[str, MetadataValue]):
    """Typed values by key, in file order. An array is decoded when it is asked for, and then kept."""

    def __init__(self, keys: Mapping[str, KeyInfo], read: Callable[[KeyInfo, int], MetadataValue]) -> None:
        self._keys = keys
        self._read = read
        self._values: dict[str, MetadataValue] = {}

    def __getitem__(self, key: str) -> MetadataValue:
        if key not in self._values:
            if key not in self._keys:
                raise GGUFKeyError(f"metadata key '{key}' is not in the file", key=key)
            self._values[key] = self._read(self._keys[key], self._keys[key].n)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def type_name(self, key: str) -> str:
        """`u32`, `str`, `arr[f32]`, ... as the file has it."""
        return self._keys[key].type_name

    def first(self, key: str, n: int) -> MetadataValue:
        """A value, of an array at most the first `n` elements; the rest is not decoded."""
        if key in self._values or key not in self._keys:
            value = self[key]
            return value[:n] if isinstance(value, (list, np.ndarray)) else value
        return self._read(self._keys[key], min(n, self._keys[key].n))

    def array_length(self, key: str) -> int | None:
        """Elements of an array value, without decoding it; None for a single value."""
        info = self._keys[key]
        return info.n if info.array_type is not None else None

    def __repr__(self) -> str:
        return f"<Metadata {len(self)} keys>"


class _Cursor:
    """Reads forward in a file; the part seen so far is kept, and nothing past the end is ever asked for."""

    def __init__(self, file: io.RawIOBase, size: int, path: str) -> None:
        self.file, self.size, self.path = file, size, path
        self.buf = bytearray()
        self.pos = 0

    def error(self, message: str, **facts: object) -> GGUFFormatError:
        return GGUFFormatError(f"{self.path}: {message}", path=self.path, **facts)

    def need(self, n: int, what: str) -> int:
        """Make the next n bytes readable and return where they start."""
        end = self.pos + n
        if end > self.size:
            raise self.error(
                f"{what} needs bytes up to {end}, the file has {self.size}: truncated or corrupted",
                field=what,
                needed=end,
                size=self.size,
            )
        if end > MAX_HEADER:
            raise self.error(
                f"{what} ends at byte {end}; a header has at most {MAX_HEADER} bytes", field=what
            )
        while len(self.buf) < end:
            want = min(max(end, 2 * len(self.buf), 1 << 16), self.size) - len(self.buf)
            chunk = self.file.read(min(want, 1 << 26))
            if not chunk:
                raise self.error(f"the file became shorter while {what} was read", field=what)
            self.buf += chunk
        return self.pos

    def unpack(self, fmt: str, what: str) -> int:
        n = struct.calcsize(fmt)
        at = self.need(n, what)
        self.pos = at + n
        value: int = struct.unpack_from(fmt, self.buf, at)[0]
        return value

    def string(self, what: str) -> bytes:
        n = self.unpack("<Q", f"the length of {what}")
        at = self.need(n, what)
        self.pos = at + n
        return bytes(self.buf[at : at + n])

    def skip_strings(self, n: int, what: str) -> None:
        """Walk over n strings; a tight loop, since vocabularies have hundreds of thousands."""
        unpack = struct.Struct("<Q").unpack_from
        done = 0
        while done < n:
            buf, pos, limit = self.buf, self.pos, len(self.buf) - 8
            while done < n and pos <= limit:
                after = pos + 8 + unpack(buf, pos)[0]
                if after > limit + 8:
                    break
                pos = after
                done += 1
            self.pos = pos
            if done < n:
                length = self.unpack("<Q", f"the length of element {done} of {what}")
                self.need(length, f"element {done} of {what}")
                self.pos += length
                done += 1


def read_header(file: io.RawIOBase, size: int, path: str, types: TypeTable) -> Header:
    """Check the header of a file of `size` bytes, opened at its start.

    Raises: GGUFFormatError naming the field, key or tensor at fault.
    Upstream: gguf.cpp, gguf_init_from_reader.
    """
    cur = _Cursor(file, size, path)
    version = _read_version(cur)
    n_tensors = _read_count(cur, "tensor count")
    n_kv = _read_count(cur, "key count")
    keys, alignment = _read_keys(cur, n_kv)
    tensors = _read_tensors(cur, n_tensors, types)
    meta_end = cur.pos
    data_offset = -(-meta_end // alignment) * alignment if tensors else meta_end
    end = _check_layout(cur, tensors, data_offset, alignment)
    cur.need(data_offset - meta_end, "the padding before the tensor data")
    return Header(version, alignment, data_offset, end, keys, tensors, bytes(cur.buf[:data_offset]))


def _read_version(cur: _Cursor) -> int:
    at = cur.need(4, "the magic")
    magic = bytes(cur.buf[at : at + 4])
    if magic != MAGIC:
        raise cur.error(f"not a GGUF file: it starts with {magic!r}, expected {MAGIC!r}", magic=magic)
    cur.pos = 4
    version = cur.unpack("<I", "the version")
    if version and not version & 0xFFFF:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise cur.error(
            f"big-endian GGUF (version {swapped} with its bytes swapped); only little-endian files are read. "
            "Convert it with gguf-convert-endian of the gguf package",
            version=swapped,
        )
    if version not in VERSIONS:
        raise cur.error(f"GGUF version {version}, versions 2 and 3 are read", version=version)
    return version


def _read_count(cur: _Cursor, what: str) -> int:
    n = cur.unpack("<Q", f"the {what}")
    # no key and no tensor takes less than 13 bytes, so this is bounded by the file as well
    if n > MAX_COUNT or n * 13 > cur.size:
        raise cur.error(
            f"the {what} is {n}; the file has {cur.size} bytes, and at most {MAX_COUNT} are read", count=n
        )
    return n


def _decode_name(cur: _Cursor, raw: bytes, what: str) -> str:
    if not raw:
        raise cur.error(f"{what} has an empty name")
    if 0 in raw:
        raise cur.error(f"{what} has a zero byte in its name {raw!r}", name=raw)
    return raw.decode("utf-8", "surrogateescape")


def _read_keys(cur: _Cursor, n_kv: int) -> tuple[dict[str, KeyInfo], int]:
    keys: dict[str, KeyInfo] = {}
    alignment = DEFAULT_ALIGNMENT
    for i in range(n_kv):
        key = _decode_name(cur, cur.string(f"the name of key {i}"), f"key {i}")
        if key in keys:
            raise cur.error(f"key '{key}' is there twice (keys {keys[key].index} and {i})", key=key)
        what = f"key '{key}'"
        kind = _read_value_type(cur, what)
        start = cur.pos
        keys[key] = _read_array(cur, i, what) if kind == "arr" else _skip_value(cur, i, kind, what)
        if key == "general.alignment":
            if kind != "u32":
                raise cur.error(f"{what} must be u32, it is {keys[key].type_name}", key=key)
            alignment = int.from_bytes(cur.buf[start : start + 4], "little")
            if alignment == 0 or alignment & (alignment - 1):
                raise cur.error(f"{what} is {alignment}, it must be a power of two", key=key, value=alignment)
    return keys, alignment


def _read_value_type(cur: _Cursor, what: str) -> str:
    number = cur.unpack("<I", f"the type of {what}")
    if number not in VALUE_FORMAT:
        raise cur.error(f"{what} has the unknown value type {number}", type=number)
    return VALUE_FORMAT[number]


def _skip_value(cur: _Cursor, index: int, kind: str, what: str) -> KeyInfo:
    if kind == "str":
        n = cur.unpack("<Q", f"the length of {what}")
        cur.pos = cur.need(n, f"the value of {what}") + n
    else:
        cur.pos = cur.need(VALUE_SIZE[kind], f"the value of {what}") + VALUE_SIZE[kind]
    return KeyInfo(index, kind, None, 1)


def _read_array(cur: _Cursor, index: int, what: str) -> KeyInfo:
    kind = _read_value_type(cur, f"the elements of {what}")
    if kind == "arr":
        raise cur.error(f"{what} is an array of arrays, which GGUF readers do not take")
    n = cur.unpack("<Q", f"the length of {what}")
    least = n * VALUE_SIZE.get(kind, 8)
    if cur.pos + least > min(cur.size, MAX_HEADER) or (kind == "str" and n > MAX_STRINGS):
        raise cur.error(
            f"{what} claims {n} elements of {kind}, at least {least} bytes; {cur.size - cur.pos} are left, and "
            f"at most {MAX_STRINGS} strings and {MAX_HEADER} bytes of header are read",
            length=n,
            type=kind,
        )
    if kind == "str":
        cur.skip_strings(n, what)
    else:
        cur.pos += least
    return KeyInfo(index, "arr", kind, n)


def _read_tensors(cur: _Cursor, n_tensors: int, types: TypeTable) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for i in range(n_tensors):
        raw = cur.string(f"the name of tensor {i}")
        if len(raw) >= MAX_NAME:
            raise cur.error(
                f"the name of tensor {i} has {len(raw)} bytes, at most {MAX_NAME - 1} fit: {raw[:80]!r}",
                name=raw,
            )
        name = _decode_name(cur, raw, f"tensor {i}")
        if name in tensors:
            raise cur.error(f"tensor '{name}' is there twice", tensor=name)
        tensors[name] = _read_tensor(cur, name, types)
    return tensors


def _read_tensor(cur: _Cursor, name: str, types: TypeTable) -> TensorInfo:
    what = f"tensor '{name}'"
    n_dims = cur.unpack("<I", f"the dimension count of {what}")
    if n_dims > MAX_DIMS:
        raise cur.error(
            f"{what} has {n_dims} dimensions, at most {MAX_DIMS} are allowed", tensor=name, n_dims=n_dims
        )
    ne = [cur.unpack("<Q", f"dimension {d} of {what}") for d in range(n_dims)] + [1] * (MAX_DIMS - n_dims)
    number = cur.unpack("<I", f"the type of {what}")
    offset = cur.unpack("<Q", f"the offset of {what}")
    if max(ne) > INT64_MAX or math.prod(max(d, 1) for d in ne) >= INT64_MAX:
        raise cur.error(
            f"{what} has dimensions {ne}, more elements than 63 bits count", tensor=name, ne=tuple(ne)
        )
    if number not in types:
        raise cur.error(f"{what} has the unknown element type {number}", tensor=name, type=number)
    traits = types[number]
    if ne[0] % traits.block_size:
        raise cur.error(
            f"{what}: rows of {ne[0]} elements do not fill whole {traits.name} blocks of {traits.block_size}",
            tensor=name,
            ne=tuple(ne),
            dtype=traits.name,
        )
    a, b, c, d = ne
    return TensorInfo(
        name, traits.name, (a, b, c, d), offset, a * b * c * d // traits.block_size * traits.type_size
    )


def _check_layout(cur: _Cursor, tensors: Mapping[str, TensorInfo], data_offset: int, alignment: int) -> int:
    expected, end = 0, data_offset
    for t in tensors.values():
        if t.offset != expected:
            raise cur.error(
                f"tensor '{t.name}' is at offset {t.offset} of the data section, expected {expected}",
                tensor=t.name,
                offset=t.offset,
                expected=expected,
            )
        end = data_offset + t.offset + t.nbytes
        if end > cur.size:
            raise cur.error(
                f"tensor '{t.name}' ends at byte {end}, the file has {cur.size}: truncated or corrupted",
                tensor=t.name,
                needed=end,
                size=cur.size,
            )
        expected += -(-t.nbytes // alignment) * alignment
    return end
