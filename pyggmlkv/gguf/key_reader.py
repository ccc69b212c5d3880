"""Typed reads of a model's metadata: a getter a type; errors name the full key, what was expected and found.

Knows no architecture; `{arch}` in a key is filled in here. Differs: any integer type will do for an integer
key if the value fits (upstream wants u32). Upstream: llama-model-loader.cpp, get_key, get_key_or_arr.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, NoReturn, TypeVar

import numpy as np

from ..binding.gguf_header import Metadata, MetadataValue
from ..errors import GGUFKeyError
from . import keys
from .keys import full_key

T = TypeVar("T")


class Required(Enum):
    """The default that says: there is none, the key must be there."""

    REQUIRED = "required"


REQUIRED: Final = Required.REQUIRED


def describe_type(value: MetadataValue) -> str:
    """A value's type in words: `a string`, `an array of 30 int32`."""
    if isinstance(value, builtins.bool):
        return f"a bool ({value})"
    if isinstance(value, int):
        return f"an integer ({value})"
    if isinstance(value, float):
        return f"a float ({value:g})"
    if isinstance(value, builtins.str):
        return f"a string ({value[:40]!r})"
    if isinstance(value, list):
        return f"an array of {len(value)} strings"
    return f"an array of {len(value)} {value.dtype}"


