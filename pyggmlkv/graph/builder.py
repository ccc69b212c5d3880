"""The object an architecture's `build` works with: an arena, a graph, the ubatch, the settings.

It owns no model code: layers of a network are functions in `blocks`, `attention` and `recurrent` that take it first.
Upstream: llm_graph_context, llm_graph_params, llm_graph_result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeAlias

from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.binding import ComputeGraph, Tensor, TensorArena, ops
from pyggmlkv.binding.ops import RopeParams
from pyggmlkv.cparams import CParams
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.graph.cross import Cross
from pyggmlkv.graph.inputs import GraphInput, OutIdsInput, PosInput, TokensInput
from pyggmlkv.memory.protocol import Step

GraphType: TypeAlias = Literal["default", "encoder", "decoder"]
Place: TypeAlias = Callable[[Tensor, str, int, int], None]
"""Called for every named node as (tensor, name, layer, n_tokens); pins some nodes to their layer's device."""


@dataclasses.dataclass(frozen=True, slots=True)
class GraphParams:
    """Everything that a graph's topology is determined by."""

    hparams: HParams
    cparams: CParams
    ubatch: UBatch
    step: Step | None
    n_outputs: int
    gtype: GraphType = "default"
    cross: Cross | None = None
    place: Place | None = None
    place_on_cpu: Callable[[Tensor], None] | None = None


class GraphBuilder:
    """A graph under construction. `logits`, `embd` and `embd_pooled` are set by the architecture."""

    def __init__(self, ctx: TensorArena, size: int, params: GraphParams) -> None:
        self.ctx = ctx
        self.graph = ComputeGraph(ctx, size)
        self.params = params
        self.hparams = params.hparams
        self.cparams = params.cparams
        self.ubatch = params.ubatch
        self.step = params.step
        self.n_tokens = params.ubatch.n_tokens
        self.n_outputs = params.n_outputs
        self.inputs: list[GraphInput] = []
        self.fused: list[tuple[str, Tensor, int]] = []
        self.logits: Tensor | None = None
        self.embd: Tensor | None = None
        self.embd_pooled: Tensor | None = None

    def name(self, t: Tensor, name: str, il: int = -1) -> Tensor:
        """Give `t` the name libllama gives it (`Qcur-0`), let placement see it, and return it."""
        t.name = f"{name}-{il}" if il >= 0 else name
        if self.params.place is not None:
            self.params.place(t, name, il, self.n_tokens)
        return t

    def expand(self, t: Tensor) -> Tensor:
        """Append `t` and what it needs to the graph now.  Upstream: ggml_build_forward_expand."""
        self.graph.build_forward_expand(t)
        return t

    def inp_embd(self, tok_embd: Tensor) -> Tensor:
        """Token embeddings [n_embd, n_tokens], or the rows given as `Batch(embd=...)`.  Upstream: build_inp_embd."""
        inp = TokensInput(self.ctx, self.ubatch, self.hparams.n_embd_inp)
        self.inputs.append(inp)
        if inp.tokens is not None:
            self.name(inp.tokens.tensor, "inp_tokens")
            cur = ops.get_rows(self.ctx, tok_embd, inp.tokens.tensor)
        else:
            assert inp.embd is not None
            cur = self.name(inp.embd.tensor, "inp_embd")
            if self.hparams.n_embd_inp != self.hparams.n_embd:
                cur = ops.view_2d(self.ctx, cur, self.hparams.n_embd, self.n_tokens, cur.nb[1], 0)
        scale = self.hparams.f_embedding_scale
        if scale != 0.0 and (self.ubatch.token is not None or self.hparams.n_deepstack_layers == 0):
            cur = ops.scale(self.ctx, cur if cur.is_contiguous() else ops.cont(self.ctx, cur), scale)
        return self.expand(self.name(cur, "embd"))

    def inp_pos(self) -> Tensor:
        """Positions [n_tokens * n_pos_per_embd] i32.  Upstream: build_inp_pos."""
        return self._input(PosInput(self.ctx, self.n_tokens, self.hparams.n_pos_per_embd)).tensor

    def inp_out_ids(self) -> Tensor:
        """Rows that become outputs [n_outputs] i32.  Upstream: build_inp_out_ids."""
        return self._input(OutIdsInput(self.ctx, self.n_outputs)).tensor

    def add_input(self, inp: GraphInput) -> None:
        self.inputs.append(inp)

    def _input(self, inp: PosInput | OutIdsInput) -> PosInput | OutIdsInput:
        self.inputs.append(inp)
        return inp

    def rope_params(self, il: int) -> RopeParams:
        """RoPE of layer `il` as the forward pass turns Q and K; sliding layers have their own base and scale."""
        hp, cp = self.hparams, self.cparams
        assert hp.rope_type is not None, "the architecture's load_hparams sets rope_type"
        swa = hp.is_swa(il)
        return RopeParams(
            n_dims=hp.n_rot(il),
            mode=hp.rope_type,
            n_ctx_orig=cp.n_ctx_orig_yarn,
            freq_base=hp.rope_freq_base_train_swa if swa else cp.rope_freq_base,
            freq_scale=hp.rope_freq_scale_train_swa if swa else cp.rope_freq_scale,
            ext_factor=cp.yarn_ext_factor,
            attn_factor=cp.yarn_attn_factor,
            beta_fast=cp.yarn_beta_fast,
            beta_slow=cp.yarn_beta_slow,
            sections=hp.rope_sections if hp.n_pos_per_embd > 1 else None,
        )

    def set_outputs(self) -> None:
        """Flag the outputs so that the allocator keeps them.  Upstream: llm_graph_result::set_outputs."""
        for t in (self.logits, self.embd, self.embd_pooled):
            if t is not None:
                t.set_output()
