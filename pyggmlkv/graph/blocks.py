"""The building blocks most architectures share: linear, norm, QKV, feed-forward.

Each is a function of a builder; node order and names are libllama's, so that graphs line up node by node.
Upstream: llm_graph_context::build_lora_mm, build_norm, build_qkv, build_ffn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from pyggmlkv.binding import Tensor, TensorArena, ops
from pyggmlkv.graph.builder import GraphBuilder

Act: TypeAlias = Literal["silu", "gelu", "relu", "relu_sqr", "swiglu", "geglu", "reglu", "swiglu_oai"]


class Linear(NamedTuple):
    """A weight [n_in, n_out], and where the file has them a bias [n_out] and a scale [1]."""

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None


class Norm(NamedTuple):
    """Norm weight and bias [n_embd]."""

    weight: Tensor | None
    bias: Tensor | None = None


class QKV(NamedTuple):
    """Query, key and value heads: [head_dim, n_head, n_tokens], [head_dim, n_head_kv, n_tokens] twice."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class QKVWeights:
    """Projections to Q, K and V: three, or one fused (`wqkv`)."""

    wq: Linear | None = None
    wk: Linear | None = None
    wv: Linear | None = None
    wqkv: Linear | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class FFN:
    """A feed-forward network's weights; `gate` None is a plain two-layer network."""

    up: Linear | None
    down: Linear | None
    gate: Linear | None = None
    act_scales: Tensor | None = None


def linear(g: GraphBuilder, w: Linear, cur: Tensor) -> Tensor:
    """`w.weight` x `cur`, scaled where the file has a scale; the bias is the caller's.  Upstream: build_lora_mm."""
    cur = ops.mul_mat(g.ctx, w.weight, cur)
    return cur if w.scale is None else ops.mul(g.ctx, cur, w.scale)


def norm(g: GraphBuilder, cur: Tensor, w: Norm, il: int, kind: Literal["rms", "layer"] = "rms") -> Tensor:
    """RMS or layer norm over n_embd, then weight and bias.  Upstream: build_norm."""
    hp = g.hparams
    cur = (
        ops.rms_norm(g.ctx, cur, hp.f_norm_rms_eps) if kind == "rms" else ops.norm(g.ctx, cur, hp.f_norm_eps)
    )
    if w.weight is not None or w.bias is not None:
        g.name(cur, "norm", il)
    if w.weight is not None:
        cur = ops.mul(g.ctx, cur, w.weight)
        if w.bias is not None:
            g.name(cur, "norm_w", il)
    if w.bias is not None:
        cur = ops.add(g.ctx, cur, w.bias)
    return cur


def qkv(g: GraphBuilder, w: QKVWeights, cur: Tensor, head_dim: int, il: int) -> QKV:
    """Project `cur` [n_embd, n_tokens] to heads.  Upstream: build_qkv."""
    n_head, n_head_kv = g.hparams.n_head(il), g.hparams.n_head_kv(il)
    if w.wqkv is not None:
        heads = _fused_qkv(g, w.wqkv, cur, (head_dim, n_head, n_head_kv), il)
    else:
        assert w.wq is not None and w.wk is not None and w.wv is not None
        parts = ((w.wq, "Qcur", n_head), (w.wk, "Kcur", n_head_kv), (w.wv, "Vcur", n_head_kv))
        heads = QKV(
            *(
                ops.reshape_3d(g.ctx, _projected(g, lin, cur, name, il), head_dim, n, g.n_tokens)
                for lin, name, n in parts
            )
        )
    for t, name in zip(heads, ("Qcur", "Kcur", "Vcur"), strict=True):
        g.name(t, name, il)
    return heads


def normed_qk(g: GraphBuilder, heads: QKV, q_norm: Norm, k_norm: Norm, il: int) -> QKV:
    """RMS norm over each query and key head."""
    q = g.name(norm(g, heads.q, q_norm, il), "Qcur_normed", il)
    return QKV(q, g.name(norm(g, heads.k, k_norm, il), "Kcur_normed", il), heads.v)


def softcap(g: GraphBuilder, cur: Tensor, cap: float) -> Tensor:
    """cap * tanh(cur / cap); 0 means no cap."""
    if not cap:
        return cur
    return ops.scale(
        g.ctx, ops.tanh(g.ctx, ops.scale(g.ctx, cur, float(np.float32(1.0) / np.float32(cap)))), cap
    )


