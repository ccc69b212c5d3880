"""gpt-oss: attention sinks, sliding and full layers by turns, experts with biases and a clamped SwiGLU.

Upstream: models/openai-moe.cpp.
"""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import Attention, attn_iswa, inp_kv_iswa, rsqrt
from pyggmlkv.graph.blocks import Linear, Norm, QKVWeights, linear, norm, qkv
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.moe import MoE, Routing, moe_ffn
from pyggmlkv.graph.rope import rope_qk
from pyggmlkv.models.loading import WeightLoader, check_heads

MEMORY = "attention"


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Norm
    qkv: QKVWeights
    wo: Linear
    attn_sinks: Tensor
    attn_post_norm: Norm
    ffn: MoE


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    tok_embd: Tensor
    output_norm: Norm
    output: Linear
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    check_heads(kv, hp, rotated_whole=True)
    hp = dataclasses.replace(
        hp,
        rope_type="neox",
        swa_type="standard",
        n_swa=kv.u32(keys.ATTENTION_SLIDING_WINDOW),
        rope_freq_base_train_swa=kv.f32(keys.ROPE_FREQ_BASE_SWA, hp.rope_freq_base_train),
        rope_freq_scale_train_swa=hp.rope_freq_scale_train,
        f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS),
        n_ff_exp=kv.u32(keys.EXPERT_FEED_FORWARD_LENGTH),
    )
    return hp.with_swa_pattern(kv.u32_if_scalar(keys.ATTENTION_SLIDING_WINDOW_PATTERN, 2))


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    return Layer(
        attn_norm=t.norm(f"blk.{il}.attn_norm"),
        attn_post_norm=t.norm(f"blk.{il}.post_attention_norm"),
        qkv=t.qkv(il),
        wo=t.attn_output(il, bias="required"),
        attn_sinks=t.tensor(f"blk.{il}.attn_sinks.weight", hp.n_head(il)),
        ffn=t.moe(il, hp.n_ff_exp, bias="required"),
    )


def load_weights(t: WeightLoader, hp: HParams) -> Weights:
    return Weights(
        tok_embd=t.tok_embd(),
        output_norm=t.norm("output_norm"),
        output=t.linear("output", hp.n_embd, hp.n_vocab, bias="no"),
        layers=tuple(load_layer(t, hp, il) for il in range(hp.n_layer)),
    )


def build(g: GraphBuilder, w: Weights) -> None:
    hp = g.hparams
    head_dim = hp.n_rot()
    routing = Routing(act="swiglu_oai", gating="softmax_weight", w_scale=hp.expert_weights_scale)
    cur = g.inp_embd(w.tok_embd)
    pos = g.inp_pos()
    inp = inp_kv_iswa(g)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        how = Attention(kq_scale=rsqrt(head_dim), sinks=layer.attn_sinks)
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        heads = rope_qk(g, qkv(g, layer.qkv, cur, head_dim, il), pos, il)
        cur = g.name(attn_iswa(g, inp, layer.wo, heads, how, il), "attn_out", il)
        ffn_inp = g.name(ops.add(g.ctx, cur, residual), "ffn_inp", il)
        cur = g.name(norm(g, ffn_inp, layer.attn_post_norm, il), "attn_post_norm", il)
        cur = moe_ffn(g, cur, layer.ffn, routing, il)
        cur = g.name(ops.add(g.ctx, cur, ffn_inp), "l_out", il)
    cur = ops.get_rows(g.ctx, cur, out_ids)
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    g.logits = g.expand(g.name(linear(g, w.output, g.embd), "result_output"))
