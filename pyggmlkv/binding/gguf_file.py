"""`GGUFFile`: one GGUF file, its metadata and tensor table. A header check in Python comes first, then ggml's
reader parses exactly the bytes that were checked; tensor data stay in the file.

Knows no model. Bytes that are not UTF-8 are kept as surrogate escapes; a string ends at its first zero byte,
as for every user of ggml's functions. Upstream: gguf.h, gguf_init_from_buffer and the gguf_get_* functions.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.errors import GGUFError, GGUFFormatError

from .dtypes import BY_NUMBER, dtype_info
from .gguf_header import Header, KeyInfo, Metadata, MetadataValue, TensorInfo, TypeTraits, read_header
from .handle import Owner

__all__ = ["GGUFFile", "Metadata", "MetadataValue", "TensorInfo", "validate_row_data"]

_TYPES: Final[Mapping[int, TypeTraits]] = MappingProxyType(
    {number: TypeTraits(info.name, info.block_size, info.type_size) for number, info in BY_NUMBER.items()}
)
_SCALARS: Final[Mapping[str, Callable[[Any, int], Any]]] = MappingProxyType(
    {
        "u8": lib.gguf_get_val_u8,
        "i8": lib.gguf_get_val_i8,
        "u16": lib.gguf_get_val_u16,
        "i16": lib.gguf_get_val_i16,
        "u32": lib.gguf_get_val_u32,
        "i32": lib.gguf_get_val_i32,
        "u64": lib.gguf_get_val_u64,
        "i64": lib.gguf_get_val_i64,
        "f32": lib.gguf_get_val_f32,
        "f64": lib.gguf_get_val_f64,
        "bool": lib.gguf_get_val_bool,
    }
)
_NUMPY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "u8": "u1",
        "i8": "i1",
        "u16": "<u2",
        "i16": "<i2",
        "u32": "<u4",
        "i32": "<i4",
        "u64": "<u8",
        "i64": "<i8",
        "f32": "<f4",
        "f64": "<f8",
        "bool": "?",
    }
)


def _open_regular(path: str) -> io.FileIO:
    """An unbuffered file object; anything but a regular file is refused before it is opened."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise GGUFFormatError(f"{path}: not a regular file", path=path)
        return open(path, "rb", buffering=0)
    except OSError as e:
        raise GGUFError(f"{path}: cannot be opened: {e.strerror}", path=path, errno=e.errno) from e


class _Context(Owner):
    """ggml's parsed header, from which metadata values are read; it may outlive the open file."""

    def __init__(self, handle: Any) -> None:
        self._own(handle, lib.gguf_free)

    def read(self, info: KeyInfo, n: int) -> MetadataValue:
        """A single value, or the first `n` elements of an array."""
        handle, i = self._pointer, info.index
        if info.array_type is None:
            if info.type == "str":
                return _decode(lib.gguf_get_val_str(handle, i))
            value: int | float | bool = _SCALARS[info.type](handle, i)
            return value
        if info.array_type == "str":
            get, string = lib.gguf_get_arr_str, ffi.string
            texts: list[str] = [
                string(get(handle, i, j)).decode("utf-8", "surrogateescape") for j in range(n)
            ]
            return texts
        dtype = np.dtype(_NUMPY[info.array_type])
        if not n:
            return np.empty(0, dtype)
        data = ffi.buffer(lib.gguf_get_arr_data(handle, i), n * dtype.itemsize)
        array = np.frombuffer(data, np.uint8) != 0 if dtype.kind == "b" else np.frombuffer(data, dtype).copy()
        array.flags.writeable = False
        return array


def _parse(header: Header, path: str) -> _Context:
    params = ffi.new("struct gguf_init_params *", {"no_alloc": True, "ctx": ffi.NULL})
    handle = lib.gguf_init_from_buffer(ffi.from_buffer(header.raw), len(header.raw), params[0])
    if handle == ffi.NULL:
        raise GGUFFormatError(f"{path}: ggml refused the header; its log says why", path=path)
    context = _Context(handle)
    same = (
        lib.gguf_get_n_kv(handle) == len(header.keys)
        and lib.gguf_get_n_tensors(handle) == len(header.tensors)
        and lib.gguf_get_data_offset(handle) == header.data_offset
    )
    if not same:
        context.close()
        raise GGUFFormatError(f"{path}: ggml reads the header differently", path=path)
    return context


class GGUFFile(Owner):
    """One open GGUF file.

    Raises: GGUFFormatError for anything but a whole, well-formed GGUF file; GGUFError if it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        file = _open_regular(self.path)
        try:
            self.nbytes = os.fstat(file.fileno()).st_size
            header = read_header(file, self.nbytes, self.path, _TYPES)
            self._context = _parse(header, self.path)
        except BaseException:
            file.close()
            raise
        self._own(file, io.FileIO.close, parents=(self._context,))
        self.version: int = header.version
        self.alignment: int = header.alignment
        self.data_offset: int = header.data_offset
        self.metadata = Metadata(header.keys, self._context.read)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(header.tensors))

    @property
    def file(self) -> io.FileIO:
        """The file, open as long as this object: for mapping or reading tensor data."""
        file: io.FileIO = self._pointer
        return file

    def file_offset(self, name: str) -> int:
        """Where a tensor's data start, in bytes from the start of the file."""
        return self.data_offset + self.tensors[name].offset

    def close(self) -> None:
        """Close the file, and with it the metadata."""
        super().close()
        if self._resource is not None:
            self._context.close()

    def close_data(self) -> None:
        """Close the file only: metadata stay readable as long as somebody holds them."""
        super().close()

    def __repr__(self) -> str:
        return (
            f"<GGUFFile {os.path.basename(self.path)!r} v{self.version}, {len(self.metadata)} keys, "
            f"{len(self.tensors)} tensors, {self.nbytes} bytes>"
        )


def _decode(string: Any) -> str:
    raw: bytes = ffi.string(string)
    return raw.decode("utf-8", "surrogateescape")


def validate_row_data(dtype: str, data: Any) -> bool:
    """Whether a tensor's bytes (any buffer, whole blocks) hold only finite numbers and valid blocks.

    Upstream: ggml_validate_row_data.
    """
    view = ffi.from_buffer(data)
    return bool(lib.ggml_validate_row_data(dtype_info(dtype).number, view, len(view)))
