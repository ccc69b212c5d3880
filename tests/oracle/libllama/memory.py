"""The reference's memory, driven with the public API's names, and looked into: cells, heads, stored tensors.

Upstream: llama.h, llama_memory_*; llama-kv-cells.h; llama-memory-recurrent.h.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from .library import Library

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class Cells:
    """The cells of one stream. pos (n_cells,) -1 where empty; shift (n_cells,); x, y (n_cells,) of M-RoPE;
    seq (n_cells, n_words) uint64 bitset; head: where the next search starts.

    A recurrent part has src0 in `shift`, src in `x`, tail in `y`.
    """

    pos: Ints
    shift: Ints
    x: Ints
    y: Ints
    seq: npt.NDArray[np.uint64]
    head: int

    def sequences(self, cell: int) -> list[int]:
        """The ids of the sequences in a cell."""
        return [64 * w + b for w, word in enumerate(self.seq[cell]) for b in range(64) if int(word) >> b & 1]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One part of a memory: kind is kv, kv_base, kv_swa or recurrent."""

    kind: str
    n_cells: int
    n_stream: int
    n_swa: int
    v_trans: bool
    attn_rot_k: bool
    attn_rot_v: bool
    n_layers: int
    head: int
    used: int
    n_rs_seq: int


class RefMemory:
    """`llama_memory_t` of a context."""

    def __init__(self, library: Library, ctx: Any) -> None:
        self.library = library
        self._ctx = ctx
        self._mem = library.lib.llama_get_memory(ctx)

    def seq_rm(self, seq_id: int | None, p0: int | None = None, p1: int | None = None) -> bool:
        return bool(self.library.lib.llama_memory_seq_rm(self._mem, _open(seq_id), _open(p0), _open(p1)))

    def seq_cp(self, src: int, dst: int, p0: int | None = None, p1: int | None = None) -> None:
        self.library.lib.llama_memory_seq_cp(self._mem, src, dst, _open(p0), _open(p1))

    def seq_keep(self, seq_id: int) -> None:
        self.library.lib.llama_memory_seq_keep(self._mem, seq_id)

    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> None:
        self.library.lib.llama_memory_seq_add(self._mem, seq_id, _open(p0), _open(p1), delta)

    def seq_div(self, seq_id: int, p0: int | None, p1: int | None, d: int) -> None:
        self.library.lib.llama_memory_seq_div(self._mem, seq_id, _open(p0), _open(p1), d)

    def seq_pos_min(self, seq_id: int) -> int | None:
        pos = int(self.library.lib.llama_memory_seq_pos_min(self._mem, seq_id))
        return None if pos < 0 else pos

    def seq_pos_max(self, seq_id: int) -> int | None:
        pos = int(self.library.lib.llama_memory_seq_pos_max(self._mem, seq_id))
        return None if pos < 0 else pos

    def clear(self, data: bool = True) -> None:
        self.library.lib.llama_memory_clear(self._mem, data)

    @property
    def can_shift(self) -> bool:
        return bool(self.library.lib.llama_memory_can_shift(self._mem))

    def update(self) -> bool:
        """Applies pending shifts and stream copies now.  Upstream: llama-context.cpp, memory_update."""
        return bool(self.library.lib.oracle_memory_update(self._ctx))

    @property
    def parts(self) -> list[Part]:
        """Base before window, attention before recurrent; empty for a kind that the oracle does not know."""
        ffi, lib = self.library.ffi, self.library.lib
        out = []
        for index in range(lib.oracle_n_parts(self._ctx)):
            info = ffi.new("struct oracle_part_info *")
            lib.oracle_part(self._ctx, index, info)
            names = [f.name for f in dataclasses.fields(Part) if f.name != "kind"]
            out.append(Part(ffi.string(info.kind).decode(), **{n: getattr(info, n) for n in names}))
        return out

    def cells(self, part: int = 0, stream: int = 0) -> Cells:
        """A copy of the cells of one stream of one part."""
        ffi, lib = self.library.ffi, self.library.lib
        info = self.parts[part]
        pos, shift, x, y = (np.zeros(info.n_cells, np.int32) for _ in range(4))
        seq = np.zeros((info.n_cells, lib.oracle_seq_words()), np.uint64)
        out = ffi.new("struct oracle_cells *")
        for name, column in (("pos", pos), ("shift", shift), ("x", x), ("y", y)):
            setattr(out, name, ffi.cast("int32_t *", column.ctypes.data))
        out.seq = ffi.cast("uint64_t *", seq.ctypes.data)
        if info.kind == "recurrent":
            lib.oracle_recurrent_cells(self._ctx, part, out)
            head = info.head
        else:
            lib.oracle_kv_cells(self._ctx, part, stream, out)
            head = int(lib.oracle_kv_head(self._ctx, part, stream))
        return Cells(pos, shift, x, y, seq, head)

    def storage(self, part: int, slot: int) -> tuple[int, bytes, bytes]:
        """Model layer, and the raw bytes of K and V (r and s for a recurrent part) of one stored layer."""
        ffi, lib = self.library.ffi, self.library.lib
        k, v = ffi.new("struct ggml_tensor **"), ffi.new("struct ggml_tensor **")
        layer = int(lib.oracle_layer(self._ctx, part, slot, k, v))
        return layer, tensor_bytes(self.library, k[0]), tensor_bytes(self.library, v[0])


def tensor_bytes(library: Library, tensor: Any) -> bytes:
    """A copy of a tensor's bytes; empty for none."""
    if not tensor:
        return b""
    n = library.lib.ggml_nbytes(tensor)
    out = library.ffi.new("char[]", n)
    library.lib.ggml_backend_tensor_get(tensor, out, 0, n)
    return bytes(library.ffi.buffer(out, n))


def _open(value: int | None) -> int:
    return -1 if value is None else value
