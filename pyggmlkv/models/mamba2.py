"""mamba2: mamba with heads and groups, and a norm behind the scan.  Upstream: models/mamba2.cpp."""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.blocks import Linear, Norm, linear, norm
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.recurrent import inp_rs
from pyggmlkv.graph.ssm import Mamba2, mamba2_layer
from pyggmlkv.models.loading import WeightLoader

MEMORY = "recurrent"


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Norm
    ssm: Mamba2


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
        ssm_n_group=kv.u32(keys.SSM_GROUP_COUNT),
        f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS),
    )
    for key, n in ((keys.SSM_TIME_STEP_RANK, hp.ssm_dt_rank), (keys.SSM_GROUP_COUNT, hp.ssm_n_group)):
        if n == 0 or hp.ssm_d_inner % n:
            kv.refuse(key, f"a divisor of the inner size {hp.ssm_d_inner}", str(n))
    return hp


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    b, d_inner, n_head = f"blk.{il}", hp.ssm_d_inner, hp.ssm_dt_rank
    conv_dim = d_inner + 2 * hp.ssm_n_group * hp.ssm_d_state
    return Layer(
        attn_norm=t.norm(f"{b}.attn_norm"),
        ssm=Mamba2(
            ssm_in=t.linear(f"{b}.ssm_in", hp.n_embd, d_inner + conv_dim + n_head, bias="no"),
            conv1d=t.linear(f"{b}.ssm_conv1d", hp.ssm_d_conv, conv_dim, bias="required"),
            dt_b=t.tensor(f"{b}.ssm_dt.bias", n_head),
            a=t.tensor(f"{b}.ssm_a", 1, n_head),
            d=t.tensor(f"{b}.ssm_d", 1, n_head),
            norm=Norm(t.tensor(f"{b}.ssm_norm.weight", d_inner // hp.ssm_n_group, hp.ssm_n_group)),
            out=t.linear(f"{b}.ssm_out", d_inner, hp.n_embd, bias="no"),
        ),
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
    cur = g.inp_embd(w.tok_embd)
    inp = inp_rs(g)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        cur = mamba2_layer(g, inp, layer.ssm, cur, il)
        if il == hp.n_layer - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        cur = g.name(ops.add(g.ctx, cur, residual), "l_out", il)
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    g.logits = g.expand(g.name(linear(g, w.output, g.embd), "result_output"))
