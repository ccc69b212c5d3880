"""Which devices a model uses: those asked for by name, or upstream's choice among the ones there are.

The CPU is always there besides and needs no naming. Upstream: llama.cpp, llama_prepare_model_devices.
Differs: one GPU that two backends see is not recognised; name the devices then.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyggmlkv.binding.device import Device, device, devices

HOST_TYPES = ("cpu", "accel")
"""Device types that compute in host memory; they take part without being selected."""


def select_devices(wanted: Sequence[str | Device] | None = None) -> tuple[Device, ...]:
    """The devices that layers may be offloaded to, in order; empty means the CPU alone.

    None takes every RPC server, then every GPU, and integrated GPUs only where there is no other.
    Naming the CPU is allowed and adds nothing; one name may stand alone. Raises: DeviceNotFoundError for a name that is not there.
    """
    if wanted is not None:
        wanted = [wanted] if isinstance(wanted, str) else wanted
        found = [device(d) if isinstance(d, str) else d for d in wanted]
        return tuple(d for d in found if d.type not in HOST_TYPES)
    servers: list[Device] = []
    gpus: list[Device] = []
    integrated: list[Device] = []
    for d in devices():
        if d.type == "gpu":
            (servers if d.backend_name == "RPC" else gpus).append(d)
        elif d.type == "igpu" and (not integrated or d.backend_name == integrated[-1].backend_name):
            integrated.append(d)
    return (*servers, *gpus, *(() if gpus else integrated))
