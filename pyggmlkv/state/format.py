"""The byte format of saved states: whole contexts and single sequences, in memory and in files.

Bytes to plain data and back; no memory object, no model, no C. A reader is told what to expect and verifies all of
it before it returns: a state that comes out of here fits.  Upstream: llama-context.cpp, state_write_data,
state_seq_write_data, state_save_file, state_seq_save_file and their readers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from pyggmlkv.errors import StateError
from pyggmlkv.state.blocks import Outputs, SavedState, StateSpec
from pyggmlkv.state.cursor import Cursor
from pyggmlkv.state.layouts import (
    SEQ_FILE_MAGIC,
    SEQ_FILE_VERSION,
    SEQ_MAGIC,
    SESSION_MAGIC,
    SESSION_VERSION,
    Container,
    LayoutName,
    layout_of,
)
from pyggmlkv.state.parts import Buffer, check_part, read_part, write_part
from pyggmlkv.types import F32, I32


def read_state(
    data: bytes | bytearray | memoryview,
    spec: StateSpec,
    container: Container,
    *,
    partial: bool = False,
    layout: LayoutName = "current",
) -> SavedState:
    """Reads a saved state that must match `spec` to the last byte. Tensor rows are views into `data`.

    `partial`: a sequence saved with the partial flag, window and recurrent parts only. `layout`: which age of the
    format; older ones are read, not written.

    Raises: StateError: the first thing that does not fit, with `field`, `expected`, `found` and `offset` as facts.
    Differs: upstream accepts sequence files and buffers with bytes left over, and fails after it has changed cells.
    """
    c, age = Cursor(memoryview(data).cast("B") if len(data) else memoryview(b"")), layout_of(layout)
    single = container in ("sequence", "sequence_file")
    if partial and not single:
        raise StateError(f"state: only sequences are saved in part, {container} given", container=container)
    tokens = read_file_header(c, container) if container.endswith("_file") else None
    arch = outputs = seq_id = None
    if not single:
        arch = read_arch(c, spec.arch)
        outputs = read_outputs(c) if age.outputs else None
    elif container == "sequence" and age.seq_header:
        seq_id = read_seq_header(c)
    parts = tuple(read_part(c, part, age, single) for part in spec.parts if part.in_partial or not partial)
    c.where = "state"
    c.finish()
    return SavedState(parts, arch, seq_id, tokens, outputs)


def read_file_header(c: Cursor, container: Container) -> I32:
    """Magic, version and tokens of a state file."""
    c.where = container.replace("_", " ")
    magic, version = (
        (SESSION_MAGIC, SESSION_VERSION)
        if container == "context_file"
        else (SEQ_FILE_MAGIC, SEQ_FILE_VERSION)
    )
    found = c.u32("magic")
    if found != magic:
        c.fail("magic", f"{magic:#010x}", f"{found:#010x}", at=c.offset - 4)
    c.equal(c.u32("version"), version, "version")
    n = c.count(2**32 - 1, 4, "token count")
    return np.frombuffer(c.take(4 * n, "tokens"), np.int32)


def read_seq_header(c: Cursor) -> int:
    """Magic and id that lead a sequence saved to memory."""
    found = c.u32("sequence magic")
    if found != SEQ_MAGIC:
        c.fail("sequence magic", f"{SEQ_MAGIC:#010x}", f"{found:#010x}", at=c.offset - 4)
    seq_id = c.i32("sequence id")
    if seq_id < 0:
        c.fail("sequence id", "0 or more", seq_id, at=c.offset - 4)
    return seq_id


def read_arch(c: Cursor, expected: str | None) -> str:
    """The architecture's name; `expected` None: any printable one."""
    at = c.offset
    raw = bytes(c.take(c.count(256, 1, "architecture length"), "architecture"))
    name = raw.decode("ascii", "replace")
    if expected is None and not (raw.isascii() and name.isprintable() and name):
        c.fail("architecture", "a name", repr(name), at=at)
    if expected is not None and name != expected:
        c.fail("architecture", repr(expected), repr(name), at=at + 4)
    return name


def read_outputs(c: Cursor) -> Outputs:
    """Output ids, logits and embeddings of the older layouts."""
    c.where = "outputs"
    ids = np.frombuffer(c.take(4 * c.count(2**31 - 1, 4, "output count"), "output ids"), np.int32)
    if len(ids) and ids.min() < 0:
        c.fail("output id", "0 or more", int(ids.min()))
    logits, embeddings = _read_floats(c, "logits", len(ids)), _read_floats(c, "embeddings", len(ids))
    c.where = "state"
    return Outputs(ids, logits, embeddings)


def _read_floats(c: Cursor, name: str, n_outputs: int) -> F32:
    n = c.u64(f"{name} count")
    if n > c.left // 4:
        c.fail(f"{name} count", f"at most {c.left // 4}, as {c.left} bytes are left", n, at=c.offset - 8)
    if n and (not n_outputs or n % n_outputs):
        c.fail(f"{name} count", f"a multiple of {n_outputs} outputs", n, at=c.offset - 8)
    return np.frombuffer(c.take(4 * n, name), np.float32)


def write_state(state: SavedState, container: Container) -> Iterator[Buffer]:
    """The bytes of a state in the current layout, in pieces: `b"".join(...)`, or one write each.

    Tensor rows are handed through uncopied. Whole contexts need `arch`, sequences in memory `seq_id`, files `tokens`.
    Raises: StateError: one of these is missing, or a block contradicts itself; before the first piece.
    """
    missing = {
        "arch": container in ("context", "context_file") and state.arch is None,
        "seq_id": container == "sequence" and state.seq_id is None,
    }
    for name, is_missing in missing.items():
        if is_missing:
            raise StateError(f"state: {container} needs {name}, None given", container=container, field=name)
    for part in state.parts:
        check_part(part)
    return _pieces(state, container)


def _pieces(state: SavedState, container: Container) -> Iterator[Buffer]:
    if container.endswith("_file"):
        magic, version = (
            (SESSION_MAGIC, SESSION_VERSION)
            if container == "context_file"
            else (SEQ_FILE_MAGIC, SEQ_FILE_VERSION)
        )
        tokens = np.ascontiguousarray(() if state.tokens is None else state.tokens, np.int32)
        yield struct.pack("=III", magic, version, len(tokens))
        yield tokens.data.cast("B")
    if container == "sequence":
        yield struct.pack("=Ii", SEQ_MAGIC, state.seq_id)
    elif state.arch is not None and container != "sequence_file":
        name = state.arch.encode()
        yield struct.pack("=I", len(name)) + name
    for part in state.parts:
        yield from write_part(part)


def state_nbytes(state: SavedState, container: Container) -> int:
    """Bytes that `write_state` gives, without touching a tensor row."""
    return sum(
        len(piece) if isinstance(piece, bytes) else piece.nbytes for piece in write_state(state, container)
    )
