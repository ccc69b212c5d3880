"""llama4: chunked layers with RoPE, full ones without it but with a temperature by position, experts.

Upstream: models/llama4.cpp. Differs: a file that switches the window off is refused; upstream loads it and
aborts at its first batch.
"""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import Attention, attn_iswa, inp_kv_iswa, rsqrt
from pyggmlkv.graph.blocks import FFN, QKV, Linear, Norm, QKVWeights, ffn, linear, norm, qkv
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.inputs import AttnScaleInput
from pyggmlkv.graph.moe import MoE, Routing, moe_ffn
from pyggmlkv.graph.rope import RopeFactors, rope_qk
from pyggmlkv.models.loading import WeightLoader, check_heads

MEMORY = "attention"
N_CHUNK = 8192
N_EXPERT_MAVERICK = 128
ROUTING = Routing(gating="sigmoid", weight_before_ffn=True, select_logits=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Norm
    qkv: QKVWeights
    wo: Linear
    rope: RopeFactors
    ffn_norm: Norm
    ffn: FFN
    """The whole network, or the expert that all tokens share."""
    moe: MoE | None


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    tok_embd: Tensor
    output_norm: Norm
    output: Linear
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    """The chunk is 8192 positions whatever the file says, as in libllama."""
    check_heads(kv, hp, rotated_whole=True)
    if hp.n_expert == 0:
        kv.refuse(keys.EXPERT_COUNT, "at least one expert", "0")
    if kv.u32(keys.ATTENTION_SLIDING_WINDOW, N_CHUNK) == 0:
        kv.refuse(keys.ATTENTION_SLIDING_WINDOW, "a window, or no such key", "0")
    hp = dataclasses.replace(
        hp,
        rope_type="normal",
        swa_type="chunked",
        n_swa=N_CHUNK,
        n_attn_temp_floor_scale=8192,
        f_attn_temp_scale=0.1,
        f_attn_temp_offset=1.0,
        rope_freq_base_train_swa=kv.f32(keys.ROPE_FREQ_BASE_SWA, hp.rope_freq_base_train),
        rope_freq_scale_train_swa=hp.rope_freq_scale_train,
        f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS),
        n_ff_exp=kv.u32(keys.EXPERT_FEED_FORWARD_LENGTH),
        n_moe_layer_step=kv.u32(keys.INTERLEAVE_MOE_LAYER_STEP),
        use_kq_norm=hp.n_expert != N_EXPERT_MAVERICK,
    )
    return hp.with_swa_pattern(kv.u32_if_scalar(keys.ATTENTION_SLIDING_WINDOW_PATTERN, 4))


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    is_moe = hp.n_moe_layer_step > 0 and (il + 1) % hp.n_moe_layer_step == 0
    return Layer(
        attn_norm=t.norm(f"blk.{il}.attn_norm"),
        qkv=t.qkv(il),
        wo=t.attn_output(il, bias="no"),
        ffn_norm=t.norm(f"blk.{il}.ffn_norm"),
        rope=t.rope_freqs(il),
        moe=t.moe(il, hp.n_ff_exp) if is_moe else None,
        ffn=t.ffn_shexp(il, hp.n_ff_exp) if is_moe else t.ffn(il, bias="no"),
    )


def load_weights(t: WeightLoader, hp: HParams) -> Weights:
    return Weights(
        tok_embd=t.tok_embd(),
        output_norm=t.norm("output_norm"),
        output=t.output(),
        layers=tuple(load_layer(t, hp, il) for il in range(hp.n_layer)),
    )


def rotated(g: GraphBuilder, heads: QKV, pos: Tensor, attn_scale: Tensor, layer: Layer, il: int) -> QKV:
    """Q and K turned and normed, or on every fourth layer Q scaled by its position."""
    step = g.hparams.n_no_rope_layer_step
    if (il + 1) % step == 0:
        return QKV(g.name(ops.mul(g.ctx, heads.q, attn_scale), "Qcur", il), heads.k, heads.v)
    q, k, v = rope_qk(g, heads, pos, il, layer.rope)
    if g.hparams.use_kq_norm:
        q = g.name(ops.rms_norm(g.ctx, q, g.hparams.f_norm_rms_eps), "Qcur_normed", il)
        k = g.name(ops.rms_norm(g.ctx, k, g.hparams.f_norm_rms_eps), "Kcur_normed", il)
    return QKV(q, k, v)


def moe_and_shared(g: GraphBuilder, cur: Tensor, layer: Layer, moe: MoE, il: int) -> Tensor:
    """The chosen expert and the one that all tokens share, added."""
    routing = dataclasses.replace(ROUTING, w_scale=g.hparams.expert_weights_scale)
    moe_out = moe_ffn(g, cur, moe, routing, il)
    shared = g.name(ffn(g, cur, layer.ffn, "silu", il), "ffn_moe_shexp", il)
    return g.name(ops.add(g.ctx, moe_out, shared), "ffn_moe_out_merged", il)


def build(g: GraphBuilder, w: Weights) -> None:
    hp = g.hparams
    head_dim = hp.n_embd_head_v()
    how = Attention(kq_scale=hp.f_attention_scale or rsqrt(head_dim))
    cur = g.inp_embd(w.tok_embd)
    pos = g.inp_pos()
    temperature = AttnScaleInput(
        g.ctx, g.n_tokens, hp.n_attn_temp_floor_scale, hp.f_attn_temp_scale, hp.f_attn_temp_offset
    )
    g.add_input(temperature)
    inp = inp_kv_iswa(g)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        heads = rotated(g, qkv(g, layer.qkv, cur, head_dim, il), pos, temperature.tensor, layer, il)
        cur = g.name(attn_iswa(g, inp, layer.wo, heads, how, il), "attn_out", il)
        if il == hp.n_layer - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        ffn_inp = g.name(ops.add(g.ctx, cur, residual), "ffn_inp", il)
        attn_out, cur = cur, norm(g, ffn_inp, layer.ffn_norm, il)
        g.name(cur if layer.moe is None else attn_out, "ffn_norm", il)  # libllama's slip
        if layer.moe is not None:
            cur = moe_and_shared(g, cur, layer, layer.moe, il)
        else:
            cur = g.name(ffn(g, cur, layer.ffn, "silu", il), "ffn_out", il)
        cur = g.name(ops.add(g.ctx, cur, ffn_inp), "l_out", il)
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    g.logits = g.expand(g.name(linear(g, w.output, g.embd), "result_output"))