class KeyReader:
    """Reads the keys of one architecture. A getter takes a key of `keys.py` and, if optional, a default."""

    def __init__(self, arch: builtins.str, metadata: Mapping[builtins.str, MetadataValue]) -> None:
        self.arch = arch
        self.metadata = metadata

    def key(self, key: builtins.str) -> builtins.str:
        """The full name of a key."""
        return full_key(key, self.arch)

    def has(self, key: builtins.str) -> builtins.bool:
        return self.key(key) in self.metadata

    def refuse(self, key: builtins.str, expected: builtins.str, found: builtins.str) -> NoReturn:
        """Raise for a key whose value does not do."""
        name = self.key(key)
        raise GGUFKeyError(
            f"metadata key '{name}': expected {expected}, found {found}",
            key=name,
            expected=expected,
            found=found,
        )

    def _find(self, key: builtins.str, default: T | Required, expected: builtins.str) -> MetadataValue | T:
        name = self.key(key)
        if name in self.metadata:
            return self.metadata[name]
        if isinstance(default, Required):
            raise GGUFKeyError(
                f"metadata key '{name}' is missing (expected {expected})",
                key=name,
                expected=expected,
                found=None,
            )
        return default

    def _integer(self, key: builtins.str, value: MetadataValue, low: int, high: int) -> int:
        expected = f"an integer of {low} to {high}"
        if isinstance(value, builtins.bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(key, expected, describe_type(value))
        return value

    def u32(self, key: builtins.str, default: T | Required = REQUIRED) -> int | T:
        if not self.has(key) and not isinstance(default, Required):
            return default
        return self._integer(key, self._find(key, REQUIRED, "an integer"), 0, (1 << 32) - 1)

    def i32(self, key: builtins.str, default: T | Required = REQUIRED) -> int | T:
        if not self.has(key) and not isinstance(default, Required):
            return default
        return self._integer(key, self._find(key, REQUIRED, "an integer"), -(1 << 31), (1 << 31) - 1)

    def u32_if_scalar(self, key: builtins.str, default: T) -> int | T:
        """Like `u32`, but an array counts as missing. Upstream: get_key_or_arr(kid, uint32_t &)."""
        if self.has(key) and isinstance(self.metadata[self.key(key)], (list, np.ndarray)):
            return default
        return self.u32(key, default)

    def f32(self, key: builtins.str, default: T | Required = REQUIRED) -> float | T:
        if not self.has(key) and not isinstance(default, Required):
            return default
        value = self._find(key, REQUIRED, "a float")
        if not isinstance(value, float):
            self.refuse(key, "a float", describe_type(value))
        return float(np.float32(value))

    def choice(
        self, key: builtins.str, names: Sequence[builtins.str], default: T | Required = REQUIRED
    ) -> builtins.str | T:
        """An enum kept as a number: the name at that place in `names`."""
        if not self.has(key) and not isinstance(default, Required):
            return default
        number = self.u32(key)
        if number >= len(names):
            self.refuse(key, f"a number below {len(names)} ({', '.join(names)})", builtins.str(number))
        return names[number]

    def u32_per_layer(
        self, key: builtins.str, n_layer: int, default: T | Required = REQUIRED
    ) -> tuple[int, ...] | T:
        """One number for all layers, or an array of exactly `n_layer` (integers or bools).

        Upstream: get_key_or_arr.
        """
        if not self.has(key) and not isinstance(default, Required):
            return default
        expected = f"an integer or an array of {n_layer} integers"
        value = self._find(key, REQUIRED, expected)
        if not isinstance(value, (list, np.ndarray)):
            return (self._integer(key, value, 0, (1 << 32) - 1),) * n_layer
        if isinstance(value, list) or value.dtype.kind not in "iub" or len(value) != n_layer:
            self.refuse(key, expected, describe_type(value))
        return tuple(self._integer(key, int(v), 0, (1 << 32) - 1) for v in value)

    def f32_per_layer(
        self, key: builtins.str, n_layer: int, default: T | Required = REQUIRED
    ) -> tuple[float, ...] | T:
        """One number for all layers, or an array of exactly `n_layer` floats. Upstream: get_key_or_arr."""
        if not self.has(key) and not isinstance(default, Required):
            return default
        expected = f"a float or an array of {n_layer} floats"
        value = self._find(key, REQUIRED, expected)
        if not isinstance(value, (list, np.ndarray)):
            return (self.f32(key),) * n_layer
        if isinstance(value, list) or value.dtype.kind != "f" or len(value) != n_layer:
            self.refuse(key, expected, describe_type(value))
        return tuple(float(np.float32(v)) for v in value)

    def i32_array(self, key: builtins.str, default: T | Required = REQUIRED) -> tuple[int, ...] | T:
        """An array of integers of any length. Upstream: get_arr."""
        if not self.has(key) and not isinstance(default, Required):
            return default
        value = self._find(key, REQUIRED, "an array of integers")
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            self.refuse(key, "an array of integers", describe_type(value))
        return tuple(int(v) for v in value)

    def strings(self, key: builtins.str, default: T | Required = REQUIRED) -> list[builtins.str] | T:
        if not self.has(key) and not isinstance(default, Required):
            return default
        value = self._find(key, REQUIRED, "an array of strings")
        if not isinstance(value, list):
            self.refuse(key, "an array of strings", describe_type(value))
        return value

    def arr_n(self, key: builtins.str, default: T | Required = REQUIRED) -> int | T:
        """The length of an array, not decoded where the metadata come from a file. Upstream: get_arr_n."""
        if not self.has(key) and not isinstance(default, Required):
            return default
        name = self.key(key)
        if isinstance(self.metadata, Metadata) and name in self.metadata:
            n = self.metadata.array_length(name)
            if n is not None:
                return n
        value = self._find(key, REQUIRED, "an array")
        if not isinstance(value, (list, np.ndarray)):
            self.refuse(key, "an array", describe_type(value))
        return len(value)

    def n_vocab(self) -> int:
        """Tokens of the vocabulary: the list of tokens, or the size alone in a file without a tokenizer.

        Upstream: llama-vocab.cpp, llama_vocab::impl::load.
        """
        model = self.str(keys.TOKENIZER_MODEL, "none")
        if model in ("none", "no_vocab"):
            n = self.u32(keys.VOCAB_SIZE, None)
            return self.arr_n(keys.TOKENIZER_LIST, 0) if n is None else n
        return self.arr_n(keys.TOKENIZER_LIST)

    def bool(self, key: builtins.str, default: T | Required = REQUIRED) -> builtins.bool | T:
        if not self.has(key) and not isinstance(default, Required):
            return default
        value = self._find(key, REQUIRED, "a bool")
        if not isinstance(value, builtins.bool):
            self.refuse(key, "a bool", describe_type(value))
        return value

    def str(self, key: builtins.str, default: T | Required = REQUIRED) -> builtins.str | T:
        if not self.has(key) and not isinstance(default, Required):
            return default
        value = self._find(key, REQUIRED, "a string")
        if not isinstance(value, builtins.str):
            self.refuse(key, "a string", describe_type(value))
        return value
