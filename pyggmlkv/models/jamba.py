"""jamba: Mamba layers and attention without RoPE, dense or mixture-of-experts networks.  Upstream: models/jamba.cpp."""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import Attention, attn_any, rsqrt
from pyggmlkv.graph.blocks import FFN, Linear, Norm, QKVWeights, ffn, linear, norm, qkv
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.moe import MoE, Routing, moe_ffn
from pyggmlkv.graph.recurrent import inp_hybrid
from pyggmlkv.graph.ssm import Mamba, mamba_layer
from pyggmlkv.models.loading import WeightLoader, check_expansion, check_heads

MEMORY = "hybrid"


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionWeights:
    qkv: QKVWeights
    wo: Linear


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Norm
    mixer: Mamba | AttentionWeights
    ffn_norm: Norm
    ffn: FFN | MoE


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    tok_embd: Tensor
    output_norm: Norm
    output: Linear
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    check_heads(kv, hp)
    hp = dataclasses.replace(
        hp,
        ssm_d_conv=kv.u32(keys.SSM_CONV_KERNEL),
        ssm_d_inner=kv.u32(keys.SSM_INNER_SIZE),
        ssm_d_state=kv.u32(keys.SSM_STATE_SIZE),
        ssm_dt_rank=kv.u32(keys.SSM_TIME_STEP_RANK),
        f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS),
        is_recr_impl=tuple(n == 0 for n in hp.n_head_kv_arr),
    )
    check_expansion(kv, hp)
    return hp


def load_mixer(t: WeightLoader, hp: HParams, il: int) -> Mamba | AttentionWeights:
    if not hp.is_recr(il):
        return AttentionWeights(qkv=t.qkv(il), wo=t.attn_output(il, bias="no"))
    return dataclasses.replace(
        t.mamba(il),
        dt_norm=t.norm(f"blk.{il}.ssm_dt_norm", hp.ssm_dt_rank),
        b_norm=t.norm(f"blk.{il}.ssm_b_norm", hp.ssm_d_state),
        c_norm=t.norm(f"blk.{il}.ssm_c_norm", hp.ssm_d_state),
    )


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    return Layer(
        attn_norm=t.norm(f"blk.{il}.attn_norm"),
        mixer=load_mixer(t, hp, il),
        ffn_norm=t.norm(f"blk.{il}.ffn_norm"),
        ffn=t.moe(il) if t.has(f"blk.{il}.ffn_gate_inp.weight") else t.ffn(il, bias="no"),
    )


def load_weights(t: WeightLoader, hp: HParams) -> Weights:
    return Weights(
        tok_embd=t.tok_embd(),
        output_norm=t.norm("output_norm"),
        output=t.output(),
        layers=tuple(load_layer(t, hp, il) for il in range(hp.n_layer)),
    )


def build(g: GraphBuilder, w: Weights) -> None:
    hp = g.hparams
    head_dim = hp.n_embd_head_v()
    how = Attention(kq_scale=rsqrt(head_dim))
    cur = g.inp_embd(w.tok_embd)
    inp = inp_hybrid(g)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        if isinstance(layer.mixer, Mamba):
            cur = mamba_layer(g, inp.recr, layer.mixer, cur, il)
        else:
            heads = qkv(g, layer.mixer.qkv, cur, head_dim, il)
            cur = attn_any(g, inp.attn, layer.mixer.wo, heads, how, il)
        if il == hp.n_layer - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        g.name(cur, "ffn_inp", il)
        ffn_inp = ops.add(g.ctx, residual, cur)
        cur = g.name(norm(g, ffn_inp, layer.ffn_norm, il), "ffn_norm", il)
        if isinstance(layer.ffn, MoE):
            cur = moe_ffn(g, cur, layer.ffn, Routing(w_scale=hp.expert_weights_scale), il)
        else:
            cur = g.name(ffn(g, cur, layer.ffn, "silu", il), "ffn_out", il)
        cur = g.name(ops.add(g.ctx, ffn_inp, cur), "l_out", il)
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    g.logits = g.expand(g.name(linear(g, w.output, g.embd), "result_output"))
