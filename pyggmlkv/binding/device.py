"""The devices ggml found, what they are and can do.

The registry is ggml's own; backends built as loadable modules are loaded from the package on first use.
Does not run anything. Upstream: ggml-backend.h, ggml_backend_dev, ggml_backend_reg.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding.backend import Backend, proc_address
from pyggmlkv.binding.buffer import BufferType
from pyggmlkv.binding.handle import Resource
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import BackendError, DeviceNotFoundError

DeviceType = Literal["cpu", "gpu", "igpu", "accel", "meta"]
_TYPES: dict[int, DeviceType] = {
    lib.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
    lib.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
    lib.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
    lib.GGML_BACKEND_DEVICE_TYPE_ACCEL: "accel",
    lib.GGML_BACKEND_DEVICE_TYPE_META: "meta",
}


@dataclass(frozen=True, slots=True)
class DeviceCaps:
    """What a device can do beside computing. Upstream: ggml_backend_dev_caps."""

    async_compute: bool
    host_buffer: bool
    buffer_from_host_ptr: bool
    events: bool
    mmap_support: bool


class Device:
    """One device of the registry. Lives as long as the process."""

    __slots__ = ("_p",)

    def __init__(self, pointer: Any) -> None:
        self._p = pointer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and bool(self._p == other._p)

    def __hash__(self) -> int:
        return hash(self._p)

    @property
    def name(self) -> str:
        """ggml's name: `CPU`, `Vulkan0`, ..."""
        return str(ffi.string(lib.ggml_backend_dev_name(self._p)).decode("utf-8", "replace"))

    @property
    def description(self) -> str:
        """The hardware's own name."""
        return str(ffi.string(lib.ggml_backend_dev_description(self._p)).decode("utf-8", "replace"))

    @property
    def type(self) -> DeviceType:
        """`cpu`, `gpu`, `igpu`, `accel` (helps the CPU: BLAS, AMX) or `meta`."""
        return _TYPES[lib.ggml_backend_dev_type(self._p)]

    @property
    def memory(self) -> tuple[int, int]:
        """(free, total) bytes; the CPU reports all of it as free."""
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        lib.ggml_backend_dev_memory(self._p, free, total)
        return int(free[0]), int(total[0])

    @property
    def caps(self) -> DeviceCaps:
        """What it can do beside computing."""
        props = ffi.new("struct ggml_backend_dev_props *")
        lib.ggml_backend_dev_get_props(self._p, props)
        caps = props.caps
        return DeviceCaps(
            bool(getattr(caps, "async")),
            bool(caps.host_buffer),
            bool(caps.buffer_from_host_ptr),
            bool(caps.events),
            bool(caps.mmap_support),
        )

    @property
    def backend_name(self) -> str:
        """The backend it belongs to: `CPU`, `BLAS`, `Vulkan`, ..."""
        return str(ffi.string(lib.ggml_backend_reg_name(lib.ggml_backend_dev_backend_reg(self._p))).decode())

    @property
    def features(self) -> dict[str, str]:
        """What the backend was built with or found (`AVX2`, `OPENMP`, ...); empty if it does not say."""
        registry = lib.ggml_backend_dev_backend_reg(self._p)
        function = proc_address(registry, "ggml_backend_get_features", "ggml_backend_get_features_t")
        if function is None:
            return {}
        found: dict[str, str] = {}
        entry = function(registry)
        while entry != ffi.NULL and entry.name != ffi.NULL:
            found[ffi.string(entry.name).decode()] = ffi.string(entry.value).decode()
            entry += 1
        return found

    @property
    def buffer_type(self) -> BufferType:
        """Its own memory."""
        return BufferType(lib.ggml_backend_dev_buffer_type(self._p))

    @property
    def host_buffer_type(self) -> BufferType | None:
        """Host memory it reads fast (pinned), None if it has no such kind."""
        pointer = lib.ggml_backend_dev_host_buffer_type(self._p)
        return None if pointer == ffi.NULL else BufferType(pointer)

    @property
    def extra_buffer_types(self) -> tuple[BufferType, ...]:
        """Kinds of memory that hold weights in a repacked layout, in the order libllama tries them."""
        registry = lib.ggml_backend_dev_backend_reg(self._p)
        function = proc_address(
            registry, "ggml_backend_dev_get_extra_bufts", "ggml_backend_dev_get_extra_bufts_t"
        )
        if function is None:
            return ()
        kinds = function(self._p)
        found: list[BufferType] = []
        while kinds != ffi.NULL and kinds[len(found)] != ffi.NULL:
            found.append(BufferType(kinds[len(found)]))
        return tuple(found)

    def supports_op(self, tensor: Tensor) -> bool:
        """True if it can run the op that makes `tensor`, with its operands where they lie now."""
        return bool(lib.ggml_backend_dev_supports_op(self._p, tensor._pointer))

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        """True if its ops can read and write that kind of memory."""
        return bool(lib.ggml_backend_dev_supports_buft(self._p, buffer_type._p))

    def offload_op(self, tensor: Tensor) -> bool:
        """True if it wants to run this op although the weights lie in host memory."""
        return bool(lib.ggml_backend_dev_offload_op(self._p, tensor._pointer))

    def init(self) -> Backend:
        """A stream of work on this device. Raises: BackendError if it cannot be started; ForkedError."""
        Resource.refuse_after_fork()
        pointer = lib.ggml_backend_dev_init(self._p, ffi.NULL)
        if pointer == ffi.NULL:
            raise BackendError(f"device {self.name} could not be started", device=self.name)
        return Backend(pointer, self)

    def __repr__(self) -> str:
        return f"<Device {self.name} ({self.type}) {self.description!r}>"


def _load_modules() -> None:
    """A portable build registers nothing by itself: its backends are modules in the package's `_lib`."""
    if not lib.ggml_backend_dev_count():
        folder = Path(__file__).parents[1] / "_lib"
        lib.ggml_backend_load_all_from_path(str(folder).encode())


def devices() -> tuple[Device, ...]:
    """All devices, in ggml's order of preference."""
    _load_modules()
    return tuple(Device(lib.ggml_backend_dev_get(i)) for i in range(lib.ggml_backend_dev_count()))


def device(name: str) -> Device:
    """The device called `name`, in any case. Raises: DeviceNotFoundError with the names there are."""
    found = devices()
    for candidate in found:
        if candidate.name.lower() == name.lower():
            return candidate
    names = ", ".join(d.name for d in found) or "none"
    raise DeviceNotFoundError(f"no device is called {name!r}; there are: {names}", name=name)


def cpu_device() -> Device:
    """The CPU. Raises: DeviceNotFoundError if ggml was built without it."""
    for candidate in devices():
        if candidate.type == "cpu":
            return candidate
    raise DeviceNotFoundError("ggml was built without a CPU backend, or its module was not found")
