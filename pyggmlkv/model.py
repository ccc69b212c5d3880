"""A loaded model: hyperparameters, weights on their devices, and the architecture that builds its graphs.

Knows no context: any number of contexts share one model.  Upstream: llama_model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pyggmlkv.backend.placement import Placement, place_layers
from pyggmlkv.backend.select import select_devices
from pyggmlkv.binding import BufferType, Tensor
from pyggmlkv.binding.gguf_file import Metadata, TensorInfo
from pyggmlkv.cparams import CParams
from pyggmlkv.errors import ClosedError, ParameterError
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams, base_hparams
from pyggmlkv.gguf.reader import GGUFReader
from pyggmlkv.gguf.weight_data import WeightData
from pyggmlkv.gguf.weights import LoadOptions, Progress, TensorLoader
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.pooling import pool
from pyggmlkv.models.loading import WeightLoader
from pyggmlkv.models.registry import ENCODER_ARCHS, Architecture, architecture


class Model:
    """Use `Model.load`. `arch`, `hparams`, `metadata`, `tensors`, `n_params`, `nbytes` describe the file."""

    def __init__(
        self, reader: GGUFReader, placement: Placement, options: LoadOptions, progress: Progress | None
    ) -> None:
        self._closed = False
        self.placement = placement
        self.arch = reader.arch
        self.metadata: Metadata = reader.metadata
        self.tensors: Mapping[str, TensorInfo] = reader.tensors
        self.n_params = reader.n_params
        self.nbytes = reader.nbytes
        self.impl: Architecture = architecture(reader.arch)
        kv = reader.keys_of()
        self.hparams: HParams = self.impl.load_hparams(kv, base_hparams(kv))
        with TensorLoader(reader, self.hparams, placement, options) as loader:
            named = WeightLoader(loader, self.hparams)
            self._weights = self.impl.load_weights(named, self.hparams)
            self._data: WeightData = loader.load(progress)
        self._rope = named.rope

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        devices: Sequence[str] | None = None,
        n_gpu_layers: int | None = None,
        use_mmap: bool = True,
        progress: Progress | None = None,
    ) -> Self:
        """Open a GGUF file (the first of its shards) and put its weights on `devices`.

        `devices` None takes what is there, GPUs first; `n_gpu_layers` None puts every layer there. `progress(fraction)`
        is called while loading; returning False, or raising, cancels and releases everything.

        Raises:
            GGUFFormatError: not a well-formed GGUF file.
            ArchitectureError: an architecture that is not implemented.
            GGUFKeyError, GGUFTensorError: a missing or wrong key or tensor, by name.
            LoadCancelledError: `progress` said so.
            DeviceNotFoundError: a device that is not there.
            DeviceMemoryError: no room on a device.
        """
        if n_gpu_layers is not None and (not isinstance(n_gpu_layers, int) or n_gpu_layers < 0):
            raise ParameterError(
                f"n_gpu_layers={n_gpu_layers!r}: expected 0 or more layers, or None for all of them",
                parameter="n_gpu_layers",
            )
        with GGUFReader(path) as reader:
            architecture(reader.arch)
            n_layer = reader.keys_of().u32(keys.BLOCK_COUNT)
            placement = place_layers(n_layer, select_devices(devices), n_gpu_layers)
            return cls(reader, placement, LoadOptions(use_mmap=use_mmap), progress)

    @property
    def weights(self) -> Any:
        """The architecture's own record of weight tensors.

        Raises:
            ClosedError: after `close`.
        """
        self.check_open()
        return self._weights

    @property
    def has_encoder(self) -> bool:
        """Whether texts are encoded before anything is decoded.  Upstream: llama_model_has_encoder."""
        return self.arch in ENCODER_ARCHS

    @property
    def closed(self) -> bool:
        return self._closed

    def check_open(self) -> None:
        if self._closed:
            raise ClosedError("the model is closed")

    def build(self, g: GraphBuilder) -> None:
        """Build the graph of one step into `g`, pooled as the context asks.  Upstream: llama_model::build_graph."""
        self.impl.build(g, self._weights)
        pool(g)

    def buffer_type_of(self, il: int) -> BufferType:
        """Where layer `il`'s cache lives when it is offloaded."""
        return self.placement.layer_devices[il].buffer_type

    def rope_factors(self, cp: CParams) -> dict[int, Tensor]:
        """Per-dimension RoPE divisors by layer, where layers have them."""
        picked = {il: f.pick(cp, self.hparams.n_ctx_orig_yarn) for il, f in self._rope.items()}
        return {il: t for il, t in picked.items() if t is not None}

    def memory_breakdown(self) -> dict[str, int]:
        """Weights, bytes by buffer type name."""
        return dict(self._data.memory_breakdown())

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.n_params / 1e6:.1f} M parameters, {self.nbytes} bytes"
        return f"<Model {self.arch}: {state}>"

    def close(self) -> None:
        """Release weights and file; idempotent. Contexts of this model become unusable.

        Raises:
            BindingError: another thread decodes with them; nothing was closed.
        """
        if not self._closed:
            self._data.close()
            self._closed = True

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
