"""What a model file says of itself, as plain data that JSON can hold: for `python -m pyggmlkv info`.

Reads headers only; knows no architecture beyond the keys that all share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TypeAlias

import numpy as np

from pyggmlkv.binding.gguf_file import MetadataValue
from pyggmlkv.errors import GGUFKeyError

from . import keys
from .hparams import HParams, base_hparams
from .reader import GGUFReader

Json: TypeAlias = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def describe(reader: GGUFReader, max_items: int = 8) -> dict[str, Json]:
    """Architecture, sizes, element types, hyperparameters, metadata and tensors of an open model.

    Arrays of more than `max_items` elements become `{"type", "length", "first"}`; sizes are bytes; shapes are
    in ggml order. `hparams` is None, and `hparams_error` says why, for files that hold no whole model.
    """
    kr = reader.keys_of()
    hparams, error = _hparams(reader)
    return {
        "path": reader.path,
        "files": [{"path": f.path, "nbytes": f.nbytes, "version": f.version} for f in reader.files],
        "arch": reader.arch,
        "name": kr.str(keys.GENERAL_NAME, None),
        "n_params": reader.n_params,
        "nbytes": reader.nbytes,
        "bits_per_weight": round(reader.nbytes * 8 / reader.n_params, 3) if reader.n_params else None,
        "types": _types(reader),
        "hparams": hparams,
        "hparams_error": error,
        "metadata": {key: _metadata(reader, key, max_items) for key in reader.metadata},
        "tensors": [
            {"name": t.name, "type": t.dtype, "shape": list(_dims(t.ne)), "nbytes": t.nbytes}
            for t in reader.tensors.values()
        ],
    }


def describe_hparams(hparams: HParams) -> dict[str, Json]:
    """The hyperparameters that a file sets: no defaults, and one number where all layers are equal."""
    out: dict[str, Json] = {}
    for f in fields(hparams):
        value: object = getattr(hparams, f.name)
        if isinstance(value, tuple) and value and f.name != "rope_sections":
            value = value[0] if len(set(value)) == 1 else list(value)
            if f.default == () and (value is False or value in (0.0, -1)):
                continue
        if f.default is MISSING or value != f.default:
            out[f.name] = _plain(value)
    return out


def _hparams(reader: GGUFReader) -> tuple[dict[str, Json] | None, str | None]:
    try:
        return describe_hparams(base_hparams(reader.keys_of())), None
    except GGUFKeyError as e:
        return None, str(e)


def _types(reader: GGUFReader) -> dict[str, Json]:
    sizes: dict[str, Json] = {}
    for dtype, count in reader.type_counts.items():
        tensors = [t for t in reader.tensors.values() if t.dtype == dtype]
        sizes[dtype] = {
            "tensors": count,
            "n_params": sum(t.n_elements for t in tensors),
            "nbytes": sum(t.nbytes for t in tensors),
        }
    return sizes


def _metadata(reader: GGUFReader, key: str, max_items: int) -> Json:
    metadata = reader.metadata
    n = metadata.array_length(key)
    value: MetadataValue = metadata.first(key, max_items)
    if isinstance(value, np.ndarray):
        items: list[Json] = [_plain(v) for v in value.tolist()]
    elif isinstance(value, list):
        items = [_plain(v) for v in value]
    else:
        return _plain(value)
    if n is None or n <= max_items:
        return items
    return {"type": metadata.type_name(key), "length": n, "first": items}


def _dims(ne: tuple[int, ...]) -> tuple[int, ...]:
    n = max((i + 1 for i, d in enumerate(ne) if d != 1), default=1)
    return ne[:n]


def _plain(value: object) -> Json:
    """JSON has no infinities and no bytes that are not text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return str(value).encode("utf-8", "replace").decode()
