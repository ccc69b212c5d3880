"""The memories that states are taken of: a tiny model and settings for each kind, and a look at every byte of one.

Windows are 8 tokens long. Knows no test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import pyggmlkv
from pyggmlkv.memory.recurrent.memory import RecurrentMemory
from pyggmlkv.state.live import Live
from tests.oracle.tiny_models import TinyModel
from tests.side_by_side import Pair, Setup

N_SEQ = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A model, settings for three sequences, and the memory that it must get."""

    model: TinyModel
    setup: Setup
    memory: str


def unified(**changes: Any) -> Setup:
    return dataclasses.replace(Setup(n_seq_max=N_SEQ, kv_unified=True, n_ubatch=16), **changes)


def streams(**changes: Any) -> Setup:
    return dataclasses.replace(Setup(n_ctx=256 * N_SEQ, n_seq_max=N_SEQ, n_ubatch=16), **changes)


SLIM: dict[str, Any] = {"embedding_length": 128, "feed_forward_length": 160}


def tiny(recipe: str, **keys: Any) -> TinyModel:
    return TinyModel(recipe, keys={**SLIM, **keys})


KINDS = {
    "kv": Kind(tiny("llama"), unified(), "kv"),
    "kv-rows": Kind(tiny("llama"), unified(flash_attn="on"), "kv"),
    "kv-streams": Kind(tiny("llama"), streams(flash_attn="on"), "kv"),
    "kv-streams-transposed": Kind(tiny("qwen3"), streams(), "kv"),
    "kv-q8-q4": Kind(tiny("llama"), streams(type_k="q8_0", type_v="q4_0", flash_attn="on"), "kv"),
    "kv-q4-transposed": Kind(tiny("llama"), unified(type_k="q4_0", type_v="f32"), "kv"),
    "mla": Kind(TinyModel("deepseek2"), unified(), "kv"),
    "m-rope": Kind(TinyModel("qwen2vl"), unified(flash_attn="on"), "kv"),
    "m-rope-streams": Kind(TinyModel("qwen2vl"), streams(), "kv"),
    "iswa": Kind(tiny("gemma2"), unified(), "iswa"),
    "iswa-streams": Kind(tiny("gemma3"), streams(flash_attn="on"), "iswa"),
    "recurrent": Kind(TinyModel("mamba"), streams(), "recurrent"),
    "recurrent-2": Kind(TinyModel("mamba2"), streams(), "recurrent"),
    "hybrid": Kind(TinyModel("jamba"), streams(), "hybrid"),
    "hybrid-unified": Kind(TinyModel("lfm2"), unified(flash_attn="on"), "hybrid"),
    "hybrid-iswa": Kind(
        TinyModel("lfm2", keys={"attention.sliding_window": 8}), unified(flash_attn="on"), "hybrid-iswa"
    ),
}


def text(n: int, seed: int) -> list[int]:
    """n token ids, the same for the same seed."""
    return [int(t) for t in np.random.default_rng([11, seed]).integers(0, 128, n)]


def decode(pair: Pair, n: int, seq_id: int, seed: int, logits: str = "last") -> None:
    """n more tokens of a sequence on both sides."""
    pair.decode(text(n, seed), seq_id=seq_id, logits=logits)


def image(pair: Pair, seq_id: int, seed: int) -> None:
    """A picture of 2 x 3 embeddings on both sides: one point in time, rows and columns of their own (M-RoPE)."""
    last = pair.reference.memory.seq_pos_max(seq_id)
    start = 0 if last is None else last + 1
    row, column = (a.reshape(-1) + start for a in np.mgrid[0:2, 0:3])
    pos = np.stack([np.full(6, start), row, column, 0 * row])
    embd = np.random.default_rng(seed).normal(size=(6, pair.models.ours.hparams.n_embd)).astype(np.float32)
    pair.reference.decode(pos=pos, seq_id=seq_id, embd=embd)
    pair.ours.decode(pyggmlkv.Batch(pos=pos, seq_id=seq_id, embd=embd))
    pair.comparison.add(pair.ours.logits, pair.reference.logits, "decode of an image")


def everything(ctx: pyggmlkv.Context) -> list[Any]:
    """Every cell, head, position and tensor byte of a context's memory."""
    memory = ctx.memory
    assert memory is not None
    found: list[Any] = [(memory.seq_pos_min(s), memory.seq_pos_max(s)) for s in range(N_SEQ)]
    for part in Live("", memory, 0).parts():
        if isinstance(part, RecurrentMemory):
            cells = part.states
            table = (cells.pos, cells.src, cells.tail, cells.rs_idx, cells.rs_pos, cells.seq)
            found += [a.tobytes() for a in table] + [cells.head, cells.n, cells.used, cells.rs_z]
            found += [t.get_bytes() for pair in part.tensors.values() for t in pair]
            continue
        streams = part.streams
        found += [list(streams.heads), list(streams.stream_copies)]
        for c in streams.cells:
            found += [
                c.pos.tobytes(),
                c.shift.tobytes(),
                c.seq.tobytes(),
                c.n_used,
                c.used_max_p1,
                c.has_shift,
            ]
            found += [b"" if a is None else a.tobytes() for a in (c.ext_x, c.ext_y)]
            found += [c.seq_n_cells(s) for s in range(N_SEQ)]
        for layer in part.storage.owners:
            found += [t.get_bytes() for t in (layer.k, layer.v) if t is not None]
    return found


def finite(ctx: pyggmlkv.Context) -> bool:
    """Whether no float that the memory stores, in used or free cells, is infinite or not a number."""
    assert ctx.memory is not None
    for part in Live("", ctx.memory, 0).parts():
        if isinstance(part, RecurrentMemory):
            tensors = [t for pair in part.tensors.values() for t in pair]
        else:
            tensors = [t for layer in part.storage.owners for t in (layer.k, layer.v) if t is not None]
        if not all(np.isfinite(t.to_numpy()).all() for t in tensors if t.n_elements):
            return False
    return True
