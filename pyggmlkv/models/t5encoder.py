"""t5encoder: T5's encoder alone; tokens see each other both ways, distances add to the scores.

Upstream: models/t5encoder.cpp, models/t5.cpp. Differs: has no memory; `decode` encodes.
"""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, ops
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.graph.attention import Attention, attn_no_cache, inp_no_cache
from pyggmlkv.graph.blocks import FFN, QKV, Act, Linear, Norm, QKVWeights, ffn, linear, norm
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.encoder_inputs import PosBucketInput
from pyggmlkv.models.loading import WeightLoader, check_heads

MEMORY = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderLayer:
    """`rel_b` [n_head, n_buckets]; layers without it use the first layer's."""

    attn_norm: Norm
    rel_b: Tensor | None
    qkv: QKVWeights
    wo: Linear
    ffn_norm: Norm
    ffn: FFN


@dataclasses.dataclass(frozen=True, slots=True)
class Encoder:
    tok_embd: Tensor
    output_norm: Norm
    layers: tuple[EncoderLayer, ...]


def load_hparams(kv: KeyReader, hp: HParams) -> HParams:
    check_heads(kv, hp)
    return dataclasses.replace(
        hp,
        f_norm_rms_eps=kv.f32(keys.ATTENTION_LAYERNORM_RMS_EPS),
        n_rel_attn_bkts=kv.u32(keys.ATTENTION_RELATIVE_BUCKETS_COUNT),
    )


def load_qkv(t: WeightLoader, hp: HParams, b: str) -> QKVWeights:
    return QKVWeights(
        wq=t.linear(f"{b}_q", hp.n_embd, hp.n_embd_k_gqa(), bias="no"),
        wk=t.linear(f"{b}_k", hp.n_embd, hp.n_embd_k_gqa(), bias="no"),
        wv=t.linear(f"{b}_v", hp.n_embd, hp.n_embd_v_gqa(), bias="no"),
    )


def load_ffn(t: WeightLoader, hp: HParams, b: str) -> FFN:
    return FFN(
        gate=t.linear_or_none(f"{b}.ffn_gate", hp.n_embd, hp.n_ff(), bias="no"),
        down=t.linear(f"{b}.ffn_down", hp.n_ff(), hp.n_embd, bias="no"),
        up=t.linear(f"{b}.ffn_up", hp.n_embd, hp.n_ff(), bias="no"),
    )


def load_rel_b(t: WeightLoader, hp: HParams, il: int, name: str) -> Tensor | None:
    """Biases of the position buckets; the first layer's are there in any case."""
    load = t.tensor if il == 0 else t.optional
    return load(name, hp.n_head(), hp.n_rel_attn_bkts)


def load_encoder_layer(t: WeightLoader, hp: HParams, il: int) -> EncoderLayer:
    b = f"enc.blk.{il}"
    return EncoderLayer(
        attn_norm=t.norm(f"{b}.attn_norm"),
        rel_b=load_rel_b(t, hp, il, f"{b}.attn_rel_b.weight"),
        qkv=load_qkv(t, hp, f"{b}.attn"),
        wo=t.linear(f"{b}.attn_o", hp.n_embd_v_gqa(), hp.n_embd, bias="no"),
        ffn_norm=t.norm(f"{b}.ffn_norm"),
        ffn=load_ffn(t, hp, b),
    )


def load_encoder(t: WeightLoader, hp: HParams, tok_embd: Tensor) -> Encoder:
    return Encoder(
        tok_embd=tok_embd,
        output_norm=t.norm("enc.output_norm"),
        layers=tuple(load_encoder_layer(t, hp, il) for il in range(hp.n_layer)),
    )


def load_weights(t: WeightLoader, hp: HParams) -> Encoder:
    encoder = load_encoder(t, hp, t.tok_embd())
    t.output()
    return encoder


def split_heads(g: GraphBuilder, w: QKVWeights, queries: Tensor, keys_of: Tensor, il: int) -> QKV:
    """Heads of queries from one text and of keys and values from another (or the same)."""
    hp = g.hparams
    assert w.wq is not None and w.wk is not None and w.wv is not None
    q = g.name(linear(g, w.wq, queries), "Qcur", il)
    k = g.name(linear(g, w.wk, keys_of), "Kcur", il)
    v = g.name(linear(g, w.wv, keys_of), "Vcur", il)
    parts = ((q, hp.n_head(il)), (k, hp.n_head_kv(il)), (v, hp.n_head_kv(il)))
    return QKV(*(ops.reshape_3d(g.ctx, t, hp.n_embd_head_v(), n, t.ne[1]) for t, n in parts))


def pos_bias(g: GraphBuilder, buckets: PosBucketInput, layer: EncoderLayer, first: EncoderLayer) -> Tensor:
    """What the distance of query and key adds to each head's scores [n_kv, n_tokens, n_head].

    Upstream: llm_graph_context::build_pos_bias.
    """
    ctx, ids = g.ctx, buckets.tensor
    rel_b = first.rel_b if layer.rel_b is None else layer.rel_b
    assert rel_b is not None
    flat = g.name(ops.reshape_1d(ctx, ids, ids.n_elements), "pos_bucket_1d")
    bias = ops.get_rows(ctx, rel_b, flat)
    bias = ops.permute(ctx, ops.reshape_3d(ctx, bias, bias.ne[0], *ids.ne[:2]), 2, 0, 1, 3)
    return g.name(ops.cont(ctx, bias), "pos_bias")


def feed_forward(g: GraphBuilder, layer: EncoderLayer, ffn_inp: Tensor, il: int) -> Tensor:
    """T5's networks are plain with ReLU, Flan-T5's gated with GELU."""
    cur = g.name(norm(g, ffn_inp, layer.ffn_norm, il), "ffn_norm", il)
    act: Act = "gelu" if layer.ffn.gate is not None else "relu"
    cur = g.name(ffn(g, cur, layer.ffn, act, il), "ffn_out", il)
    return g.name(ops.add(g.ctx, cur, ffn_inp), "l_out", il)


def build(g: GraphBuilder, w: Encoder) -> None:
    build_encoder(g, w)


def build_encoder(g: GraphBuilder, w: Encoder) -> None:
    cur = g.inp_embd(w.tok_embd)
    buckets = PosBucketInput(g.ctx, g.ubatch, None, g.hparams.n_rel_attn_bkts)
    g.add_input(buckets)
    inp = inp_no_cache(g)
    out_ids = g.inp_out_ids()
    for il, layer in enumerate(w.layers):
        residual = cur
        cur = g.name(norm(g, cur, layer.attn_norm, il), "attn_norm", il)
        heads = split_heads(g, layer.qkv, cur, cur, il)
        how = Attention(kq_scale=1.0, kq_b=pos_bias(g, buckets, layer, w.layers[0]))
        cur = g.name(attn_no_cache(g, inp, layer.wo, heads, how, il), "kqv_out", il)
        if il == len(w.layers) - 1:
            cur = ops.get_rows(g.ctx, cur, out_ids)
            residual = ops.get_rows(g.ctx, residual, out_ids)
        ffn_inp = g.name(ops.add(g.ctx, cur, residual), "ffn_inp", il)
        cur = feed_forward(g, layer, ffn_inp, il)
    g.name(cur, "result_embd")
    g.embd = g.expand(g.name(norm(g, cur, w.output_norm, -1), "result_norm"))
