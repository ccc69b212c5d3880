"""What a caller passed for a field of a batch, as a read-only NumPy array, or what is wrong with it.

Knows shapes and types only, no limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np
import numpy.typing as npt

from pyggmlkv.errors import BatchError
from pyggmlkv.types import F32, I32, Bool


def int32_array(field: str, value: object) -> I32:
    """A read-only int32 copy of integers of any shape.

    Raises:
        BatchError: not integers, or beyond 32 bits.
    """
    try:
        given = _as_array(value)
    except (ValueError, TypeError) as error:
        raise BatchError(
            f"batch: {field} is not a regular array of integers: {error}", field=field
        ) from error
    if given.dtype.kind not in "iu" and given.size:
        raise BatchError(
            f"batch: {field} has type {given.dtype}, expected integers", field=field, dtype=given.dtype
        )
    array = given.astype(np.int32)
    if given.size and given.dtype.itemsize >= 4 and not np.array_equal(array, given):
        raise BatchError(f"batch: {field} holds a number beyond 32 bits", field=field)
    array.setflags(write=False)
    return array


def _as_array(value: object) -> npt.NDArray[np.generic]:
    """Also for iterables that NumPy does not read itself (generators, dict views)."""
    is_lazy = isinstance(value, Iterable) and not isinstance(
        value, (np.ndarray, list, tuple, range, str, bytes)
    )
    return np.asarray(list(value) if is_lazy else value)  # type: ignore[call-overload]


def embedding_rows(value: npt.ArrayLike) -> F32:
    """A read-only f32 copy of input embeddings, (n_tokens, n_embd)."""
    try:
        given = np.asarray(value)
    except ValueError as error:
        raise BatchError(f"batch: embd is not a regular array: {error}", field="embd") from error
    if given.ndim != 2:
        raise BatchError(
            f"batch: embd has shape {given.shape}, expected (n_tokens, n_embd)",
            field="embd",
            shape=given.shape,
        )
    if given.dtype.kind not in "fiu":
        raise BatchError(
            f"batch: embd has type {given.dtype}, expected floats", field="embd", dtype=given.dtype
        )
    rows = np.array(given, dtype=np.float32, order="C")
    rows.setflags(write=False)
    return rows


def check_length(field: str, given: int, n_tokens: int) -> None:
    if given != n_tokens:
        raise BatchError(
            f"batch: {field} is for {given} tokens, the batch has {n_tokens}",
            field=field,
            given=given,
            n_tokens=n_tokens,
        )


def position_rows(value: object, n_tokens: int) -> I32:
    """Positions as (n_tokens,), or as (n_pos, n_tokens) when given by section."""
    pos = int32_array("pos", value)
    if pos.ndim not in (1, 2):
        raise BatchError(
            f"batch: pos has shape {pos.shape}, expected (n_tokens,) or (n_pos, n_tokens)",
            field="pos",
            shape=pos.shape,
        )
    check_length("pos", pos.shape[-1], n_tokens)
    return pos


def sequence_ids(value: object, n_tokens: int) -> tuple[I32, I32 | None]:
    """Ids per token as (flat, offset); `offset` is None when each token has exactly one id."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise BatchError(
            f"batch: seq_id is {value!r}, expected an int, an int per token or a list of ints per token",
            field="seq_id",
        )
    entries = value if isinstance(value, np.ndarray) else list(value)
    check_length("seq_id", len(entries), n_tokens)
    if isinstance(entries, list) and any(isinstance(entry, (list, tuple, np.ndarray)) for entry in entries):
        rows = [entry if isinstance(entry, (list, tuple, np.ndarray)) else (entry,) for entry in entries]
        offset = np.zeros(n_tokens + 1, dtype=np.int32)
        np.cumsum([len(row) for row in rows], out=offset[1:])
        flat = int32_array("seq_id", list(chain.from_iterable(rows)))
    else:
        ids = int32_array("seq_id", entries)
        if ids.ndim == 1:
            return ids, None
        offset = np.arange(n_tokens + 1, dtype=np.int32) * (ids.size // n_tokens if n_tokens else 0)
        flat = ids.reshape(-1) if ids.ndim == 2 else ids
    if flat.ndim != 1:
        raise BatchError("batch: seq_id is nested deeper than a list of ints per token", field="seq_id")
    offset.setflags(write=False)
    return (flat, None) if len(flat) == n_tokens and bool((np.diff(offset) == 1).all()) else (flat, offset)


def output_flags(value: object, n_tokens: int) -> tuple[Bool, I32 | None]:
    """The output mask (n_tokens,), and the order asked for where that is not the batch's own.

    Raises:
        BatchError: unknown word, wrong length, an index out of range or twice.
    """
    mask: Bool = np.zeros(n_tokens, dtype=np.bool_)
    order: I32 | None = None
    if isinstance(value, str):
        if value not in ("last", "all", "none"):
            raise BatchError(
                f'batch: logits is {value!r}, expected "last", "all", "none", a mask or indices',
                field="logits",
            )
        if value != "none" and n_tokens:
            mask[-1 if value == "last" else slice(None)] = True
    else:
        try:
            given = _as_array(value)
        except ValueError as error:
            raise BatchError(
                f"batch: logits is not a mask or a list of indices: {error}", field="logits"
            ) from error
        if given.ndim != 1:
            raise BatchError(
                f"batch: logits has shape {given.shape}, expected a mask or a list of indices", field="logits"
            )
        if given.dtype.kind == "b":
            check_length("logits", len(given), n_tokens)
            mask[:] = given
        elif given.size:
            order = _output_indices(given, mask)
    mask.setflags(write=False)
    return mask, order


def _output_indices(given: npt.NDArray[np.generic], mask: Bool) -> I32 | None:
    """Marks the indices in `mask`; returns them when they are not ascending."""
    indices = int32_array("logits", given)
    outside = (indices < 0) | (indices >= len(mask))
    if outside.any():
        index = int(indices[outside][0])
        raise BatchError(
            f"batch: logits asks for token {index}, the batch has tokens 0 to {len(mask) - 1}",
            field="logits",
            index=index,
        )
    mask[indices] = True
    if np.count_nonzero(mask) != len(indices):
        values, counts = np.unique(indices, return_counts=True)
        index = int(values[counts > 1][0])
        raise BatchError(f"batch: logits asks for token {index} twice", field="logits", index=index)
    return indices if (np.diff(indices) < 0).any() else None
