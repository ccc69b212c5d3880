"""RoPE as the forward pass applies it, and which per-dimension factors a context uses.

Upstream: ggml_rope_ext as the models call it, llama_model::get_rope_factors.
"""

from __future__ import annotations

from typing import NamedTuple

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.cparams import CParams
from pyggmlkv.graph.blocks import QKV
from pyggmlkv.graph.builder import GraphBuilder


class RopeFactors(NamedTuple):
    """Per-dimension divisors [n_rot / 2] f32: always used, or by whether the context outgrew the trained one."""

    freqs: Tensor | None = None
    long: Tensor | None = None
    short: Tensor | None = None

    def pick(self, cp: CParams, n_ctx_orig: int) -> Tensor | None:
        """The divisors for contexts of this size, as upstream counts it: rounded up to 256 tokens."""
        if self.freqs is not None:
            return self.freqs
        return self.long if max(cp.n_ctx_seq, 256) > n_ctx_orig else self.short


NO_FACTORS = RopeFactors()


def rope_qk(g: GraphBuilder, heads: QKV, pos: Tensor, il: int, factors: RopeFactors = NO_FACTORS) -> QKV:
    """Turn Q and K of layer `il` to their positions; names them as libllama does."""
    q, k, v = turned_qk(g, heads, pos, il, factors)
    return QKV(g.name(q, "Qcur", il), g.name(k, "Kcur", il), g.name(v, "Vcur", il))


def turned_qk(g: GraphBuilder, heads: QKV, pos: Tensor, il: int, factors: RopeFactors = NO_FACTORS) -> QKV:
    """`rope_qk` without names, for the architectures that give none."""
    params = g.rope_params(il)
    divisors = factors.pick(g.cparams, g.hparams.n_ctx_orig_yarn)
    rope = ops.rope_multi if params.is_multi else ops.rope_ext
    q = rope(g.ctx, heads.q, pos, divisors, params)
    k = rope(g.ctx, heads.k, pos, divisors, params)
    return QKV(q, k, heads.v)
