"""A saved state as plain data: cells, tensor bytes and the records around them, and what a reader is to expect.

Tensor bytes are views into whatever buffer they came from: reading copies nothing. Element types are ggml's enum
numbers, as they stand in the file.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pyggmlkv.types import F32, I32

# what a reader expects


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One layer's K, V, r or s rows: ggml type number and bytes of a cell's row.

    `n_embd` (elements of a row) and `element_size` (bytes) count where V is stored transposed.
    """

    type: int
    row_size: int
    n_embd: int = 0
    element_size: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class KVStateLayer:
    """A layer that owns K/V storage; `v` is None for MLA. `il` is the model's layer number, for messages."""

    il: int
    k: TensorSpec
    v: TensorSpec | None


@dataclasses.dataclass(frozen=True, slots=True)
class KVStateSpec:
    """An attention memory. `kv_size`: cells per stream; `in_partial`: saved with the partial flag too."""

    layers: tuple[KVStateLayer, ...]
    kv_size: int
    n_stream: int = 1
    n_seq_max: int = 1
    n_pos_per_embd: int = 1
    v_trans: bool = False
    name: str = "kv"
    in_partial: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class RecurrentStateSpec:
    """A recurrent memory of `size` cells. `layers`: (r, s) for every layer of the model, None where it has none."""

    layers: tuple[tuple[TensorSpec, TensorSpec] | None, ...]
    size: int
    n_seq_max: int = 1
    name: str = "recurrent"
    in_partial: bool = True


PartSpec: TypeAlias = KVStateSpec | RecurrentStateSpec


@dataclasses.dataclass(frozen=True, slots=True)
class StateSpec:
    """A whole context: `arch` is llama.cpp's name of the architecture; parts in saving order.

    iSWA: base (not `in_partial`), then swa. Hybrid: attention (not `in_partial`), then recurrent.
    """

    arch: str
    parts: tuple[PartSpec, ...]


# what a state holds


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CellMeta:
    """Saved cells, in saving order. `seq_flat`, `seq_offset`: cell i has ids flat[offset[i] : offset[i + 1]].

    `ext` (n_cells, 2): x and y of M-RoPE positions. A single sequence's recurrent cell names no id.
    """

    pos: I32
    seq_flat: I32
    seq_offset: I32
    ext: I32 | None = None

    def __len__(self) -> int:
        return len(self.pos)

    @classmethod
    def of_sequence(
        cls, pos: npt.ArrayLike, seq_id: int | None, ext: npt.ArrayLike | None = None
    ) -> CellMeta:
        """Cells of one sequence; `seq_id` None: they name no id."""
        pos = np.asarray(pos, np.int32)
        n_ids = 0 if seq_id is None else 1
        flat = np.full(len(pos) * n_ids, -1 if seq_id is None else seq_id, np.int32)
        offset = np.arange(len(pos) + 1, dtype=np.int32) * np.int32(n_ids)
        return cls(pos, flat, offset, None if ext is None else np.asarray(ext, np.int32))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TensorData:
    """A layer's saved rows as one or several buffers, in order.

    Plain: (n_cells, row_size) bytes. Transposed: (n_embd, n_cells, element_size) bytes.
    """

    spec: TensorSpec
    buffers: tuple[memoryview, ...]
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buffers)

    def rows(self) -> npt.NDArray[np.uint8]:
        """(n_cells, row_size), or transposed (n_embd, n_cells * element_size); a view when there is one buffer."""
        data = self.buffers[0] if len(self.buffers) == 1 else b"".join(self.buffers)
        flat: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8) if self.nbytes else np.empty(0, np.uint8)
        if self.transposed:
            return flat.reshape(self.spec.n_embd, -1) if self.spec.n_embd else flat.reshape(0, 0)
        return flat.reshape(-1, self.spec.row_size) if self.spec.row_size else flat.reshape(0, 0)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KVStream:
    """One stream's cells with K of every layer and V of those that have it."""

    cells: CellMeta
    v_trans: bool
    k: tuple[TensorData, ...]
    v: tuple[TensorData, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KVBlock:
    """An attention memory; a stream without saved cells is None."""

    streams: tuple[KVStream | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RecurrentBlock:
    """A recurrent memory: r and s of the layers that have them; `n_layer` counts all of the model's."""

    cells: CellMeta
    n_layer: int
    r: tuple[TensorData, ...]
    s: tuple[TensorData, ...]


Part: TypeAlias = KVBlock | RecurrentBlock


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Results that older whole states carry. `ids`: batch index of each output; logits and embeddings flat f32."""

    ids: I32
    logits: F32
    embeddings: F32


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """A state and what its container says around it.

    `arch`: whole contexts only; `seq_id`: the saved id, single sequences in memory only; `tokens`: files only;
    `outputs`: older layouts' whole contexts only.
    """

    parts: tuple[Part, ...]
    arch: str | None = None
    seq_id: int | None = None
    tokens: I32 | None = None
    outputs: Outputs | None = None
