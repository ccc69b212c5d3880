"""K-shift: turn cached keys by the position change of their cells, on the device that holds them.

One graph for all layers and streams; the shift of every cell is an input.
Upstream: llama_kv_cache::build_graph_shift, build_rope_shift. Differs: bf16 keys, and quantised keys without attention
rotation, shift too (upstream crashes); `shift="pure"` turns without YaRN's magnitude factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from pyggmlkv.binding import ComputeGraph, Tensor, TensorArena, dtypes, ops
from pyggmlkv.binding.ops import RopeParams
from pyggmlkv.memory.config import KVSpec, LayerSpec
from pyggmlkv.memory.storage import KVStorage

NODES_A_LAYER = 16
IN_PLACE = ("f32", "f16")
"""Types that the RoPE op turns where they lie; the others pass through f32."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShiftGraph:
    """The graph and its inputs: `shift` [kv_size * n_stream] i32 positions, `rot` the Hadamard matrix or None."""

    arena: TensorArena
    graph: ComputeGraph
    shift: Tensor
    rot: Tensor | None


def shift_params(spec: KVSpec, layer: LayerSpec) -> RopeParams:
    """RoPE parameters that turn a stored key of `layer` by its shift."""
    rope = spec.rope
    assert rope.mode is not None
    attn_factor = rope.attn_factor
    if spec.shift == "pure" and rope.ext_factor != 0.0:
        scale = rope.freq_scale if layer.freq_scale is None else layer.freq_scale
        attn_factor = 1.0 / (1.0 + 0.1 * math.log(1.0 / scale))
    elif spec.shift == "pure":
        attn_factor = 1.0
    return RopeParams(
        n_dims=layer.n_rot,
        mode="neox" if rope.mode in ("mrope", "imrope") else rope.mode,
        n_ctx_orig=rope.n_ctx_orig,
        freq_base=rope.freq_base if layer.freq_base is None else layer.freq_base,
        freq_scale=rope.freq_scale if layer.freq_scale is None else layer.freq_scale,
        ext_factor=rope.ext_factor,
        attn_factor=attn_factor,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
    )


def build_shift(storage: KVStorage, factors: Mapping[int, Tensor], rot_size: int) -> ShiftGraph:
    """The K-shift graph of a cache; `factors` are per-dimension RoPE divisors by layer, where a layer has them."""
    spec = storage.spec
    n = NODES_A_LAYER * len(spec.layers) + 8
    ctx = TensorArena(2 * n, graph_nodes=n)
    graph = ComputeGraph(ctx, n)
    n_cells = spec.kv_size * spec.n_stream
    shift = ctx.new_tensor("i32", n_cells)
    shift.set_input()
    rot = None
    if rot_size:
        rot = ctx.new_tensor("f32", rot_size, rot_size, name="attn_inp_k_rot")
        rot.set_input()
    for layer in storage.owners:
        if layer.spec.n_rot:
            graph.build_forward_expand(_turned(ctx, storage, layer.spec, (shift, rot, factors.get(layer.spec.il))))
    return ShiftGraph(ctx, graph, shift, rot)


def _turned(
    ctx: TensorArena, storage: KVStorage, layer: LayerSpec, inputs: tuple[Tensor, Tensor | None, Tensor | None]
) -> Tensor:
    """The node that writes the turned keys of `layer` back in place; other types pass through f32 whole."""
    shift, rot, factors = inputs
    k = storage.layers[layer.il].k
    head = dtypes.row_size(k.dtype, layer.head_dim_k)
    n_cells = k.ne[1] * k.ne[2]
    params = shift_params(storage.spec, layer)
    if k.dtype in IN_PLACE:
        first = layer.n_embd_nope * k.nb[0]
        rows = ops.view_3d(ctx, k, layer.n_rot, layer.n_head_kv, n_cells, head, k.nb[1], first)
        return ops.rope_ext_inplace(ctx, rows, shift, factors, params)
    rows = ops.view_3d(ctx, k, layer.head_dim_k, layer.n_head_kv, n_cells, head, k.nb[1], 0)
    cur = ops.cast(ctx, rows, "f32")
    if rot is not None:
        cur = _hadamard(ctx, cur, rot)
    if layer.n_embd_nope:
        latent = ops.view_3d(ctx, cur, layer.n_embd_nope, cur.ne[1], cur.ne[2], cur.nb[1], cur.nb[2], 0)
        first = layer.n_embd_nope * cur.nb[0]
        rotary = ops.view_3d(ctx, cur, layer.n_rot, cur.ne[1], cur.ne[2], cur.nb[1], cur.nb[2], first)
        cur = ops.concat(ctx, latent, ops.rope_ext(ctx, rotary, shift, factors, params), 0)
    else:
        cur = ops.rope_ext(ctx, cur, shift, factors, params)
    if rot is not None:
        cur = _hadamard(ctx, cur, rot)
    return ops.cpy(ctx, cur, rows)


def _hadamard(ctx: TensorArena, cur: Tensor, rot: Tensor) -> Tensor:
    n = rot.ne[0]
    flat = ops.reshape_2d(ctx, cur, n, cur.n_elements // n)
    turned = ops.mul_mat(ctx, rot, flat)
    ops.mul_mat_set_hint(turned, "src0_is_hadamard")
    return ops.reshape_4d(ctx, turned, *cur.ne)
