"""The kinds of memory that random scripts run over: tiny models, settings, and what each kind cannot be asked.

Knows no step. Windows are 8 tokens long and a window part has 256 cells, so that scripts wrap around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tests.oracle.tiny_models import TinyModel
from tests.side_by_side import Setup

SLIM = {"embedding_length": 128, "feed_forward_length": 160}
"""Heads stay 64 wide, so that quantised caches are rotated."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Models and settings; script number n takes the n-th of their pairs.

    shifts: whether positions may be moved (M-RoPE: a typed error here, an abort in the reference).
    first: positions at which a new sequence may start.
    """

    models: tuple[TinyModel, ...]
    setups: tuple[Setup, ...]
    shifts: bool = True
    first: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 3, 17, 8180)

    def case(self, number: int) -> tuple[TinyModel, Setup]:
        """The pair of script `number`; every model meets every setting."""
        n = len(self.models) * len(self.setups)
        return self.models[number % n // len(self.setups)], self.setups[number % len(self.setups)]


def unified(**changes: object) -> Setup:
    return dataclasses.replace(Setup(n_seq_max=3, kv_unified=True), **changes)  # type: ignore[arg-type]


def streams(**changes: object) -> Setup:
    return dataclasses.replace(Setup(n_ctx=3 * 256, n_seq_max=3), **changes)  # type: ignore[arg-type]


UNIFIED = (
    unified(n_ubatch=16),
    unified(n_ubatch=7, flash_attn="on"),
    unified(n_ubatch=64, type_k="f32", type_v="f32"),
    unified(n_ubatch=16, type_k="q8_0", type_v="q4_0", flash_attn="on"),
    unified(n_ubatch=16, type_k="q4_0"),
)
STREAMS = (
    streams(n_ubatch=16),
    streams(n_ubatch=9, flash_attn="on"),
    streams(n_ubatch=32, type_k="f32", type_v="f32", flash_attn="on"),
    streams(n_ubatch=16, type_k="q8_0", type_v="q8_0", flash_attn="on"),
    streams(n_ubatch=5, type_k="q4_0"),
)
FLOATS = (UNIFIED[0], UNIFIED[1], UNIFIED[2])


def windowed(setup: Setup) -> Setup:
    """512 cells a stream in the full part, 256 in the window part."""
    return dataclasses.replace(setup, n_ctx=512 * (1 if setup.kv_unified else setup.n_seq_max))


def tiny(recipe: str, **keys: object) -> TinyModel:
    return TinyModel(recipe, keys={**SLIM, **keys})  # type: ignore[arg-type]


def slim_heads(recipe: str, n_head_kv: int | list[int] = 1, **keys: object) -> TinyModel:
    """As `tiny`, for architectures whose heads together are as wide as the model."""
    return tiny(recipe, **{"attention.head_count": 2, "attention.head_count_kv": n_head_kv, **keys})


SLIDING = (tiny("gemma3"), tiny("gemma2"), tiny("gpt-oss"))
EVERY_OTHER = [0, 1, 0, 1]
STATES = (
    Setup(n_seq_max=4, n_ubatch=16),
    Setup(n_seq_max=4, n_ubatch=5, kv_unified=True),
    Setup(n_seq_max=3, n_ubatch=64, flash_attn="on"),
)

KINDS: Mapping[str, Kind] = {
    "kv-unified": Kind((tiny("llama"), tiny("qwen3"), slim_heads("phi3")), UNIFIED),
    "kv-streams": Kind((tiny("llama"), tiny("llama-yarn"), slim_heads("phi3")), STREAMS),
    "iswa-unified": Kind(SLIDING, tuple(windowed(s) for s in UNIFIED)),
    "iswa-streams": Kind(SLIDING, tuple(windowed(s) for s in STREAMS)),
    "iswa-chunked": Kind((tiny("llama4"),), (*UNIFIED, *STREAMS), first=(0, 8180, 8170, 8190)),
    "swa-full": Kind(
        SLIDING[:2], tuple(dataclasses.replace(s, swa_full=True) for s in (*UNIFIED[:4], *STREAMS[:3]))
    ),
    "mla": Kind((tiny("deepseek2"),), (*FLOATS, *STREAMS[:3])),
    "mrope": Kind((slim_heads("qwen2vl"),), (*UNIFIED, *STREAMS), shifts=False),
    "alibi": Kind((slim_heads("bloom", 2),), (*UNIFIED, *STREAMS)),
    "encoder-decoder": Kind((tiny("t5"),), (*FLOATS, UNIFIED[4]), first=(0, 0, 0, 5)),
    "recurrent": Kind(
        (tiny("mamba", **{"ssm.inner_size": 256}), tiny("mamba2", **{"ssm.inner_size": 256})), STATES
    ),
    "hybrid": Kind(
        (slim_heads("jamba", EVERY_OTHER, **{"ssm.inner_size": 256}), slim_heads("lfm2", EVERY_OTHER)),
        (*(dataclasses.replace(s, n_seq_max=3) for s in UNIFIED[:4]), *STREAMS[:3]),
    ),
}
