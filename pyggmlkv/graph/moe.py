"""Mixture of experts: gate, choose, run the chosen experts, weigh and add.

Upstream: llm_graph_context::build_moe_ffn.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypeAlias

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.graph.blocks import Act, Linear, activate, linear
from pyggmlkv.graph.builder import GraphBuilder

Gating: TypeAlias = Literal["softmax", "sigmoid", "softmax_weight", "sqrt_softplus"]


@dataclasses.dataclass(frozen=True, slots=True)
class MoE:
    """Weights of one layer's experts; expert tensors are [n_in, n_out, n_expert].

    `up`/`gate` or the merged `gate_up`; `exp_probs_b` [n_expert] only steers the choice.
    """

    gate_inp: Linear
    down: Linear
    up: Linear | None = None
    gate: Linear | None = None
    gate_up: Linear | None = None
    exp_probs_b: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen and weighed. `weight_before_ffn` and `select_logits` are llama4's way."""

    act: Act = "silu"
    gating: Gating = "softmax"
    norm_w: bool = False
    w_scale: float = 0.0
    weight_before_ffn: bool = False
    select_logits: bool = False


def moe_ffn(g: GraphBuilder, cur: Tensor, w: MoE, how: Routing, il: int) -> Tensor:
    """Run `cur` [n_embd, n_tokens] through its top experts; same shape back."""
    n_embd, n_tokens = cur.ne[0], cur.ne[1]
    n_used = g.hparams.n_expert_used
    logits = g.name(linear(g, w.gate_inp, cur), "ffn_moe_logits", il)
    if how.gating == "sqrt_softplus":
        ops.mul_mat_set_prec(logits, "f32")
    if w.gate_inp.bias is not None:
        logits = g.name(ops.add(g.ctx, logits, w.gate_inp.bias), "ffn_moe_logits_biased", il)
    probs = g.name(_probs(g, logits, how.gating), "ffn_moe_probs", il)
    chosen = _choose(g, _selection(g, logits, probs, w, how, il), n_used, il)
    weights = _weights(g, probs, chosen, how, il)
    g.expand(weights)
    cur = ops.reshape_3d(g.ctx, cur, n_embd, 1, n_tokens)
    if how.weight_before_ffn:
        repeated = ops.repeat_4d(g.ctx, cur, n_embd, n_used, n_tokens, 1)
        cur = g.name(ops.mul(g.ctx, repeated, weights), "ffn_moe_weighted", il)
    experts = _experts(g, cur, w, chosen, how, il)
    if not how.weight_before_ffn:
        experts = g.name(ops.mul(g.ctx, experts, weights), "ffn_moe_weighted", il)
    g.expand(experts)
    return g.name(_sum(g, experts, n_embd, n_tokens), "ffn_moe_out", il)


def _probs(g: GraphBuilder, logits: Tensor, gating: Gating) -> Tensor:
    if gating == "softmax":
        return ops.soft_max(g.ctx, logits)
    if gating == "sigmoid":
        return ops.sigmoid(g.ctx, logits)
    if gating == "sqrt_softplus":
        return ops.sqrt(g.ctx, ops.softplus(g.ctx, logits))
    return logits


