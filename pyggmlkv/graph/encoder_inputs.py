"""Inputs of graphs without a cache: token masks, cross attention, relative positions, pooling.

Filled from the ubatch and from what an encoder left; memory is not asked.
Upstream: llm_graph_input_attn_no_cache, _attn_cross, _cross_embd, _pos_bucket, _mean, _cls.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.binding import Tensor, TensorArena
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.graph.cross import Cross
from pyggmlkv.graph.inputs import HostArray
from pyggmlkv.memory.buckets import fill_pos_bucket_no_cache
from pyggmlkv.memory.mask import MaskRule, SlidingWindow, fill_cross_mask, fill_no_cache_mask
from pyggmlkv.memory.protocol import AttentionStep, Step


class NoCacheInput:
    """Masks of tokens against tokens [n_tokens, n_tokens]: full, and windowed where the model has sliding layers."""

    def __init__(
        self, ctx: TensorArena, n_tokens: int, hp: HParams, *, flash_attn: bool, causal: bool
    ) -> None:
        dtype = "f16" if flash_attn else "f32"
        windows = [SlidingWindow()]
        if hp.swa_type != "none":
            windows.append(SlidingWindow(hp.swa_type, hp.n_swa))
        self._rules = [MaskRule(causal, window, hp.use_alibi) for window in windows]
        self._masks = [HostArray(ctx.new_tensor(dtype, n_tokens, n_tokens, 1, 1)) for _ in windows]

    def mask(self, swa: bool) -> Tensor:
        """The mask of a sliding or of a full layer."""
        return self._masks[1 if swa else 0].tensor

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        for mask, rule in zip(self._masks, self._rules, strict=True):
            if mask.is_used:
                fill_no_cache_mask(mask.array.reshape(ubatch.n_tokens, -1), ubatch, rule)
                mask.commit()


class CrossInput:
    """Encoder rows [n_embd, n_enc] f32 and the mask [n_enc, n_tokens] that says who may see them."""

    def __init__(self, ctx: TensorArena, n_tokens: int, cross: Cross, *, flash_attn: bool) -> None:
        self._cross = cross
        self._embd = HostArray(ctx.new_tensor("f32", cross.n_embd, cross.n_enc))
        self._mask = HostArray(ctx.new_tensor("f16" if flash_attn else "f32", cross.n_enc, n_tokens, 1, 1))

    @property
    def embd(self) -> Tensor:
        return self._embd.tensor

    @property
    def mask(self) -> Tensor:
        return self._mask.tensor

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        if self._cross.embd is not None and self._embd.is_used:
            self._embd.array.reshape(self._cross.embd.shape)[...] = self._cross.embd
            self._embd.commit()
        if self._cross.seq_mask is not None and self._mask.is_used:
            fill_cross_mask(self._mask.array.reshape(ubatch.n_tokens, -1), self._cross.seq_mask, ubatch)
            self._mask.commit()


class PosBucketInput:
    """Relative position buckets: [n_kv, n_tokens] i32 over a cache, [n_tokens, n_tokens] without one."""

    def __init__(self, ctx: TensorArena, ubatch: UBatch, step: AttentionStep | None, n_buckets: int) -> None:
        n_kv = ubatch.n_tokens if step is None else step.n_kv
        self._cached = step is not None
        self._n_buckets = n_buckets
        self._buckets = HostArray(ctx.new_tensor("i32", n_kv, ubatch.n_tokens))

    @property
    def tensor(self) -> Tensor:
        return self._buckets.tensor

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        if not self._buckets.is_used:
            return
        out = self._buckets.array.reshape(ubatch.n_tokens, -1)
        if self._cached:
            cast(AttentionStep, step).fill_pos_bucket(out)
        else:
            fill_pos_bucket_no_cache(out, ubatch, self._n_buckets)
        self._buckets.commit()


class MeanInput:
    """Weights of a mean over each sequence [n_tokens, n_seqs_unq] f32.  Upstream: llm_graph_input_mean."""

    def __init__(self, ctx: TensorArena, ubatch: UBatch) -> None:
        self._mean = HostArray(ctx.new_tensor("f32", ubatch.n_tokens, ubatch.n_seqs_unq))

    @property
    def tensor(self) -> Tensor:
        return self._mean.tensor

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        member = members(ubatch)
        counts = member.sum(axis=1, keepdims=True).astype(np.float32)
        weight = np.divide(np.float32(1.0), counts, out=np.zeros_like(counts), where=counts > 0)
        self._mean.array.reshape(member.shape)[...] = np.where(member, weight, np.float32(0.0))
        self._mean.commit()


class ClsInput:
    """The row of each sequence's first or last token [n_seqs_unq] i32.  Upstream: llm_graph_input_cls."""

    def __init__(self, ctx: TensorArena, ubatch: UBatch, *, last: bool) -> None:
        self._cls = HostArray(ctx.new_tensor("i32", ubatch.n_seqs_unq))
        self._last = last

    @property
    def tensor(self) -> Tensor:
        return self._cls.tensor

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        member, pos = members(ubatch), ubatch.pos[0].astype(np.int64)
        if self._last:
            at = np.where(member, pos, -1)[:, ::-1].argmax(axis=1)
            rows = ubatch.n_tokens - 1 - at
        else:
            rows = np.where(member, pos, np.iinfo(np.int64).max).argmin(axis=1)
        self._cls.array[:] = rows
        self._cls.commit()


def members(ubatch: UBatch) -> np.ndarray:
    """Which tokens belong to which sequence: (n_seqs_unq, n_tokens) bool, sequences ascending."""
    ids = ubatch.seq_id_unq.astype(np.int64)
    words = ubatch.seq_mask[:, ids >> 6].T
    member: np.ndarray = (words >> (ids & 63).astype(np.uint64)[:, None]) & np.uint64(1) != 0
    return member
