"""t5: the encoder of t5encoder, and a decoder that attends to itself and to the encoded text.

The two share the token embeddings; which of them is built is the graph's type.  Upstream: models/t5.cpp.
"""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.errors import ParameterError
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import (
    Attention,
    attn,
    attn_cross,
    inp_cross,
    inp_kv,
)
from pyggmlkv.graph.blocks import Linear, Norm, QKVWeights, linear, norm, qkv
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.encoder_inputs import PosBucketInput
from pyggmlkv.models.loading import WeightLoader, check_heads
from pyggmlkv.models.t5encoder import (
    Encoder,
    EncoderLayer,
    build_encoder,
    feed_forward,
    load_encoder,
    load_ffn,
    load_qkv,
    load_rel_b,
    pos_bias,
    split_heads,
)

MEMORY = "attention"


@dataclasses.dataclass(frozen=True, slots=True)
class Layer(EncoderLayer):
    attn_norm_cross: Norm
    cross: QKVWeights
    wo_cross: Linear


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    tok_embd: Tensor
    output_norm: Norm
    output: Linear
    encoder: Encoder
    layers: tuple[Layer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    check_heads(kv, hp)
    n_dec = kv.u32(keys.DECODER_BLOCK_COUNT, hp.n_layer)
    if not 1 <= n_dec <= hp.n_layer:
        kv.refuse(
            keys.DECODER_BLOCK_COUNT, f"1 to {hp.n_layer} layers, as many as the encoder has", str(n_dec)
        )
    return dataclasses.replace(
        hp,
        f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS),
        n_rel_attn_bkts=kv.u32(keys.ATTENTION_RELATIVE_BUCKETS_COUNT),
        dec_start_token_id=kv.u32(keys.DECODER_START_TOKEN_ID, None),
        dec_n_layer=n_dec,
    )


def load_layer(t: WeightLoader, hp: HParams, il: int) -> Layer:
    b = f"dec.blk.{il}"
    t.optional(f"{b}.cross_attn_rel_b.weight", hp.n_head(), hp.n_rel_attn_bkts)
    return Layer(
        attn_norm=t.norm(f"{b}.attn_norm"),
        rel_b=load_rel_b(t, hp, il, f"{b}.attn_rel_b.weight"),
        qkv=load_qkv(t, hp, f"{b}.attn"),
        wo=t.linear(f"{b}.attn_o", hp.n_embd_v_gqa(), hp.n_embd, bias="no"),
        attn_norm_cross=t.norm(f"{b}.cross_attn_norm"),
        cross=load_qkv(t, hp, f"{b}.cross_attn"),
        wo_cross=t.linear(f"{b}.cross_attn_o", hp.n_embd_v_gqa(), hp.n_embd, bias="no"),
        ffn_norm=t.norm(f"{b}.ffn_norm"),
        ffn=load_ffn(t, hp, b),
    )


def load_weights(t: WeightLoader, hp: HParams) -> Weights:
    tok_embd = t.tok_embd()
    return Weights(
        tok_embd=tok_embd,
        output_norm=t.norm("dec.output_norm"),
        output=t.output(),
        encoder=load_encoder(t, hp, tok_embd),
        layers=tuple(load_layer(t, hp, il) for il in range(hp.dec_n_layer)),
    )


def build(g: GraphBuilder, w: Weights) -> None:
    if g.params.gtype == "encoder":
        build_encoder(g, w.encoder)
    else:
        build_decoder(g, w)


def build_decoder(g: GraphBuilder, w: Weights) -> None:
    cur = g.inp_embd(w.tok_embd)
    cross = inp_cross(g)
    inp = inp_kv(g)
    if inp.step.n_stream > 1:
        raise ParameterError(
            "t5: position biases cannot differ between streams; use kv_unified=True for several sequences",
            parameter="kv_unified",
        )
    buckets = PosBucketInput(g.ctx, g.ubatch, inp.step, g.hparams.n_rel_attn_bkts)
    g.add_input(buckets)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        heads = qkv(g, layer.qkv, cur, g.hparams.n_embd_head_v(), il)
        how = Attention(kq_scale=1.0, kq_b=pos_bias(g, buckets, layer, w.layers[0]))
        cur = g.name(attn(g, inp, layer.wo, heads, how, il), "kqv_out", il)
        residual = g.name(ops.add(g.ctx, cur, residual), "cross_inp", il)
        cur = g.name(norm(g, residual, layer.attn_norm_cross, il), "attn_norm_cross", il)
        heads = split_heads(g, layer.cross, cur, cross.embd, il)
        cur = g.name(attn_cross(g, cross, layer.wo_cross, heads, Attention(kq_scale=1.0), il), "kqv_out", il)
        if il == len(w.layers) - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        ffn_inp = g.name(ops.add(g.ctx, cur, residual), "ffn_inp", il)
        cur = feed_forward(g, layer, ffn_inp, il)
    g.name(cur, "result_embd")
    g.embd = g.name(norm(g, cur, w.output_norm, -1), "result_norm")
    g.logits = g.expand(g.name(linear(g, w.output, g.embd), "result_output"))
