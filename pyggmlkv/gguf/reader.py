"""`GGUFReader`: a model on disk as one thing, though it may be split over several files.

Joins the tensor tables of the shards and reads metadata from the first. Knows no architecture and no buffers.
Upstream: llama-model-loader.cpp, the constructor of llama_model_loader.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from pyggmlkv.binding.gguf_file import GGUFFile, Metadata, TensorInfo
from pyggmlkv.errors import GGUFFormatError, GGUFTensorError

from . import keys
from .key_reader import KeyReader

_SHARD = re.compile(r"^(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class Weight:
    """Where one tensor's bytes are: the file's index, and the place in it in bytes."""

    info: TensorInfo
    file: int
    offset: int


class GGUFReader:
    """An open model: `files`, `metadata`, `tensors` (name -> TensorInfo), `weights` (name -> Weight).

    `shards` names the other files of a split model where they do not follow the usual pattern.
    Raises: GGUFFormatError, GGUFError; GGUFTensorError for a tensor that two shards have.
    """

    def __init__(
        self, path: str | os.PathLike[str], shards: Sequence[str | os.PathLike[str]] | None = None
    ) -> None:
        self.path = os.fspath(path)
        opened = [GGUFFile(path)]
        try:
            self._open_shards(opened, shards)
            self.files: tuple[GGUFFile, ...] = tuple(opened)
            self.weights: Mapping[str, Weight] = MappingProxyType(self._join())
            self._check_count()
        except BaseException:
            for file in opened:
                file.close()
            raise
        self.metadata: Metadata = opened[0].metadata
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {n: w.info for n, w in self.weights.items()}
        )
        self.arch: str = self.keys_of("").str(keys.GENERAL_ARCHITECTURE)

    @property
    def n_params(self) -> int:
        """Elements of all tensors."""
        return sum(t.n_elements for t in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def type_counts(self) -> Mapping[str, int]:
        """Number of tensors of each element type, the most frequent first."""
        return dict(Counter(t.dtype for t in self.tensors.values()).most_common())

    def keys_of(self, arch: str | None = None) -> KeyReader:
        """A reader of the metadata; its `{arch}` is the file's architecture."""
        return KeyReader(self.arch if arch is None else arch, self.files[0].metadata)

    def close(self) -> None:
        """Close the files; metadata stay readable while somebody holds them, mapped weights stay too."""
        for file in self.files:
            file.close_data()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<GGUFReader {self.arch}: {len(self.files)} files, {len(self.tensors)} tensors, "
            f"{self.n_params / 1e6:.1f} M parameters, {self.nbytes / 2**20:.1f} MiB>"
        )

    def _open_shards(self, opened: list[GGUFFile], shards: Sequence[str | os.PathLike[str]] | None) -> None:
        first = KeyReader("", opened[0].metadata)
        n_split = first.u32(keys.SPLIT_COUNT, 0)
        if n_split <= 1:
            return
        if first.u32(keys.SPLIT_NO) != 0:
            raise GGUFFormatError(
                f"{self.path}: shard {first.u32(keys.SPLIT_NO)} of a split model; open the first one",
                path=self.path,
            )
        names = (
            [self.path, *(os.fspath(s) for s in shards)]
            if shards is not None
            else shard_paths(self.path, n_split)
        )
        if len(names) != n_split:
            raise GGUFFormatError(
                f"{self.path}: {len(names)} shards given, the model has {n_split}",
                path=self.path,
                n_split=n_split,
            )
        for i, name in enumerate(names[1:], 1):
            opened.append(GGUFFile(name))
            found = KeyReader("", opened[-1].metadata).u32(keys.SPLIT_NO)
            if found != i:
                raise GGUFFormatError(
                    f"{name}: this is shard {found}, expected shard {i}", path=name, found=found
                )

    def _join(self) -> dict[str, Weight]:
        weights: dict[str, Weight] = {}
        for i, file in enumerate(self.files):
            for name, info in file.tensors.items():
                if name in weights:
                    raise GGUFTensorError(
                        f"tensor '{name}' is in shard {weights[name].file} and in shard {i}", tensor=name
                    )
                weights[name] = Weight(info, i, file.file_offset(name))
        return weights

    def _check_count(self) -> None:
        if len(self.files) == 1:
            return
        kr = KeyReader("", self.files[0].metadata)
        n = kr.u32(keys.SPLIT_TENSORS_COUNT, len(self.weights))
        if n != len(self.weights):
            raise GGUFFormatError(
                f"{self.path}: the shards have {len(self.weights)} tensors, expected {n}",
                path=self.path,
                expected=n,
            )


def shard_paths(path: str, n_split: int) -> list[str]:
    """All shards of `NAME-00001-of-00003.gguf`, first to last. Upstream: llama_split_path.

    Raises: GGUFFormatError if the name does not follow that pattern.
    """
    folder, name = os.path.split(path)
    match = _SHARD.match(name)
    if match is None or int(match["no"]) != 1 or int(match["count"]) != n_split:
        raise GGUFFormatError(
            f"{path}: the first of {n_split} shards must be named NAME-00001-of-{n_split:05d}.gguf, "
            "or the other shards be given",
            path=path,
        )
    return [
        os.path.join(folder, f"{match['prefix']}-{i:05d}-of-{n_split:05d}.gguf")
        for i in range(1, n_split + 1)
    ]
