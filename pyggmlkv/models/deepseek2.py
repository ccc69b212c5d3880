"""deepseek2: latent attention (MLA), its queries absorbed into the latent space; grouped experts and a shared one.

Files without the split `attn_k_b` / `attn_v_b` hold plain heads, decompressed before the cache.
Upstream: models/deepseek2.cpp.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.hparams_parts import EXPERT_GATING_FUNCS
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import Attention, attn, inp_kv
from pyggmlkv.graph.blocks import FFN, QKV, Linear, Norm, ffn, norm
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.inputs import AttnScaleInput
from pyggmlkv.graph.mla import MLA, mla_heads
from pyggmlkv.graph.moe import Gating, MoE, Routing, moe_ffn
from pyggmlkv.models.loading import WeightLoader

MEMORY = "attention"
LITE_LAYERS = (26, 27)
LITE_VOCAB, GLM_VOCAB = 128256, 154880


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Norm
    mla: MLA
    wo: Linear
    ffn_norm: Norm
    ffn: FFN
    moe: MoE | None


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    tok_embd: Tensor
    output_norm: Norm
    output: Linear
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    hp = dataclasses.replace(
        hp,
        rope_type="normal",
        f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS),
        n_layer_nextn=kv.u32(keys.NEXTN_PREDICT_LAYERS, 0),
        n_layer_dense_lead=kv.u32(keys.LEADING_DENSE_BLOCK_COUNT, 0),
        n_lora_kv=kv.u32(keys.ATTENTION_KV_LORA_RANK),
        n_embd_head_k_mla_impl=kv.u32(keys.ATTENTION_KEY_LENGTH_MLA, 0),
        n_embd_head_v_mla_impl=kv.u32(keys.ATTENTION_VALUE_LENGTH_MLA, 0),
        n_ff_exp=kv.u32(keys.EXPERT_FEED_FORWARD_LENGTH),
        n_expert_shared=kv.u32(keys.EXPERT_SHARED_COUNT),
        expert_weights_scale=kv.f32(keys.EXPERT_WEIGHTS_SCALE, 0.0),
        expert_weights_norm=kv.bool(keys.EXPERT_WEIGHTS_NORM, False),
        expert_gating_func=kv.choice(keys.EXPERT_GATING_FUNC, EXPERT_GATING_FUNCS, "none"),
        rope_yarn_log_mul=float(np.float32(kv.f32(keys.ROPE_SCALING_YARN_LOG_MUL, 0.0)) / np.float32(0.1)),
        f_attn_temp_scale=kv.f32(keys.ATTENTION_TEMPERATURE_SCALE, 0.0),
        n_attn_temp_floor_scale=kv.u32(keys.ATTENTION_TEMPERATURE_LENGTH, 0),
    )
    if not hp.n_layer_nextn < hp.n_layer_all:
        kv.refuse(keys.NEXTN_PREDICT_LAYERS, f"fewer than the {hp.n_layer_all} layers", str(hp.n_layer_nextn))
    if hp.n_embd_head_k_mla() <= hp.n_rot():
        key = keys.ATTENTION_KEY_LENGTH_MLA if hp.is_mla else keys.ATTENTION_KEY_LENGTH
        kv.refuse(key, f"heads wider than their {hp.n_rot()} rotated elements", str(hp.n_embd_head_k_mla()))
    is_lite = hp.n_layer in LITE_LAYERS or (hp.n_layer == 48 and hp.n_vocab == LITE_VOCAB)
    gating = hp.expert_gating_func
    if gating == "none":
        gating = "sigmoid" if hp.n_layer in (47, 48) and hp.n_vocab == GLM_VOCAB else "softmax"
    n_lora_q = 0 if is_lite else kv.u32(keys.ATTENTION_Q_LORA_RANK)
    return dataclasses.replace(hp, n_lora_q=n_lora_q, expert_gating_func=gating)


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    b, is_moe = f"blk.{il}", il >= hp.n_layer_dense_lead
    return Layer(
        attn_norm=t.norm(f"{b}.attn_norm"),
        mla=t.mla(il),
        wo=t.linear(f"{b}.attn_output", hp.n_head(il) * hp.n_embd_head_v_mla(), hp.n_embd, bias="no"),
        ffn_norm=t.norm(f"{b}.ffn_norm"),
        moe=t.moe_gate_up(il, hp.n_ff_exp) if is_moe else None,
        ffn=t.ffn_shexp(il, hp.n_ff_exp * hp.n_expert_shared) if is_moe else t.ffn(il, bias="no"),
    )


def load_weights(t: WeightLoader, hp: HParams) -> Weights:
    for il in range(hp.n_layer, hp.n_layer_all):
        t.skip_layer(il)
    return Weights(
        tok_embd=t.tok_embd(),
        output_norm=t.norm("output_norm"),
        output=t.output(),
        layers=tuple(load_layer(t, hp, il) for il in range(hp.n_layer)),
    )


def kq_scale(g: GraphBuilder) -> float:
    """1 / sqrt(head), times YaRN's magnitude squared: the keys' rotary slice carries it only in part."""
    hp, cp, f32 = g.hparams, g.cparams, np.float32
    log = f32(math.log(f32(1.0) / f32(cp.rope_freq_scale)))
    original = f32(cp.yarn_attn_factor) * (f32(1.0) + f32(0.1) * log)
    mscale = original * (f32(1.0) + f32(0.1) * f32(hp.rope_yarn_log_mul) * log)
    return float(mscale * mscale / np.sqrt(f32(hp.n_embd_head_k_mla())))


def feed_forward(g: GraphBuilder, layer: Layer, cur: Tensor, il: int) -> Tensor:
    hp = g.hparams
    if layer.moe is None:
        return g.name(ffn(g, cur, layer.ffn, "silu", il), "ffn_out", il)
    gating: Gating = hp.expert_gating_func  # type: ignore[assignment]
    routing = Routing(gating=gating, norm_w=hp.expert_weights_norm, w_scale=hp.expert_weights_scale)
    moe_out = moe_ffn(g, cur, layer.moe, routing, il)
    shared = g.name(ffn(g, cur, layer.ffn, "silu", il), "ffn_shexp", il)
    return g.name(ops.add(g.ctx, moe_out, shared), "ffn_out", il)


def build(g: GraphBuilder, w: Weights) -> None:
    hp = g.hparams
    scale = kq_scale(g)
    cur = g.inp_embd(w.tok_embd)
    temperature = None
    if hp.f_attn_temp_scale != 0.0:
        temperature = AttnScaleInput(g.ctx, g.n_tokens, hp.n_attn_temp_floor_scale, hp.f_attn_temp_scale, 0.0)
        g.add_input(temperature)
    pos = g.inp_pos()
    inp = inp_kv(g, has_v=not hp.is_mla)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        q, k, v = mla_heads(g, layer.mla, cur, pos, il)
        if temperature is not None:
            q = g.name(ops.mul(g.ctx, q, temperature.tensor), "Qcur_attn_temp_scaled", il)
        cur = attn(g, inp, layer.wo, QKV(q, k, v), Attention(kq_scale=scale, v_mla=layer.mla.v_b), il)
        if il == hp.n_layer - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        ffn_inp = g.name(ops.add(g.ctx, cur, residual), "ffn_inp", il)
        cur = g.name(norm(g, ffn_inp, layer.ffn_norm, il), "ffn_norm", il)
        cur = feed_forward(g, layer, cur, il)
        cur = g.name(ops.add(g.ctx, cur, ffn_inp), "l_out", il)
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    g.logits = g.expand(g.name(ops.mul_mat(g.ctx, w.output.weight, g.embd), "result_output"))
