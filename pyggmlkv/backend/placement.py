"""Where each layer lives: for input, layers and output the buffer types that may hold weights, best first.

Chooses devices for layers, not buffer types for weights. Upstream: llama-model.cpp, make_cpu_buft_list,
make_gpu_buft_list and the first part of load_tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from pyggmlkv.binding.buffer import BufferType
from pyggmlkv.binding.device import Device, cpu_device, devices
from pyggmlkv.errors import BackendError
from pyggmlkv.types import F32

MAX_LAYERS: Final = 512
"""Upstream: LLAMA_MAX_LAYERS."""
BufferTypeList: TypeAlias = tuple[tuple[Device, BufferType], ...]


class LayerPlacement(Protocol):
    """What the weight loader asks."""

    @property
    def input_bufts(self) -> BufferTypeList: ...
    @property
    def output_bufts(self) -> BufferTypeList: ...
    def layer_bufts(self, il: int) -> BufferTypeList: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """A settled `LayerPlacement`. `layer_devices` has one entry a layer, next-token prediction included."""

    cpu: Device
    devices: tuple[Device, ...]
    layer_devices: tuple[Device, ...]
    output_device: Device
    bufts: dict[str, BufferTypeList]
    """By device name."""

    @property
    def input_bufts(self) -> BufferTypeList:
        """The input stays on the CPU: a lookup gains nothing from a device."""
        return self.bufts[self.cpu.name]

    @property
    def output_bufts(self) -> BufferTypeList:
        return self.bufts[self.output_device.name]

    def layer_bufts(self, il: int) -> BufferTypeList:
        return self.bufts[self.layer_devices[il].name]

    @property
    def n_gpu_layers(self) -> int:
        """Layers that are not on the CPU, the output counted as one."""
        return sum(d != self.cpu for d in (*self.layer_devices, self.output_device))


def cpu_buft_list(offload: Sequence[Device] = (), use_extra_bufts: bool = True) -> BufferTypeList:
    """Buffer types for weights that the CPU works on: accelerators, the first device's host memory, the CPU's
    repacked layouts, plain memory. Upstream: make_cpu_buft_list.
    """
    cpu = cpu_device()
    plain = cpu.buffer_type
    out = [(d, d.buffer_type) for d in devices() if d.type == "accel" and d.buffer_type != plain]
    for device in offload:
        host = device.host_buffer_type
        if host is not None:
            out.append((device, host))
            break
    if use_extra_bufts:
        out += [(cpu, b) for b in cpu.extra_buffer_types]
    out += [(d, d.buffer_type) for d in devices() if d.type == "cpu"]
    return tuple(out)


def device_buft_list(device: Device) -> BufferTypeList:
    """Buffer types for weights that `device` works on. Upstream: make_gpu_buft_list (split mode `layer`)."""
    return ((device, device.buffer_type), *((device, b) for b in device.extra_buffer_types))


def place_layers(
    n_layer: int,
    offload: Sequence[Device] = (),
    n_gpu_layers: int | None = None,
    tensor_split: Sequence[float] | None = None,
    use_extra_bufts: bool = True,
) -> Placement:
    """Give the last `n_gpu_layers` layers (None: all, the output counted as one) to the devices of `offload`.

    `tensor_split` weighs the devices; by default their free memory does.
    Raises: BackendError if `tensor_split` does not fit the devices, or for more layers than any model has.
    """
    if not 0 <= n_layer <= MAX_LAYERS:
        raise BackendError(f"{n_layer} layers cannot be placed, at most {MAX_LAYERS}", n_layer=n_layer)
    cpu = cpu_device()
    cpu_bufts = cpu_buft_list(offload, use_extra_bufts)
    bufts = {cpu.name: cpu_bufts} | {d.name: (*device_buft_list(d), *cpu_bufts) for d in offload}
    wanted = n_layer + 1 if n_gpu_layers is None else n_gpu_layers
    start = max(n_layer + 1 - wanted, 0)
    active = min(wanted, n_layer + 1) if offload else 0
    splits = _split_points(offload, tensor_split, cpu)

    def device_of(il: int) -> Device:
        if il < start or il - start >= active:
            return cpu
        return offload[
            int(np.searchsorted(splits, np.float32(il - start) / np.float32(active), side="right"))
        ]

    placed = tuple(device_of(il) for il in range(n_layer + 1))
    return Placement(cpu, tuple(offload), placed[:-1], placed[-1], bufts)


def _split_points(offload: Sequence[Device], split: Sequence[float] | None, cpu: Device) -> F32:
    if split is not None and (len(split) != len(offload) or min(split, default=0.0) < 0.0):
        raise BackendError(
            f"tensor_split has {len(split)} weights {list(split)}, expected one of at least 0 for each of "
            f"{len(offload)} devices"
        )
    if split is None or not any(split):
        memories = [d.memory for d in offload]
        split = [free if (free, total) != (0, 0) else cpu.memory[0] for free, total in memories]
    sums = np.cumsum(np.asarray(split, np.float32), dtype=np.float32)
    return sums / sums[-1] if len(sums) else sums
