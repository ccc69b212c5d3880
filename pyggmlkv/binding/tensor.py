"""A tensor: a light Python object over `struct ggml_tensor`, with shape, type, name, memory and NumPy in and
out.

It shares its arena's `live` token, which is emptied on reset and close, so no freed header is ever read.
Does not know how its memory was allocated. Upstream: ggml.h, ggml_tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding import arrays
from pyggmlkv.binding.dtypes import BY_NUMBER, DTypeInfo, dtype_name
from pyggmlkv.errors import BindingError, ShapeError

if TYPE_CHECKING:
    from pyggmlkv.binding.arena import TensorArena
    from pyggmlkv.binding.buffer import Buffer


class Tensor:
    """A ggml tensor. `ne` is ggml's order (4 sizes), `shape` NumPy's (reversed, trailing 1s dropped)."""

    __slots__ = ("_live", "_nb", "_p", "_type", "arena", "ne")

    def __init__(self, arena: TensorArena, pointer: Any) -> None:
        self.arena = arena
        self._p = pointer
        self._live = arena._live
        ne = pointer.ne
        self.ne: tuple[int, int, int, int] = (ne[0], ne[1], ne[2], ne[3])
        self._type: int = pointer.type
        self._nb: tuple[int, int, int, int] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and bool(self._p == other._p) and self._live is other._live

    def __hash__(self) -> int:
        return hash(self._p)

    @property
    def _pointer(self) -> Any:
        if not self._live:
            raise self.arena._stale()
        return self._p

    @property
    def nb(self) -> tuple[int, int, int, int]:
        """Strides in bytes, ggml's order."""
        nb = self._nb
        if nb is None:
            c = self._pointer.nb
            nb = self._nb = (c[0], c[1], c[2], c[3])
        return nb

    @property
    def dtype(self) -> str:
        """ggml's name of the element type."""
        return dtype_name(self._type)

    @property
    def dtype_info(self) -> DTypeInfo:
        """Block size, bytes and NumPy equal of the element type."""
        return BY_NUMBER[self._type]

    @property
    def shape(self) -> tuple[int, ...]:
        """NumPy's order: `(ne[n-1], ..., ne[0])` with ggml's trailing 1s dropped, at least one size."""
        return self.ne[self.n_dims - 1 :: -1] if self.n_dims < 4 else self.ne[::-1]

    @property
    def n_dims(self) -> int:
        """Number of sizes up to the last that is not 1, at least 1."""
        for i in (3, 2, 1):
            if self.ne[i] > 1 or self.ne[i] == 0:
                return i + 1
        return 1

    @property
    def n_elements(self) -> int:
        """Product of `ne`."""
        a, b, c, d = self.ne
        return a * b * c * d

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last (gaps of a strided view included)."""
        return int(lib.ggml_nbytes(self._pointer))

    @property
    def name(self) -> str:
        """At most 63 bytes of UTF-8."""
        return _text(self._pointer.name)

    @name.setter
    def name(self, name: str) -> None:
        raw = name.encode()
        if len(raw) >= lib.GGML_MAX_NAME:
            raise BindingError(
                f"a tensor name has at most {lib.GGML_MAX_NAME - 1} bytes, got {len(raw)}: {name!r}"
            )
        lib.ggml_set_name(self._pointer, raw)

    @property
    def op(self) -> str:
        """ggml's name of the operation that makes this tensor (`MUL_MAT`; `NONE` for a leaf)."""
        return _text(lib.ggml_op_name(self._pointer.op))

    @property
    def op_desc(self) -> str:
        """As `op`, with the unary or gated function named (`SILU`, `SWIGLU`)."""
        return _text(lib.ggml_op_desc(self._pointer))

    @property
    def src(self) -> tuple[Tensor, ...]:
        """The operands, in ggml's order, without the empty ones."""
        sources = self._pointer.src
        return tuple(self.arena._wrap(s) for s in sources if s != ffi.NULL)

    @property
    def view_src(self) -> Tensor | None:
        """The tensor whose memory this one shows, None unless it is a view."""
        source = self._pointer.view_src
        return None if source == ffi.NULL else self.arena._wrap(source)

    @property
    def view_offs(self) -> int:
        """Bytes from the start of `view_src`."""
        return int(self._pointer.view_offs)

    @property
    def buffer(self) -> Buffer | None:
        """The buffer it lies in; None if unallocated, in arena memory, or in a scheduler's own memory."""
        pointer = self._pointer.buffer
        return None if pointer == ffi.NULL else self._root_arena()._buffers.get(pointer)

    @property
    def is_allocated(self) -> bool:
        """True once it has memory."""
        return bool(self._pointer.data != ffi.NULL)

    def is_contiguous(self) -> bool:
        """True if the elements lie in order without gaps."""
        return bool(lib.ggml_is_contiguous(self._pointer))

    def set_input(self) -> None:
        """Mark as a graph input: its memory is not reused before the graph ran."""
        lib.ggml_set_input(self._pointer)

    def set_output(self) -> None:
        """Mark as a graph output: its memory is never reused."""
        lib.ggml_set_output(self._pointer)

    def set_param(self) -> None:
        """Mark as trainable. Raises: BindingError unless it is a leaf."""
        if self._pointer.op != lib.GGML_OP_NONE:
            raise BindingError(f"set_param: {self!r} is the result of an op; only leaves are trainable")
        lib.ggml_set_param(self._p)

    def set_loss(self) -> None:
        """Mark as a loss. Raises: ShapeError unless it is one f32."""
        if self.n_elements != 1 or self.dtype != "f32":
            raise ShapeError(f"set_loss: expected one f32, got {self!r}")
        lib.ggml_set_loss(self._pointer)

    def _root_arena(self) -> TensorArena:
        """The arena of the tensor whose memory this one shows."""
        source = self._p.view_src
        return self.arena if source == ffi.NULL else self.arena._find(source)

    def numpy(self) -> npt.NDArray[Any]:
        """Zero-copy view, `shape` and strides reversed; bf16 shows as uint16. Closing the owner waits for the
        view.

        Raises: BindingError if the memory is not the host's; DTypeError for quantised types; ClosedError if
        it is gone.
        """
        return arrays.view(self)

    def raw(self) -> npt.NDArray[Any]:
        """Zero-copy view of the bytes (nbytes,) of a contiguous tensor of any type; see `numpy` for its life.

        Raises: BindingError if the memory is not the host's, or the tensor is strided; ClosedError if it is gone.
        """
        return arrays.raw_view(self)

    def to_numpy(self, dequantize: bool = True) -> npt.NDArray[Any]:
        """Copy from any backend. Quantised types and bf16 become float32, or raw bytes (uint16) without
        `dequantize`.
        """
        return arrays.read(self, dequantize)

    def set(self, array: npt.ArrayLike) -> None:
        """Copy `array` in, on any backend: same shape (leading 1s aside); floats convert among floats and
        quantised types, bf16 takes uint16 as raw bits, integers must match.

        Raises: ShapeError, DTypeError; BindingError if unallocated or read-only.
        """
        arrays.write(self, array)

    def copy_from(self, source: Tensor) -> None:
        """Copy the data of `source`, which may lie on another backend. Raises: ShapeError unless layouts are
        equal.
        """
        arrays.copy(self, source)

    def get_bytes(self, offset: int = 0, n: int | None = None) -> bytes:
        """`n` bytes (default: all that follow) from `offset`, from any backend."""
        return arrays.read_bytes(self, offset, n)

    def set_bytes(self, data: Any, offset: int = 0) -> None:
        """Write a bytes-like object at `offset`, on any backend."""
        arrays.write_bytes(self, data, offset)

    def set_zero(self) -> None:
        """Fill with zero bytes, on any backend."""
        arrays.fill_bytes(self, 0)

    def __repr__(self) -> str:
        if not self._live:
            return f"<Tensor of a {'closed' if self.arena.closed else 'reset'} arena>"
        sizes = ", ".join(map(str, self.ne[: self.n_dims]))
        return f"<Tensor {self.name!r} {self.dtype} [{sizes}] {self.op}>"


def _text(pointer: Any) -> str:
    raw: bytes = ffi.string(pointer)
    return raw.decode("utf-8", "replace")
