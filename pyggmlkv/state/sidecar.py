"""A sidecar: a small JSON file beside a state file that says what the state was made with, checked when it is loaded.

llama.cpp's formats name the architecture and the row sizes only; other weights, RoPE settings or rotations of the same
shape would be taken silently. Weights are told apart by the file's metadata and tensor table, not by their values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np

from pyggmlkv.errors import StateError
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.state.live import Live, LivePart

Fingerprint: TypeAlias = Mapping[str, Any]
VERSION = 1


class TensorRow(Protocol):
    """What a tensor table says of one tensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def ne(self) -> tuple[int, ...]: ...


def model_hash(metadata: Mapping[str, object], tensors: Mapping[str, TensorRow]) -> str:
    """SHA-256 over metadata, the tokenizer's left out, and every tensor's name, type and sizes."""
    digest = hashlib.sha256()
    for key in sorted(metadata):
        if not key.startswith("tokenizer."):
            digest.update(f"{key}={_plain(metadata[key])!r}\n".encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].ne)}\n".encode())
    return digest.hexdigest()


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def fingerprint(live: Live, model: str, rope_factors: Iterable[str] = ()) -> Fingerprint:
    """What a state of this memory depends on beyond its own bytes. `rope_factors`: names of the divisors in use."""
    facts: dict[str, Any] = {"arch": live.arch, "model": model, "rope_factors": sorted(set(rope_factors))}
    for index, part in enumerate(live.parts()):
        facts.update({f"part {index}: {name}": value for name, value in _part_facts(part).items()})
    return facts


def _part_facts(part: LivePart) -> dict[str, Any]:
    if not isinstance(part, KVCache):
        return {"kind": "recurrent", "rollback snapshots": part.spec.n_rs_seq}
    spec = part.spec
    rope = {f"rope {name}": value for name, value in dataclasses.asdict(spec.rope).items()}
    return {
        "kind": part.name,
        "type_k": spec.type_k,
        "type_v": spec.type_v,
        **rope,
        "rotation of K": 0 if part.k_rot is None else len(part.k_rot),
        "rotation of V": 0 if part.v_rot is None else len(part.v_rot),
        "window": f"{spec.swa_type} {spec.n_swa}",
    }


def sidecar_path(path: str | os.PathLike[str]) -> Path:
    """Where the sidecar of a state file is."""
    return Path(f"{os.fspath(path)}.sidecar.json")


def encode(found: Fingerprint, nbytes: int) -> bytes:
    """The sidecar of a state file of `nbytes` bytes."""
    document = {"pyggmlkv_sidecar": VERSION, "state_nbytes": nbytes, "fingerprint": dict(found)}
    return (json.dumps(document, indent=1) + "\n").encode()


def check(path: Path, found: Fingerprint, nbytes: int) -> None:
    """Compares the sidecar at `path` with the memory that a state of `nbytes` bytes is to go to.

    Raises: StateError: the first thing that differs, as `field`, `expected` (here) and `found` (in the sidecar).
    """
    document: Any = None
    with contextlib.suppress(ValueError):
        document = json.loads(path.read_bytes())
    saved = document.get("fingerprint") if isinstance(document, dict) else None
    if not isinstance(saved, dict) or document.get("pyggmlkv_sidecar") != VERSION:
        _differ(path, "sidecar", f"a sidecar of version {VERSION}", "something else")
    if document.get("state_nbytes") != nbytes:
        _differ(path, "state_nbytes", nbytes, document.get("state_nbytes"))
    here = json.loads(json.dumps(dict(found)))
    for field in [*here, *(f for f in saved if f not in here)]:
        if here.get(field) != saved.get(field):
            _differ(path, field, here.get(field), saved.get(field))


def _differ(path: Path, field: str, expected: object, found: object) -> NoReturn:
    raise StateError(
        f"{path.name}: {field}: the state was saved with {found!r}, this context has {expected!r}",
        field=field,
        expected=expected,
        found=found,
    )
