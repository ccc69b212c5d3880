"""Every context parameter the tests turn, by the public API's names and values, as llama.cpp's struct.

Upstream: llama.h, llama_context_params.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .library import Library, OracleError

FLASH_ATTENTION = {"auto": "AUTO", "off": "DISABLED", "on": "ENABLED", False: "DISABLED", True: "ENABLED"}


@dataclasses.dataclass(frozen=True, slots=True)
class ContextParams:
    """What a context is made with. `None` leaves the reference's default.

    capture: asked with the name of each graph node (and of its inputs); those it wants land in
    `RefContext.nodes`.
    """

    n_ctx: int | None = None
    n_batch: int | None = 2048
    n_ubatch: int | None = 512
    n_seq_max: int | None = 1
    n_rs_seq: int | None = None
    n_threads: int | None = None
    n_threads_batch: int | None = None
    flash_attn: str | bool = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    kv_unified: bool = False
    swa_full: bool = False
    offload_kqv: bool = True
    op_offload: bool = True
    embeddings: bool = False
    pooling: str | None = None
    attention: str | None = None
    rope_scaling: str | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_orig_ctx: int | None = None
    capture: Callable[[str], bool] | None = None


COPIED = (
    "n_ctx",
    "n_batch",
    "n_ubatch",
    "n_seq_max",
    "n_rs_seq",
    "n_threads",
    "n_threads_batch",
    "kv_unified",
    "swa_full",
    "offload_kqv",
    "op_offload",
    "embeddings",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)


def enum_value(library: Library, prefix: str, name: str) -> int:
    """The value of a llama.h constant, by its last words in any case."""
    try:
        return int(getattr(library.lib, f"{prefix}_{name.upper()}"))
    except AttributeError:
        raise OracleError(f"llama.h has no {prefix}_{name.upper()}") from None


def to_struct(library: Library, params: ContextParams) -> Any:
    """`llama_context_params` with everything given filled in."""
    struct = library.lib.llama_context_default_params()
    for name in COPIED:
        value = getattr(params, name)
        if value is not None:
            setattr(struct, name, value)
    if params.n_threads is not None and params.n_threads_batch is None:
        struct.n_threads_batch = params.n_threads
    struct.no_perf = False
    struct.flash_attn_type = enum_value(library, "LLAMA_FLASH_ATTN_TYPE", FLASH_ATTENTION[params.flash_attn])
    struct.type_k = library.type_number(params.type_k)
    struct.type_v = library.type_number(params.type_v)
    if params.pooling is not None:
        struct.pooling_type = enum_value(library, "LLAMA_POOLING_TYPE", params.pooling)
    if params.attention is not None:
        struct.attention_type = enum_value(library, "LLAMA_ATTENTION_TYPE", params.attention)
    if params.rope_scaling is not None:
        struct.rope_scaling_type = enum_value(library, "LLAMA_ROPE_SCALING_TYPE", params.rope_scaling)
    return struct
