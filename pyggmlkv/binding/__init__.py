"""The C boundary: nothing outside this package touches `ffi` or `lib`, and nothing in here knows models or
caches.

Names load on first use, so that the pure modules of this package import without a C library.
Upstream: ggml.h, ggml-alloc.h, ggml-backend.h, ggml-cpu.h, gguf.h.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyggmlkv.binding import ops as ops
    from pyggmlkv.binding.arena import TensorArena as TensorArena
    from pyggmlkv.binding.backend import Backend as Backend
    from pyggmlkv.binding.backend import ThreadPool as ThreadPool
    from pyggmlkv.binding.buffer import Buffer as Buffer
    from pyggmlkv.binding.buffer import BufferType as BufferType
    from pyggmlkv.binding.callbacks import AbortGate as AbortGate
    from pyggmlkv.binding.callbacks import set_log_level as set_log_level
    from pyggmlkv.binding.cgraph import ComputeGraph as ComputeGraph
    from pyggmlkv.binding.device import Device as Device
    from pyggmlkv.binding.device import DeviceCaps as DeviceCaps
    from pyggmlkv.binding.device import cpu_device as cpu_device
    from pyggmlkv.binding.device import devices as devices
    from pyggmlkv.binding.dtypes import dequantize as dequantize
    from pyggmlkv.binding.dtypes import quantize as quantize
    from pyggmlkv.binding.dtypes import requires_imatrix as requires_imatrix
    from pyggmlkv.binding.dtypes import row_size as row_size
    from pyggmlkv.binding.dtypes import type_traits as type_traits
    from pyggmlkv.binding.handle import Owner as Owner
    from pyggmlkv.binding.ops.rope import RopeParams as RopeParams
    from pyggmlkv.binding.scheduler import Scheduler as Scheduler
    from pyggmlkv.binding.tensor import Tensor as Tensor

_HOMES: dict[str, tuple[str, str]] = {
    "TensorArena": ("arena", "TensorArena"),
    "Backend": ("backend", "Backend"),
    "ThreadPool": ("backend", "ThreadPool"),
    "Buffer": ("buffer", "Buffer"),
    "BufferType": ("buffer", "BufferType"),
    "AbortGate": ("callbacks", "AbortGate"),
    "ComputeGraph": ("cgraph", "ComputeGraph"),
    "Device": ("device", "Device"),
    "DeviceCaps": ("device", "DeviceCaps"),
    "cpu_device": ("device", "cpu_device"),
    "devices": ("device", "devices"),
    "dequantize": ("dtypes", "dequantize"),
    "quantize": ("dtypes", "quantize"),
    "requires_imatrix": ("dtypes", "requires_imatrix"),
    "row_size": ("dtypes", "row_size"),
    "type_traits": ("dtypes", "type_traits"),
    "Owner": ("handle", "Owner"),
    "set_log_level": ("callbacks", "set_log_level"),
    "RopeParams": ("ops.rope", "RopeParams"),
    "Scheduler": ("scheduler", "Scheduler"),
    "Tensor": ("tensor", "Tensor"),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home[0]}"), home[1])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOMES))
