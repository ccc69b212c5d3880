"""Names shared by all layers: element types by ggml's own names, as strings. Numbers live in the compiled header only."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

DType: TypeAlias = str
"""A ggml element type by name: `f32`, `f16`, `bf16`, `q8_0`, `i32`, ... (`ggml_type_name`)."""

FlashAttn: TypeAlias = Literal["auto", "on", "off"]

I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
U64: TypeAlias = npt.NDArray[np.uint64]
F32: TypeAlias = npt.NDArray[np.float32]
Bool: TypeAlias = npt.NDArray[np.bool_]

MAX_SEQ = 256
"""Sequence ids a unified memory accepts: 0 .. 255.  Upstream: LLAMA_MAX_SEQ."""
