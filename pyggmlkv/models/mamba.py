"""mamba: state-space layers only, one state a sequence.  Upstream: models/mamba.cpp."""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.blocks import Linear, Norm, linear, norm
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.recurrent import inp_rs
from pyggmlkv.graph.ssm import Mamba, mamba_layer
from pyggmlkv.models.loading import WeightLoader, check_expansion

MEMORY = "recurrent"


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Norm
    ssm: Mamba


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    tok_embd: Tensor
    output_norm: Norm
    output: Linear
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    hp = dataclasses.replace(
        hp,
        ssm_d_conv=kv.u32(keys.SSM_CONV_KERNEL),
        ssm_d_inner=kv.u32(keys.SSM_INNER_SIZE),
        ssm_d_state=kv.u32(keys.SSM_STATE_SIZE),
        ssm_dt_rank=kv.u32(keys.SSM_TIME_STEP_RANK),
        ssm_dt_b_c_rms=kv.bool(keys.SSM_DT_B_C_RMS, False),
        f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS),
    )
    check_expansion(kv, hp)
    return hp


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    ssm = t.mamba(il)
    if hp.ssm_dt_b_c_rms:
        plain = Norm(None)
        ssm = dataclasses.replace(ssm, dt_norm=plain, b_norm=plain, c_norm=plain)
    return Layer(attn_norm=t.norm(f"blk.{il}.attn_norm"), ssm=ssm)


def load_weights(t: WeightLoader, hp: HParams) -> Weights:
    return Weights(
        tok_embd=t.tok_embd(),
        output_norm=t.norm("output_norm"),
        output=t.output(),
        layers=tuple(load_layer(t, hp, il) for il in range(hp.n_layer)),
    )


def build(g: GraphBuilder, w: Weights) -> None:
    hp = g.hparams
    cur = g.inp_embd(w.tok_embd)
    inp = inp_rs(g)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        cur = mamba_layer(g, inp, layer.ssm, cur, il)
        if il == hp.n_layer - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        cur = g.name(ops.add(g.ctx, cur, residual), "l_out", il)
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    g.logits = g.expand(g.name(linear(g, w.output, g.embd), "result_output"))
