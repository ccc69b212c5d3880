"""Reading and writing recurrent states inside a graph.

Upstream: llm_graph_context::build_rs, build_rs_inp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

from pyggmlkv.binding import Tensor, TensorArena, ops
from pyggmlkv.graph.attention import kv_input, sliding_input
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.inputs import HybridInput, RecurrentInput
from pyggmlkv.memory.protocol import AttentionStep, HybridStep, RecurrentStep, SlidingStep

GetRows: TypeAlias = Callable[[TensorArena, Tensor, Tensor], Tensor]
"""Gathers states [state_size, n_rs] by ids: `ops.get_rows`, or an op that reads states in place (`ssm_scan`)."""


def inp_rs(g: GraphBuilder) -> RecurrentInput:
    """Inputs of a recurrent memory.  Upstream: build_rs_inp."""
    inp = RecurrentInput(g.ctx, cast(RecurrentStep, g.step))
    g.add_input(inp)
    return inp


def inp_hybrid(g: GraphBuilder) -> HybridInput:
    """Inputs of an attention and of a recurrent memory.  Upstream: build_inp_mem_hybrid, build_inp_mem_hybrid_iswa."""
    step = cast(HybridStep, g.step)
    recr = RecurrentInput(g.ctx, step.recr)
    if g.hparams.swa_type != "none":
        inp = HybridInput(sliding_input(g, cast(SlidingStep, step.attn)), recr)
    else:
        inp = HybridInput(kv_input(g, cast(AttentionStep, step.attn)), recr)
    g.add_input(inp)
    return inp


def read_states(
    g: GraphBuilder, inp: RecurrentInput, all_states: Tensor, get_rows: GetRows = ops.get_rows
) -> Tensor:
    """States of this ubatch's sequences [state_size, n_seqs]; zeroes new ones, moves the rest along.

    `all_states` is `inp.step.r(il)` or `inp.step.s(il)`, [state_size, n_cells].  Upstream: build_rs.
    """
    ctx, step = g.ctx, inp.step
    n_seqs = step.ubatch.n_seqs
    size = all_states.ne[0]
    states = ops.reshape_2d(ctx, all_states, size, all_states.ne[1])
    zeroed = step.rs_z is not None
    first = (step.rs_z or 0) * states.nb[1]
    g.expand(ops.scale_inplace(ctx, ops.view_1d(ctx, states, size * zeroed, first * zeroed), 0.0))
    out = g.expand(get_rows(ctx, states, inp.s_copy_main))
    extra = ops.get_rows(ctx, states, inp.s_copy_extra)
    kept = step.n_rs - n_seqs
    to = ops.view_2d(ctx, all_states, size, kept, all_states.nb[1], (step.head + n_seqs) * all_states.nb[1])
    g.expand(ops.cpy(ctx, extra, to))
    return out
