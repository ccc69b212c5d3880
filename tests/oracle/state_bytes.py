"""Saved states written byte by byte with `struct`, in every layout that llama.cpp has had: an oracle for the reader.

Cells are (pos, ids, ext) tuples; tensors hold random bytes. Knows only the order of the fields.
"""

from __future__ import annotations

import dataclasses
import random
import struct

Cell = tuple[int, list[int], tuple[int, int] | None]


@dataclasses.dataclass
class Rows:
    """One tensor: type number and bytes of a row; `el` set: transposed, with `n_embd` elements of that size."""

    type: int
    row: int
    n_embd: int = 0
    el: int = 0


def u32(*values: int) -> bytes:
    return struct.pack(f"={len(values)}I", *values)


def i32(*values: int) -> bytes:
    return struct.pack(f"={len(values)}i", *values)


def u64(value: int) -> bytes:
    return struct.pack("=Q", value)


def cells_bytes(cells: list[Cell]) -> bytes:
    out = b""
    for pos, ids, ext in cells:
        out += i32(pos) + u32(len(ids)) + (i32(*ext) if ext else b"") + i32(*ids)
    return out


def tensor_bytes(t: Rows, n: int, rng: random.Random) -> bytes:
    if t.el:
        return i32(t.type) + u32(t.el, t.n_embd) + rng.randbytes(n * t.n_embd * t.el)
    return i32(t.type) + u64(t.row) + rng.randbytes(n * t.row)


def records(cells: list[Cell], v_trans: int, n_layer: int, tensors: list[Rows], seed: int) -> bytes:
    """Cells and tensors of one stream, or of one recurrent memory."""
    rng = random.Random(seed)
    out = cells_bytes(cells) + u32(v_trans, n_layer)
    return out + b"".join(tensor_bytes(t, len(cells), rng) for t in tensors)


def kv(
    streams: list[list[Cell]], v_trans: int, n_layer: int, tensors: list[Rows], *, counted: bool = True
) -> bytes:
    """An attention memory; `counted`: with the stream count that layouts have had since mid-2025."""
    out = u32(len(streams)) if counted else b""
    for s, cells in enumerate(streams):
        out += u32(len(cells))
        if cells or not counted:
            out += records(cells, v_trans, n_layer, tensors, s)
    return out


def recurrent(cells: list[Cell], n_layer: int, tensors: list[Rows]) -> bytes:
    return u32(len(cells)) + records(cells, 0, n_layer, tensors, 7)


def arch(name: str) -> bytes:
    return u32(len(name)) + name.encode()


def outputs(n_outputs: int, n_vocab: int, n_embd: int) -> bytes:
    """Output ids, logits, embeddings, as older whole states carried them."""
    out = i32(n_outputs, *range(n_outputs))
    for n in (n_outputs * n_vocab, n_outputs * n_embd):
        out += u64(n) + struct.pack(f"={n}f", *(float(i) for i in range(n)))
    return out


def file_header(magic: int, version: int, tokens: list[int]) -> bytes:
    return u32(magic, version, len(tokens)) + i32(*tokens)
