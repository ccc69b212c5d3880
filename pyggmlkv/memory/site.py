"""Where a memory lives and what runs its graphs.

Turns what a person has at hand (nothing, a device, a backend, a runner) into a `Site`; knows no cells.
Upstream: the `offload` argument of llama_kv_cache and llama_model::dev_layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from pyggmlkv.backend.runner import Runner
from pyggmlkv.binding import Backend, Buffer, BufferType, Device, Tensor, cpu_device, devices


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The runner of a memory's own graphs, each layer's buffer type, and RoPE divisors by layer.

    `owned`: the runner was made for one memory, which closes it.
    """

    runner: Runner
    buffer_type_of: Callable[[int], BufferType]
    rope_factors: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    owned: bool = False

    def close(self) -> None:
        if self.owned:
            self.runner.close()


Where: TypeAlias = Site | Runner | Device | Backend | None
"""A site, a runner (its CPU), a device or a backend's device; None is the CPU."""


def site_of(where: Where) -> Site:
    """The site that `where` stands for; a device gets a runner of its own."""
    if isinstance(where, Site):
        return where
    if isinstance(where, Runner):
        cpu = where.cpu_buffer_type
        return Site(where, lambda il: cpu)
    kind = buffer_type_of(where)(0)
    device = where.device if isinstance(where, Backend) else where
    gpus = [] if device is None or device.type in ("cpu", "accel") else [device]
    return Site(Runner(gpus), lambda il: kind, owned=True)


def buffer_type_of(where: Where) -> Callable[[int], BufferType]:
    """Each layer's buffer type at `where`; starts nothing."""
    if isinstance(where, Site):
        return where.buffer_type_of
    if isinstance(where, Runner):
        kind = where.cpu_buffer_type
    else:
        device = where.device if isinstance(where, Backend) else where or cpu_device()
        kind = cpu_device().buffer_type if device.type == "accel" else device.buffer_type
    return lambda il: kind


def device_name(kind: BufferType) -> str:
    """Name of the device whose memory this is; host memory of any kind is the CPU's."""
    if not kind.is_host:
        for device in devices():
            if device.buffer_type == kind:
                return device.name
        return kind.name
    return cpu_device().name


def by_device(sizes: Iterable[tuple[BufferType, int]]) -> dict[str, int]:
    """Bytes summed by device name."""
    out: dict[str, int] = {}
    for kind, nbytes in sizes:
        name = device_name(kind)
        out[name] = out.get(name, 0) + nbytes
    return out


def breakdown(buffers: Iterable[Buffer]) -> dict[str, int]:
    """Bytes of `buffers` by device name."""
    return by_device((buffer.buffer_type, buffer.nbytes) for buffer in buffers)
