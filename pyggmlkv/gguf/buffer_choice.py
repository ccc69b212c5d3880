"""Which buffer type may hold a weight: the first of a list whose device can run the op that the weight feeds.

This puts weights into the CPU's repacked layouts where libllama does, which makes results equal to its.
Upstream: llama-model-loader.cpp, weight_buft_supported, select_weight_buft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from pyggmlkv.backend.placement import BufferTypeList
from pyggmlkv.binding import ops
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.buffer import BufferType
from pyggmlkv.binding.device import Device
from pyggmlkv.binding.ops import RopeParams
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.binding.weight_probe import supports_op_with
from pyggmlkv.errors import BindingError, GGUFTensorError

from .hparams import HParams

N_TOKENS: Final = 512
"""Tokens of the trial op; a device may support an op by its size."""
N_SEQS: Final = 3
Trial: TypeAlias = Callable[[TensorArena, Tensor, HParams], Tensor]


def _get_rows(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    return ops.get_rows(ctx, w, ctx.new_tensor("i32", N_TOKENS))


def _mul_mat(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    return ops.mul_mat(ctx, w, ctx.new_tensor("f32", w.ne[0], N_TOKENS, w.ne[2], w.ne[3]))


def _mul_mat_id(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    n_used = hp.n_expert_used if hp.router_layer is None else 1
    b = ctx.new_tensor("f32", w.ne[0], n_used, N_TOKENS)
    return ops.mul_mat_id(ctx, w, b, ctx.new_tensor("i32", n_used, N_TOKENS))


def _add(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    return ops.add(ctx, ctx.new_tensor("f32", *w.ne), w)


def _add_id(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    a = ctx.new_tensor("f32", w.ne[0], hp.n_expert_used, N_TOKENS)
    return ops.add_id(ctx, a, w, ctx.new_tensor("i32", hp.n_expert_used, N_TOKENS))


def _mul(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    return ops.mul(ctx, ctx.new_tensor("f32", *w.ne), w)


def _div(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    return ops.div(ctx, ctx.new_tensor("f32", w.ne[0]), w)


def _scale(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    return ops.scale(ctx, w, 1.0)


def _rope(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    a = ctx.new_tensor("f32", hp.n_embd_head_v(), hp.n_head(), N_TOKENS)
    params = RopeParams(n_dims=0, mode="normal", n_ctx_orig=0, freq_base=0.0, freq_scale=0.0)
    return ops.rope_ext(ctx, a, ctx.new_tensor("i32", N_TOKENS), w, params)


def _ssm_conv(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    return ops.ssm_conv(ctx, ctx.new_tensor("f32", w.ne[0] - 1 + N_TOKENS, w.ne[1], N_SEQS), w)


def _ssm_scan(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    d_state = hp.ssm_d_state if w.ne[0] == 1 else w.ne[0]
    n_head, n_group = w.ne[1], hp.ssm_n_group or 1
    head_dim = hp.ssm_d_inner // n_head
    s = ctx.new_tensor("f32", d_state, head_dim, n_head, N_SEQS)
    x = ctx.new_tensor("f32", head_dim, n_head, N_TOKENS, N_SEQS)
    dt = ctx.new_tensor("f32", n_head, N_TOKENS, N_SEQS)
    b = ctx.new_tensor("f32", d_state, n_group, N_TOKENS, N_SEQS)
    c = ctx.new_tensor("f32", d_state, n_group, N_TOKENS, N_SEQS)
    return ops.ssm_scan(ctx, s, x, dt, w, b, c, ctx.new_tensor("i32", N_SEQS))


def _rwkv_wkv6(ctx: TensorArena, w: Tensor, hp: HParams) -> Tensor:
    head_size, n_head = w.ne[0], w.ne[1]
    k, v, r, decay = (ctx.new_tensor("f32", head_size, n_head, N_TOKENS) for _ in range(4))
    return ops.rwkv_wkv6(ctx, k, v, r, w, decay, ctx.new_tensor("f32", head_size * head_size * n_head, 1))


TRIALS: Final[Mapping[str, Trial]] = MappingProxyType(
    {
        "get_rows": _get_rows,
        "mul_mat": _mul_mat,
        "mul_mat_id": _mul_mat_id,
        "add": _add,
        "add_id": _add_id,
        "mul": _mul,
        "div": _div,
        "scale": _scale,
        "rope": _rope,
        "ssm_conv": _ssm_conv,
        "ssm_scan": _ssm_scan,
        "rwkv_wkv6": _rwkv_wkv6,
    }
)


class BufferChoice:
    """Chooses buffer types for the weights of one model; equal questions are asked once."""

    def __init__(self, hparams: HParams) -> None:
        self.hparams = hparams
        self._known: dict[tuple[object, ...], tuple[Device, BufferType]] = {}

    def choose(
        self, name: str, dtype: str, ne: tuple[int, ...], op: str, bufts: BufferTypeList
    ) -> tuple[Device, BufferType]:
        """The first entry of `bufts` that can hold the weight `name` for `op`.

        Raises: GGUFTensorError if none can, or if the weight's shape or type does not fit the op at all.
        """
        question = (dtype, ne, op, bufts)
        if question not in self._known:
            self._known[question] = self._ask(name, dtype, ne, op, bufts)
        return self._known[question]

    def _ask(
        self, name: str, dtype: str, ne: tuple[int, ...], op: str, bufts: BufferTypeList
    ) -> tuple[Device, BufferType]:
        if op not in TRIALS:
            raise GGUFTensorError(
                f"tensor '{name}' feeds {op}, which no model here uses yet", tensor=name, op=op
            )
        with TensorArena(16) as ctx:
            weight = ctx.new_tensor(dtype, *ne)
            try:
                trial = TRIALS[op](ctx, weight, self.hparams)
            except (BindingError, ZeroDivisionError) as e:
                raise GGUFTensorError(
                    f"tensor '{name}' ({dtype}, {list(ne)}) cannot be used for {op}: {e}", tensor=name, op=op
                ) from e
            for device, buffer_type in bufts:
                if supports_op_with(device, trial, weight, buffer_type):
                    return device, buffer_type
        raise GGUFTensorError(
            f"tensor '{name}' ({dtype}, {list(ne)}): no buffer type of {', '.join(b.name for _, b in bufts)} "
            f"can hold it for {op}",
            tensor=name,
            op=op,
        )
