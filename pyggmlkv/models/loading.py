"""Weights by what they are for: the tensors that most architectures name and shape alike.

An architecture's file asks for what it has; names and shapes are checked by `gguf.weights` below.
Upstream: llama_model_base::create_tensor_qkv and the load_arch_tensors functions.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from pyggmlkv.binding import Tensor
from pyggmlkv.gguf import keys
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.gguf.key_reader import KeyReader
from pyggmlkv.gguf.weights import TensorLoader
from pyggmlkv.graph.blocks import FFN, Linear, Norm, QKVWeights
from pyggmlkv.graph.mla import MLA, Query
from pyggmlkv.graph.moe import MoE
from pyggmlkv.graph.rope import RopeFactors
from pyggmlkv.graph.ssm import Mamba

Bias: TypeAlias = Literal["no", "optional", "required"]


def check_heads(kv: KeyReader, hp: HParams, *, rotated_whole: bool = False) -> None:
    """Refuse heads that the architecture's graph cannot be built for; upstream aborts on them.

    Raises:
        GGUFKeyError: K and V heads of different sizes, or (`rotated_whole`) RoPE over a part of a head.
    """
    head_dim = hp.n_embd_head_k()
    if hp.n_embd_head_v() != head_dim:
        kv.refuse(keys.ATTENTION_VALUE_LENGTH, f"{head_dim}, as a key's length", str(hp.n_embd_head_v()))
    if rotated_whole and hp.n_rot() != head_dim:
        kv.refuse(keys.ROPE_DIMENSION_COUNT, f"{head_dim}, the size of a head", str(hp.n_rot()))


def check_expansion(kv: KeyReader, hp: HParams) -> None:
    """Refuse Mamba layers that are not twice as wide inside as outside, as upstream does.

    Raises:
        GGUFKeyError: names the inner size.
    """
    if hp.ssm_d_inner != 2 * hp.n_embd:
        kv.refuse(keys.SSM_INNER_SIZE, f"{2 * hp.n_embd}, twice the embedding length", str(hp.ssm_d_inner))


class WeightLoader:
    """Asks a `TensorLoader` for named tensors with the shapes that hyperparameters give."""

    def __init__(self, tensors: TensorLoader, hparams: HParams) -> None:
        self._tensors = tensors
        self.hp = hparams
        self.rope: dict[int, RopeFactors] = {}
        """Factors by layer as loaded, for the K-shift."""

    def tensor(self, name: str, *ne: int) -> Tensor:
        """A required tensor, full name."""
        t = self._tensors.tensor(name, *ne)
        assert t is not None
        return t

    def optional(self, name: str, *ne: int) -> Tensor | None:
        return self._tensors.tensor(name, *ne, required=False)

    def has(self, name: str) -> bool:
        """Whether the file has this tensor, full name."""
        return self._tensors.has(name)

    def linear(self, name: str, *ne: int, bias: Bias = "optional") -> Linear:
        """`name.weight` [n_in, n_out(, n_expert)], with its bias [n_out(, n_expert)] and scale where present."""
        weight = self.tensor(f"{name}.weight", *ne)
        return self._completed(name, weight, ne, bias)

    def linear_or_none(self, name: str, *ne: int, bias: Bias = "optional") -> Linear | None:
        weight = self.optional(f"{name}.weight", *ne)
        return None if weight is None else self._completed(name, weight, ne, bias)

    def _completed(self, name: str, weight: Tensor, ne: tuple[int, ...], bias: Bias) -> Linear:
        b = (
            None
            if bias == "no"
            else self._tensors.tensor(f"{name}.bias", *ne[1:], required=bias == "required")
        )
        n_scales = ne[2] if len(ne) > 2 else 1
        return Linear(weight, b, self.optional(f"{name}.scale", n_scales))

    def norm(self, name: str, n: int | None = None, *, bias: Bias = "no") -> Norm:
        """`name.weight` [n], n_embd if not given."""
        n = n or self.hp.n_embd
        b = None if bias == "no" else self._tensors.tensor(f"{name}.bias", n, required=bias == "required")
        return Norm(self.tensor(f"{name}.weight", n), b)

    def output_norm_lfm2(self) -> Norm:
        """The output norm under the name of the embeddings' norm.  Upstream: LLM_TENSOR_OUTPUT_NORM_LFM2."""
        return Norm(self._tensors.tensor("token_embd_norm.weight", self.hp.n_embd, role="output_norm"))

    def skip_layer(self, il: int) -> None:
        """Leave out a layer that no graph here runs (next-token prediction).  Upstream: TENSOR_SKIP."""
        for name in self._tensors.reader.weights:
            if name.startswith(f"blk.{il}."):
                self._tensors.skip(name)

    def tok_embd(self) -> Tensor:
        return self.tensor("token_embd.weight", self.hp.n_embd, self.hp.n_vocab)

    def output(self, *, bias: Bias = "no") -> Linear:
        """The language head; models that tie it to the token embeddings get a second tensor of the same data."""
        lin = self.linear_or_none("output", self.hp.n_embd, self.hp.n_vocab, bias=bias)
        if lin is not None:
            return lin
        return self.tied_output()

    def tied_output(self) -> Linear:
        """The token embeddings used once more, as the language head."""
        tied = self._tensors.tensor("token_embd.weight", self.hp.n_embd, self.hp.n_vocab, duplicated=True)
        assert tied is not None
        return Linear(tied)

    def qkv(self, il: int) -> QKVWeights:
        """One fused projection if the file has it, else three.  Upstream: create_tensor_qkv."""
        hp, b = self.hp, f"blk.{il}"
        n_q = hp.n_embd_head_k(il) * hp.n_head(il)
        n_k, n_v = hp.n_embd_k_gqa(il), hp.n_embd_v_gqa(il)
        fused = self.linear_or_none(f"{b}.attn_qkv", hp.n_embd, n_q + n_k + n_v)
        if fused is not None:
            return QKVWeights(wqkv=fused)
        return QKVWeights(
            wq=self.linear(f"{b}.attn_q", hp.n_embd, n_q),
            wk=self.linear(f"{b}.attn_k", hp.n_embd, n_k),
            wv=self.linear(f"{b}.attn_v", hp.n_embd, n_v),
        )

    def fused_qkv(self, il: int, *, bias: Bias = "optional") -> QKVWeights:
        """One fused projection, as the architecture has no other."""
        hp = self.hp
        n_out = hp.n_embd_head_k(il) * hp.n_head(il) + hp.n_embd_k_gqa(il) + hp.n_embd_v_gqa(il)
        return QKVWeights(wqkv=self.linear(f"blk.{il}.attn_qkv", hp.n_embd, n_out, bias=bias))

    def attn_output(self, il: int, *, bias: Bias = "optional") -> Linear:
        hp = self.hp
        return self.linear(
            f"blk.{il}.attn_output", hp.n_embd_head_v(il) * hp.n_head(il), hp.n_embd, bias=bias
        )

    def rope_factors(self, il: int) -> RopeFactors:
        """Per-dimension RoPE factors that all layers share, as the file's scaling type says."""
        return (
            self.rope_long_short(il) if self.hp.rope_scaling_type_train == "longrope" else self.rope_freqs(il)
        )

    def rope_freqs(self, il: int) -> RopeFactors:
        """One set of factors [n_rot / 2], if the file has it.  Upstream: TENSOR_DUPLICATED rope_freqs."""
        self.rope[il] = RopeFactors(freqs=self._shared("rope_freqs.weight", il))
        return self.rope[il]

    def rope_long_short(self, il: int) -> RopeFactors:
        """Factors [n_rot / 2] for contexts beyond the original one and for shorter ones, if the file has them."""
        self.rope[il] = RopeFactors(
            long=self._shared("rope_factors_long.weight", il),
            short=self._shared("rope_factors_short.weight", il),
        )
        return self.rope[il]

    def _shared(self, name: str, il: int) -> Tensor | None:
        n = self.hp.n_rot(il) // 2
        return self._tensors.tensor(name, n, il=il, required=False, duplicated=il != 0)

    def ffn(self, il: int, *, bias: Bias = "optional") -> FFN:
        """up, gate and down of layer `il`."""
        n_embd, n_ff, b = self.hp.n_embd, self.hp.n_ff(il), f"blk.{il}"
        return FFN(
            gate=self.linear(f"{b}.ffn_gate", n_embd, n_ff, bias=bias),
            down=self.linear(f"{b}.ffn_down", n_ff, n_embd, bias=bias),
            up=self.linear(f"{b}.ffn_up", n_embd, n_ff, bias=bias),
        )

    def ffn_shexp(self, il: int, n_ff: int) -> FFN:
        """up, gate and down of the expert that all tokens of layer `il` share; `n_ff` is its width."""
        n_embd, b = self.hp.n_embd, f"blk.{il}"
        return FFN(
            gate=self.linear(f"{b}.ffn_gate_shexp", n_embd, n_ff, bias="no"),
            down=self.linear(f"{b}.ffn_down_shexp", n_ff, n_embd, bias="no"),
            up=self.linear(f"{b}.ffn_up_shexp", n_embd, n_ff, bias="no"),
        )

    def moe(self, il: int, n_ff: int | None = None, *, bias: Bias = "no") -> MoE:
        """Gate and experts of layer `il`; `n_ff` is one expert's width."""
        hp, b = self.hp, f"blk.{il}"
        n_ff, n_expert = n_ff or hp.n_ff(il), hp.n_expert
        return MoE(
            gate_inp=self.linear(f"{b}.ffn_gate_inp", hp.n_embd, n_expert, bias=bias),
            gate=self.linear_or_none(f"{b}.ffn_gate_exps", hp.n_embd, n_ff, n_expert, bias=bias),
            down=self.linear(f"{b}.ffn_down_exps", n_ff, hp.n_embd, n_expert, bias=bias),
            up=self.linear(f"{b}.ffn_up_exps", hp.n_embd, n_ff, n_expert, bias=bias),
        )

    def moe_gate_up(self, il: int, n_ff: int) -> MoE:
        """As `moe`, gate and up of the experts fused or apart, the choice biased where the file has a bias.

        Upstream: create_tensor_gate_up_exps.
        """
        hp, b = self.hp, f"blk.{il}"
        fused = self.linear_or_none(f"{b}.ffn_gate_up_exps", hp.n_embd, 2 * n_ff, hp.n_expert, bias="no")
        bias = self.optional(f"{b}.exp_probs_b.bias", hp.n_expert)
        if fused is None:
            return dataclasses.replace(self.moe(il, n_ff), exp_probs_b=bias)
        return MoE(
            gate_inp=self.linear(f"{b}.ffn_gate_inp", hp.n_embd, hp.n_expert, bias="no"),
            down=self.linear(f"{b}.ffn_down_exps", n_ff, hp.n_embd, hp.n_expert, bias="no"),
            gate_up=fused,
            exp_probs_b=bias,
        )

    def mamba(self, il: int) -> Mamba:
        """A Mamba layer without norms of dt, B and C."""
        hp, b = self.hp, f"blk.{il}"
        d_inner, d_state, dt_rank = hp.ssm_d_inner, hp.ssm_d_state, hp.ssm_dt_rank
        return Mamba(
            ssm_in=self.linear(f"{b}.ssm_in", hp.n_embd, 2 * d_inner, bias="no"),
            conv1d=self.linear(f"{b}.ssm_conv1d", hp.ssm_d_conv, d_inner, bias="required"),
            x=self.linear(f"{b}.ssm_x", d_inner, dt_rank + 2 * d_state, bias="no"),
            dt=self.linear(f"{b}.ssm_dt", dt_rank, d_inner, bias="required"),
            a=self.tensor(f"{b}.ssm_a", d_state, d_inner),
            d=self.tensor(f"{b}.ssm_d", d_inner),
            out=self.linear(f"{b}.ssm_out", d_inner, hp.n_embd, bias="no"),
        )

    def mla(self, il: int) -> MLA:
        """Latent attention of layer `il`, latent in the cache or (older files) before it."""
        hp, b = self.hp, f"blk.{il}"
        n_head, rank, v = hp.n_head(il), hp.n_lora_kv, hp.n_embd_head_v_mla()
        nope, is_mla = hp.n_embd_head_k_mla() - hp.n_rot(), hp.is_mla
        return MLA(
            q=self._mla_query(il),
            kv_a_norm=self.norm(f"{b}.attn_kv_a_norm", rank),
            kv_a_mqa=self.linear(f"{b}.attn_kv_a_mqa", hp.n_embd, rank + hp.n_rot(), bias="no"),
            k_b=self.tensor(f"{b}.attn_k_b.weight", nope, rank, n_head) if is_mla else None,
            v_b=self.tensor(f"{b}.attn_v_b.weight", rank, v, n_head) if is_mla else None,
            kv_b=None if is_mla else self.linear(f"{b}.attn_kv_b", rank, n_head * (nope + v), bias="no"),
        )

    def _mla_query(self, il: int) -> Query:
        hp, b = self.hp, f"blk.{il}"
        n_q = hp.n_head(il) * hp.n_embd_head_k_mla()
        if not hp.n_lora_q:
            return Query(self.linear(f"{b}.attn_q", hp.n_embd, n_q, bias="no"))
        return Query(
            q_a_norm=self.norm(f"{b}.attn_q_a_norm", hp.n_lora_q),
            q_a=self.linear(f"{b}.attn_q_a", hp.n_embd, hp.n_lora_q, bias="no"),
            q_b=self.linear(f"{b}.attn_q_b", hp.n_lora_q, n_q, bias="no"),
        )
