"""State files: GGSN and GGSQ with their tokens, written so that a reader sees the old file or the new one, never half.

Upstream: llama-context.cpp, state_save_file, state_load_file, state_seq_save_file, state_seq_load_file. Differs:
upstream writes in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from pyggmlkv.errors import StateError
from pyggmlkv.state.format import write_state
from pyggmlkv.state.layouts import Container, LayoutName
from pyggmlkv.state.live import Live
from pyggmlkv.state.parts import Buffer
from pyggmlkv.state.reader import verified
from pyggmlkv.state.sidecar import Fingerprint, check, encode, sidecar_path
from pyggmlkv.state.writer import take

PathLike: TypeAlias = str | os.PathLike[str]


def save_file(
    live: Live,
    path: PathLike,
    tokens: Sequence[int] = (),
    seq_id: int | None = None,
    fingerprint: Fingerprint | None = None,
) -> None:
    """Writes the whole state (GGSN), or one sequence's (GGSQ), and the tokens that led to it.

    `fingerprint`: a sidecar is written too; without it, a sidecar of the file that was there goes away.
    Raises: SequenceError, StateError; OSError. The file at `path` is then as it was.
    """
    ids = np.asarray(tokens, np.int64)
    if ids.ndim != 1 or (ids.size and not -(2**31) <= ids.min() <= ids.max() < 2**31):
        raise StateError("state: tokens must be a list of 32-bit ids", field="tokens")
    state = dataclasses.replace(take(live, seq_id), tokens=ids.astype(np.int32))
    nbytes = write_atomically(path, write_state(state, _container(seq_id)))
    beside = sidecar_path(path)
    if fingerprint is not None:
        write_atomically(beside, [encode(fingerprint, nbytes)])
    else:
        beside.unlink(missing_ok=True)


def load_file(
    live: Live,
    path: PathLike,
    seq_id: int | None = None,
    layout: LayoutName = "current",
    fingerprint: Callable[[], Fingerprint] | None = None,
) -> list[int]:
    """Puts a saved file into the memory and returns its tokens; a sidecar beside it must fit `fingerprint`.

    Raises: as `load_bytes`, and OSError; nothing has changed.
    """
    live.check_seq(seq_id, False)
    data = Path(path).read_bytes()
    beside = sidecar_path(path)
    if fingerprint is not None and beside.exists():
        check(beside, fingerprint(), len(data))
    state = verified(live, data, _container(seq_id), seq_id, layout=layout)
    tokens: list[int] = [] if state.tokens is None else state.tokens.tolist()
    return tokens


def _container(seq_id: int | None) -> Container:
    return "context_file" if seq_id is None else "sequence_file"


def write_atomically(path: PathLike, pieces: Iterable[Buffer]) -> int:
    """Writes beside `path`, flushes to the disk, then takes its place; bytes written.

    Raises: OSError; the old file stays, and nothing else is left behind.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with open(fd, "wb") as file:
            nbytes = sum(file.write(piece) for piece in pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    _sync_folder(target.parent)
    return nbytes


def _sync_folder(folder: Path) -> None:
    """Makes the new name itself survive a power cut, where the system can."""
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