def _selection(g: GraphBuilder, logits: Tensor, probs: Tensor, w: MoE, how: Routing, il: int) -> Tensor:
    """What the choice is made by, [n_expert, n_tokens]: biased, or masked to the best expert groups."""
    hp = g.hparams
    by = probs
    if w.exp_probs_b is not None:
        by = g.name(ops.add(g.ctx, probs, w.exp_probs_b), "ffn_moe_probs_biased", il)
    if how.select_logits:
        by = logits
    if hp.n_expert_groups <= 1 or by.ne[1] == 0:
        return by
    ctx, n_groups, n = g.ctx, hp.n_expert_groups, by.ne[1]
    groups = ops.reshape_3d(ctx, by, hp.n_expert // n_groups, n_groups, n)
    best = ops.argsort_top_k(ctx, groups, 2)
    scores = ops.get_rows(ctx, ops.reshape_4d(ctx, groups, 1, *groups.ne[:3]), best)
    scores = ops.sum_rows(ctx, ops.reshape_3d(ctx, scores, *scores.ne[1:]))
    scores = ops.reshape_2d(ctx, scores, scores.ne[1], scores.ne[2])
    chosen = g.name(ops.argsort_top_k(ctx, scores, hp.n_group_used), "ffn_moe_group_topk", il)
    kept = ops.get_rows(ctx, groups, chosen)
    masked = ops.set_rows(ctx, ops.fill(ctx, groups, -math.inf), kept, chosen)
    return g.name(ops.reshape_2d(ctx, masked, hp.n_expert, n), "ffn_moe_probs_masked", il)


def _choose(g: GraphBuilder, by: Tensor, n_used: int, il: int) -> Tensor:
    chosen = ops.argsort_top_k(g.ctx, by, n_used)
    g.name(chosen.src[0], "ffn_moe_argsort", il)
    return g.name(chosen, "ffn_moe_topk", il)


def _weights(g: GraphBuilder, probs: Tensor, chosen: Tensor, how: Routing, il: int) -> Tensor:
    """Weights of the chosen experts, [1, n_expert_used, n_tokens]."""
    ctx = g.ctx
    n_used, n = chosen.ne[0], chosen.ne[1]
    w = ops.get_rows(ctx, ops.reshape_3d(ctx, probs, 1, g.hparams.n_expert, n), chosen)
    g.name(w, "ffn_moe_weights", il)
    if how.gating == "softmax_weight":
        w = ops.soft_max(ctx, ops.reshape_2d(ctx, w, n_used, n))
        w = g.name(ops.reshape_3d(ctx, w, 1, n_used, n), "ffn_moe_weights_softmax", il)
    if how.norm_w:
        w = ops.reshape_2d(ctx, w, n_used, n)
        total = g.name(ops.sum_rows(ctx, w), "ffn_moe_weights_sum", il)
        total = g.name(ops.clamp(ctx, total, 2.0**-14, math.inf), "ffn_moe_weights_sum_clamped", il)
        w = g.name(ops.div(ctx, w, total), "ffn_moe_weights_norm", il)
        w = ops.reshape_3d(ctx, w, 1, n_used, n)
    if how.w_scale not in (0.0, 1.0):
        w = g.name(ops.scale(ctx, w, how.w_scale), "ffn_moe_weights_scaled", il)
    return w


def _linear_id(g: GraphBuilder, w: Linear, cur: Tensor, ids: Tensor, name: str, il: int) -> Tensor:
    out = ops.mul_mat_id(g.ctx, w.weight, cur, ids)
    if w.scale is not None:
        scale = ops.reshape_3d(g.ctx, w.scale, 1, w.scale.ne[0], 1)
        scale = ops.repeat_4d(g.ctx, scale, 1, w.scale.ne[0], cur.ne[2], 1)
        out = ops.mul(g.ctx, out, ops.get_rows(g.ctx, scale, ids))
    g.name(out, name, il)
    if w.scale is not None:
        g.name(out, f"{name}_scaled", il)
    if w.bias is not None:
        out = g.name(ops.add_id(g.ctx, out, w.bias, ids), f"{name}_biased", il)
    return out


def _experts(g: GraphBuilder, cur: Tensor, w: MoE, chosen: Tensor, how: Routing, il: int) -> Tensor:
    """Each chosen expert's output, [n_embd, n_expert_used, n_tokens]."""
    if w.gate_up is not None:
        both = _linear_id(g, w.gate_up, cur, chosen, "ffn_moe_gate_up", il)
        n_ff = both.ne[0] // 2
        halves = (
            ops.view_3d(g.ctx, both, n_ff, both.ne[1], both.ne[2], both.nb[1], both.nb[2], first * both.nb[0])
            for first in (0, n_ff)
        )
        gate, up = next(halves), None
        g.name(gate, "ffn_moe_gate", il)
        up = g.name(next(halves), "ffn_moe_up", il)
    else:
        assert w.up is not None
        up = _linear_id(g, w.up, cur, chosen, "ffn_moe_up", il)
        gate = _linear_id(g, w.gate, cur, chosen, "ffn_moe_gate", il) if w.gate is not None else up
    has_gate = w.gate is not None or w.gate_up is not None or how.act == "swiglu_oai"
    hidden = _hidden(g, gate, up if has_gate else None, how.act, il)
    return _linear_id(g, w.down, hidden, chosen, "ffn_moe_down", il)


def _hidden(g: GraphBuilder, gate: Tensor, up: Tensor | None, act: Act, il: int) -> Tensor:
    if act == "relu_sqr":  # libllama names one node of the two, and not as in a dense network
        return g.name(ops.sqr(g.ctx, ops.relu(g.ctx, gate)), "ffn_moe_relu_sqr", il)
    return activate(g, gate, up, act, il, prefix="ffn_moe_")[0]


def _sum(g: GraphBuilder, experts: Tensor, n_embd: int, n_tokens: int) -> Tensor:
    """Add the experts' outputs; the views come before the adds, as libllama orders them."""
    n_used = g.hparams.n_expert_used
    views = [
        g.expand(ops.view_2d(g.ctx, experts, n_embd, n_tokens, experts.nb[2], i * experts.nb[1]))
        for i in range(n_used)
    ]
    out = views[0]
    for view in views[1:]:
        out = g.expand(ops.add(g.ctx, out, view))
    return ops.cont(g.ctx, out) if n_used == 1 else out
