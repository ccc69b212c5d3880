"""The data of a model's weights: buffers allocated or laid over the mapped files, filled and released.

Which weight goes where was decided before. Upstream: llama-model.cpp, load_tensors (its second half);
llama-model-loader.cpp, init_mappings, load_all_data.
"""

from __future__ import annotations

import mmap
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.buffer import Buffer, BufferType
from pyggmlkv.binding.device import Device
from pyggmlkv.binding.gguf_file import GGUFFile, validate_row_data
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import GGUFError, GGUFTensorError, LoadCancelledError

from .reader import GGUFReader, Weight

if TYPE_CHECKING:
    from .weights import LoadOptions, Progress


@dataclass(slots=True)
class Placed:
    """The weights that go to one buffer type, and the buffers they get."""

    device: Device
    buffer_type: BufferType
    arena: TensorArena
    buffers: list[Buffer] = field(default_factory=list)
    mapped: bool = False


class WeightData:
    """Owns the memory of a model's weights. `tensors` is by name; of a weight used twice it has the first."""

    def __init__(self, placed: Sequence[Placed], tensors: Mapping[str, Tensor], reader: GGUFReader) -> None:
        self._placed = tuple(placed)
        self.tensors: Mapping[str, Tensor] = MappingProxyType(dict(tensors))
        self.n_params = reader.n_params
        """Elements of all tensors of the file."""
        self.nbytes = reader.nbytes
        """Bytes of all tensors of the file; memory may differ, see `breakdown`."""

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(b for p in self._placed for b in p.buffers)

    @property
    def arenas(self) -> tuple[TensorArena, ...]:
        return tuple(p.arena for p in self._placed)

    def breakdown(self) -> Mapping[str, int]:
        """Bytes held by buffer type name; `CPU_Mapped` is the part that lies in the files' mapping."""
        sizes: Counter[str] = Counter()
        for p in self._placed:
            for buffer in p.buffers:
                sizes[buffer.name] += buffer.nbytes
        return dict(sizes)

    def memory_breakdown(self) -> Mapping[str, int]:
        """Bytes held by device name. Upstream: llama_model::memory_breakdown."""
        sizes: Counter[str] = Counter()
        for p in self._placed:
            sizes[p.device.name] += sum(b.nbytes for b in p.buffers)
        return dict(sizes)

    def close(self) -> None:
        """Release the memory; graphs and tensors over it are closed with it."""
        for p in self._placed:
            p.arena.close()
            for buffer in p.buffers:
                buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {n / 2**20:.1f} MiB" for name, n in self.breakdown().items())
        return f"<WeightData {len(self.tensors)} tensors: {parts}>"


def load_data(
    reader: GGUFReader,
    placed: Sequence[Placed],
    tensors: Mapping[str, Tensor],
    options: LoadOptions,
    progress: Progress | None,
) -> WeightData:
    """Allocate and fill all weights; on any error everything is released."""
    use_mmap = options.use_mmap and all(p.device.caps.mmap_support for p in placed)
    data = WeightData(placed, tensors, reader)
    try:
        source = _Source(reader, use_mmap)
        for p in placed:
            _allocate(p, reader, source)
        _fill(placed, reader, source, options, progress)
    except BaseException:
        data.close()
        raise
    return data


class _Source:
    """The bytes of the files: mapped, or read into one staging area when asked for."""

    def __init__(self, reader: GGUFReader, use_mmap: bool) -> None:
        self.reader = reader
        self.maps = [_map_file(file) for file in reader.files] if use_mmap else []
        self._staging = bytearray()

    def read(self, weight: Weight) -> memoryview:
        """The bytes of one weight; good until the next call unless they are mapped."""
        n = weight.info.nbytes
        if self.maps:
            return self.maps[weight.file][weight.offset : weight.offset + n]
        if len(self._staging) < n:
            self._staging = bytearray(n)
        out = memoryview(self._staging)[:n]
        file = self.reader.files[weight.file]
        file.file.seek(weight.offset)
        done = 0
        while done < n:
            got = file.file.readinto(out[done:])
            if not got:
                raise GGUFError(
                    f"{file.path}: became shorter while tensor '{weight.info.name}' was read",
                    tensor=weight.info.name,
                )
            done += got
        return out


def _map_file(file: GGUFFile) -> memoryview:
    """The whole file, read-only, its pages asked for at once where the system can."""
    number = file.file.fileno()
    if sys.platform == "win32":
        return memoryview(mmap.mmap(number, 0, access=mmap.ACCESS_READ))
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if sys.platform == "linux" else 0)
    return memoryview(mmap.mmap(number, 0, flags=flags, prot=mmap.PROT_READ))


def _weights(p: Placed, reader: GGUFReader) -> Iterator[tuple[Tensor, Weight]]:
    for tensor in p.arena.tensors():
        yield tensor, reader.weights[tensor.name]


def _allocate(p: Placed, reader: GGUFReader, source: _Source) -> None:
    if source.maps and p.device.caps.buffer_from_host_ptr and p.buffer_type == p.device.buffer_type:
        alignment = p.buffer_type.alignment
        if all(w.offset % alignment == 0 for _, w in _weights(p, reader)):
            _map(p, reader, source)
            return
    p.buffers.append(p.buffer_type.alloc_tensors(p.arena))
    p.buffers[0].usage = "weights"


def _map(p: Placed, reader: GGUFReader, source: _Source) -> None:
    """Lay one buffer over the part of each file that has these weights. Upstream: get_mapping_range."""
    weights = list(_weights(p, reader))
    largest = max(t.nbytes for t, _ in weights)
    for i, mapped in enumerate(source.maps):
        here = [(t, w) for t, w in weights if w.file == i]
        if not here:
            continue
        first = min(w.offset for _, w in here)
        last = max(w.offset + w.info.nbytes for _, w in here)
        buffer = Buffer.from_host_memory(p.device, mapped[first:last], largest)
        p.buffers.append(buffer)
        buffer.usage = "weights"
        for tensor, w in here:
            buffer.place(tensor, w.offset - first)
    p.mapped = True


def _fill(
    placed: Sequence[Placed],
    reader: GGUFReader,
    source: _Source,
    options: LoadOptions,
    progress: Progress | None,
) -> None:
    total = sum(w.info.nbytes for p in placed for _, w in _weights(p, reader))
    done = 0
    bad: list[str] = []
    for p in placed:
        for tensor, weight in _weights(p, reader):
            _report(progress, done / total if total else 1.0)
            if not p.mapped or options.check_tensors:
                data = source.read(weight)
                if options.check_tensors and not validate_row_data(weight.info.dtype, data):
                    bad.append(weight.info.name)
                if not p.mapped:
                    tensor.set_bytes(data)
            done += weight.info.nbytes
    if bad:
        raise GGUFTensorError(
            f"invalid data (NaN, infinity or broken blocks) in {', '.join(bad)}", tensors=bad
        )
    _report(progress, 1.0)


def _report(progress: Progress | None, fraction: float) -> None:
    if progress is not None and progress(fraction) is False:
        raise LoadCancelledError(
            f"loading was stopped at {fraction:.0%} by the progress callback", fraction=fraction
        )