def _projected(g: GraphBuilder, w: Linear, cur: Tensor, name: str, il: int) -> Tensor:
    cur = g.name(linear(g, w, cur), name, il)
    if w.bias is not None:
        cur = g.name(ops.add(g.ctx, cur, w.bias), name, il)
    limit = g.hparams.f_clamp_kqv
    if limit > 0.0:
        cur = g.name(ops.clamp(g.ctx, cur, -limit, limit), f"{name}_clamped", il)
    return cur


def _fused_qkv(g: GraphBuilder, w: Linear, cur: Tensor, dims: tuple[int, int, int], il: int) -> QKV:
    head_dim, n_head, n_head_kv = dims
    t = g.name(linear(g, w, cur), "wqkv", il)
    if w.bias is not None:
        t = g.name(ops.add(g.ctx, t, w.bias), "wqkv_b", il)
    limit = g.hparams.f_clamp_kqv
    if limit > 0.0:
        t = g.name(ops.clamp(g.ctx, t, -limit, limit), "wqkv_clamped", il)
    head = head_dim * t.nb[0]

    def part(n: int, first: int) -> Tensor:
        return ops.view_3d(g.ctx, t, head_dim, n, g.n_tokens, head, t.nb[1], first * head)

    return QKV(part(n_head, 0), part(n_head_kv, n_head), part(n_head_kv, n_head + n_head_kv))


def ffn(g: GraphBuilder, cur: Tensor, w: FFN, act: Act, il: int, *, seq_gate: bool = False) -> Tensor:
    """Feed-forward network; `seq_gate` feeds the gate from `up` instead of beside it.  Upstream: build_ffn."""
    up = _named_linear(g, w.up, cur, "ffn_up", il) if w.up is not None else cur
    cur = _named_linear(g, w.gate, up if seq_gate else cur, "ffn_gate", il) if w.gate is not None else up
    parallel = w.gate is not None and not seq_gate
    cur, multiplied = activate(g, cur, up if parallel else None, act, il)
    if act == "gelu" and w.act_scales is not None and not parallel:
        cur = g.name(ops.div(g.ctx, cur, w.act_scales), "ffn_act", il)
    if parallel and not multiplied:
        cur = g.name(ops.mul(g.ctx, cur, up), "ffn_gate_par", il)
    if w.down is not None:
        cur = ops.mul_mat(g.ctx, w.down.weight, cur)
        if w.down.bias is not None:
            cur = ops.add(g.ctx, g.name(cur, "ffn_down", il), w.down.bias)
        if w.down.scale is not None:
            cur = g.name(ops.mul(g.ctx, cur, w.down.scale), "ffn_down_s", il)
    return cur


def _named_linear(g: GraphBuilder, w: Linear, cur: Tensor, name: str, il: int) -> Tensor:
    cur = g.name(ops.mul_mat(g.ctx, w.weight, cur), name, il)
    if w.bias is not None:
        cur = g.name(ops.add(g.ctx, cur, w.bias), f"{name}_b", il)
    if w.scale is not None:
        cur = g.name(ops.mul(g.ctx, cur, w.scale), f"{name}_s", il)
    return cur


_Unary: TypeAlias = Callable[[TensorArena, Tensor], Tensor]
_Split: TypeAlias = Callable[[TensorArena, Tensor, Tensor], Tensor]
_GATED: dict[str, tuple[_Split, str]] = {
    "silu": (ops.swiglu_split, "swiglu"),
    "gelu": (ops.geglu_split, "geglu"),
    "relu": (ops.reglu_split, "reglu"),
}
_PLAIN: dict[str, tuple[_Unary, str]] = {
    "silu": (ops.silu, "silu"),
    "gelu": (ops.gelu, "gelu"),
    "relu": (ops.relu, "relu"),
    "swiglu": (ops.swiglu, "swiglu"),
    "geglu": (ops.geglu, "geglu"),
    "reglu": (ops.reglu, "reglu"),
}


def activate(
    g: GraphBuilder, cur: Tensor, up: Tensor | None, act: Act, il: int, prefix: str = "ffn_"
) -> tuple[Tensor, bool]:
    """Activation, and whether `up` was multiplied in by a fused op."""
    if act == "relu_sqr":
        cur = g.name(ops.relu(g.ctx, cur), f"{prefix}relu", il)
        return g.name(ops.sqr(g.ctx, cur), f"{prefix}sqr(relu)", il), False
    if act == "swiglu_oai":
        assert up is not None
        return g.name(ops.swiglu_oai(g.ctx, cur, up, 1.702, 7.0), f"{prefix}swiglu_oai", il), True
    if up is not None and act in _GATED:
        split, name = _GATED[act]
        return g.name(split(g.ctx, cur, up), prefix + name, il), True
    plain, name = _PLAIN[act]
    return g.name(plain(g.ctx, cur), prefix + name, il), False
