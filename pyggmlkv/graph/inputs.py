"""Graph inputs: each creates its tensors when a graph is built and fills them before every run.

A reused graph runs with nothing but these fills, so they are vectorised and write straight into host memory.
Knows memory by its protocol only.  Upstream: llm_graph_input_*.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.binding import Tensor, TensorArena
from pyggmlkv.errors import BindingError
from pyggmlkv.memory.protocol import AttentionStep, HybridStep, RecurrentStep, SlidingStep, Step


class GraphInput(Protocol):
    """Something to fill before a run.  Upstream: llm_graph_input_i::set_input."""

    def fill(self, ubatch: UBatch, step: Step | None) -> None: ...


class HostArray:
    """An input tensor as a NumPy array: its own memory where the host can write there, else a staging copy.

    `array` is valid once the graph is allocated; `commit` uploads a staging copy and is free otherwise.
    """

    __slots__ = ("_array", "_staged", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        tensor.set_input()
        self.tensor = tensor
        self._array: npt.NDArray[Any] | None = None
        self._staged = False

    @property
    def is_used(self) -> bool:
        """False for an input that no node of the graph reads: the allocator gave it no memory."""
        return self.tensor.is_allocated

    @property
    def array(self) -> npt.NDArray[Any]:
        if self._array is None:
            try:
                self._array = self.tensor.numpy()
            except BindingError:
                self._staged = True
                self._array = self.tensor.to_numpy()
        return self._array

    def commit(self) -> None:
        if self._staged and self._array is not None:
            self.tensor.set(self._array)


class TokensInput:
    """Token ids [n_tokens] i32, or embedding rows [n_embd, n_tokens] f32.  Upstream: llm_graph_input_embd."""

    def __init__(self, ctx: TensorArena, ubatch: UBatch, n_embd: int) -> None:
        n = ubatch.n_tokens
        self.tokens = HostArray(ctx.new_tensor("i32", n)) if ubatch.token is not None else None
        self.embd = HostArray(ctx.new_tensor("f32", n_embd, n)) if ubatch.token is None else None

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        if self.tokens is not None:
            self.tokens.array[:] = ubatch.token
            self.tokens.commit()
        if self.embd is not None and ubatch.embd is not None:
            self.embd.array[...] = np.reshape(ubatch.embd, self.embd.array.shape)
            self.embd.commit()


class PosInput:
    """Positions [n_tokens * n_pos] i32; text tokens of an M-RoPE model get (p, p, p, 0).

    Upstream: llm_graph_input_pos.
    """

    def __init__(self, ctx: TensorArena, n_tokens: int, n_pos: int) -> None:
        self._pos = HostArray(ctx.new_tensor("i32", n_tokens * n_pos))
        self._n_pos = n_pos

    @property
    def tensor(self) -> Tensor:
        return self._pos.tensor

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        if not self._pos.is_used:
            return
        out = self._pos.array
        if self._n_pos == 4 and ubatch.token is not None and ubatch.is_text_pos:
            rows = out.reshape(4, -1)
            rows[:3] = ubatch.pos[0]
            rows[3] = 0
        else:
            out[:] = ubatch.pos[: self._n_pos].reshape(-1)
        self._pos.commit()


class OutIdsInput:
    """Rows of the ubatch that become outputs [n_outputs] i32.  Upstream: llm_graph_input_out_ids."""

    def __init__(self, ctx: TensorArena, n_outputs: int) -> None:
        self._ids = HostArray(ctx.new_tensor("i32", n_outputs))
        self._n_outputs = n_outputs

    @property
    def tensor(self) -> Tensor:
        return self._ids.tensor

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        if not self._ids.is_used:
            return
        if self._n_outputs == ubatch.n_tokens:
            self._ids.array[:] = np.arange(ubatch.n_tokens, dtype=np.int32)
        else:
            self._ids.array[:] = np.flatnonzero(ubatch.output)
        self._ids.commit()


class AttnScaleInput:
    """Temperature of each query by its position [1, 1, n_tokens] f32.  Upstream: llm_graph_input_attn_temp."""

    def __init__(
        self, ctx: TensorArena, n_tokens: int, floor_scale: int, scale: float, offset: float
    ) -> None:
        self._scale = HostArray(ctx.new_tensor("f32", 1, 1, n_tokens, name="attn_scale"))
        self._by = (floor_scale, scale, offset)

    @property
    def tensor(self) -> Tensor:
        return self._scale.tensor

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        if not self._scale.is_used:
            return
        floor_scale, scale, offset = self._by
        pos = ubatch.pos[0].astype(np.float32) + np.float32(offset)
        steps = np.floor(pos / np.float32(floor_scale)).astype(np.float64)
        self._scale.array[...] = (np.log(steps + 1.0) * np.float32(scale) + 1.0).reshape(
            self._scale.array.shape
        )
        self._scale.commit()


class MaskInput:
    """KQ mask [n_kv, n_tokens / n_stream, 1, n_stream], f16 for flash attention, else f32.

    Upstream: build_attn_inp_kq_mask.
    """

    def __init__(self, ctx: TensorArena, step: AttentionStep, n_tokens: int, flash_attn: bool) -> None:
        ns = step.n_stream
        shape = (step.n_kv, n_tokens // ns, 1, ns)
        self._mask = HostArray(
            ctx.new_tensor("f16" if flash_attn else "f32", *shape, name="attn_inp_kq_mask")
        )
        self._shape = (ns, n_tokens // ns, step.n_kv)

    @property
    def tensor(self) -> Tensor:
        return self._mask.tensor

    def fill(self, step: AttentionStep, causal: bool) -> None:
        if self._mask.is_used:
            step.fill_mask(self._mask.array.reshape(self._shape), causal)
            self._mask.commit()


class KVInput:
    """Cache write indices, mask and rotations of one attention memory.

    `k_idxs` [n_tokens] i64; `v_idxs` [n_tokens] i64, or one index an element when V is transposed; None for a memory
    without V. `step` is what the graph is built with.  Upstream: llm_graph_input_attn_kv, llm_graph_input_attn_k.
    """

    def __init__(
        self, ctx: TensorArena, step: AttentionStep, flash_attn: bool, causal: bool, has_v: bool
    ) -> None:
        n_tokens = step.ubatch.n_tokens
        self.step = step
        self._causal = causal
        self.k_idxs = HostArray(ctx.new_tensor("i64", n_tokens))
        self.v_idxs = HostArray(ctx.new_tensor("i64", step.n_v_idxs)) if has_v else None
        self.mask = MaskInput(ctx, step, n_tokens, flash_attn)
        self.k_rot = _rotation(ctx, step.k_rot, "attn_inp_k_rot") if has_v else None
        self.v_rot = _rotation(ctx, step.v_rot, "attn_inp_v_rot") if has_v else None

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        self.fill_from(cast(AttentionStep, step))

    def fill_from(self, step: AttentionStep) -> None:
        if self.k_idxs.is_used:
            step.fill_k_idxs(self.k_idxs.array)
            self.k_idxs.commit()
        if self.v_idxs is not None and self.v_idxs.is_used:
            step.fill_v_idxs(self.v_idxs.array)
            self.v_idxs.commit()
        self.mask.fill(step, self._causal)
        for rot, matrix in ((self.k_rot, step.k_rot), (self.v_rot, step.v_rot)):
            if rot is not None and rot.is_used:
                rot.array[...] = matrix
                rot.commit()


def _rotation(ctx: TensorArena, matrix: npt.NDArray[np.float32] | None, name: str) -> HostArray | None:
    if matrix is None:
        return None
    n = matrix.shape[0]
    return HostArray(ctx.new_tensor("f32", n, n, name=name))


class SlidingInput:
    """The inputs of both halves of a sliding-window memory.  Upstream: llm_graph_input_attn_kv_iswa."""

    def __init__(self, base: KVInput, swa: KVInput) -> None:
        self.base = base
        self.swa = swa

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        self.fill_from(cast(SlidingStep, step))

    def fill_from(self, step: SlidingStep) -> None:
        self.base.fill_from(step.base)
        self.swa.fill_from(step.swa)


class RecurrentInput:
    """Which state each cell starts from: `s_copy` [n_rs] i32 and its two views.  Upstream: llm_graph_input_rs."""

    def __init__(self, ctx: TensorArena, step: RecurrentStep) -> None:
        from pyggmlkv.binding import ops

        n_rs, n_seqs = step.n_rs, step.ubatch.n_seqs
        self.step = step
        self.s_copy = HostArray(ctx.new_tensor("i32", n_rs))
        t = self.s_copy.tensor
        self.s_copy_main = ops.view_1d(ctx, t, n_seqs, 0)
        self.s_copy_extra = ops.view_1d(ctx, t, n_rs - n_seqs, n_seqs * t.nb[0])

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        self.fill_from(cast(RecurrentStep, step))

    def fill_from(self, step: RecurrentStep) -> None:
        if self.s_copy.is_used:
            step.fill_s_copy(self.s_copy.array)
            self.s_copy.commit()


class HybridInput:
    """The inputs of an attention and of a recurrent memory.  Upstream: llm_graph_input_mem_hybrid, _mem_hybrid_iswa."""

    def __init__(self, attn: KVInput | SlidingInput, recr: RecurrentInput) -> None:
        self.attn = attn
        self.recr = recr

    def fill(self, ubatch: UBatch, step: Step | None) -> None:
        both = cast(HybridStep, step)
        self.recr.fill_from(both.recr)
        if isinstance(self.attn, SlidingInput):
            self.attn.fill_from(cast(SlidingStep, both.attn))
        else:
            self.attn.fill_from(cast(AttentionStep, both.attn))
