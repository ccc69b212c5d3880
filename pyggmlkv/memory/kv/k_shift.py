"""K-shift: turn cached keys by the position change of their cells, on the device that holds them.

A graph turns all layers; the shift of every cell is an input. Cells go in chunks that fit in the compute memory there
is, so that no update allocates.  Upstream: llama_kv_cache::build_graph_shift, build_rope_shift. Differs: upstream takes
all cells at once; bf16 keys, and quantised keys without attention
rotation, shift too (upstream crashes); `shift="pure"` turns without YaRN's magnitude factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from pyggmlkv.backend.runner import Runner
from pyggmlkv.binding import ComputeGraph, Tensor, TensorArena, dtypes, ops
from pyggmlkv.binding.ops import RopeParams
from pyggmlkv.errors import BindingError
from pyggmlkv.memory import slots
from pyggmlkv.memory.config import KVSpec, LayerSpec
from pyggmlkv.memory.kv.storage import KVStorage
from pyggmlkv.memory.seq_ops import CellStreams
from pyggmlkv.memory.site import Site
from pyggmlkv.types import F32

NODES_A_LAYER = 16
MIN_CHUNK = 32
"""Cells turned at once at least, whatever memory that takes."""
UNRESERVED = 32 << 20
"""Bytes of compute memory taken where the runner has reserved none."""
SLACK = 4096
"""Bytes left for alignment."""
IN_PLACE = ("f32", "f16")
"""Types that the RoPE op turns where they lie; the others pass through f32."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShiftGraph:
    """The graph of a chunk of cells and its inputs: `shift` [n_cells] i32 positions, `rot` the Hadamard matrix or None."""

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


def shift_keys(storage: KVStorage, site: Site, streams: CellStreams, rot: F32 | None) -> None:
    """Turn all keys by the pending shift of their cells, chunk by chunk; what was turned is no longer pending."""
    spec, runner = storage.spec, site.runner
    n_cells = spec.kv_size * spec.n_stream
    rot_size = 0 if rot is None else len(rot)
    step = chunk_size(storage, runner, rot_size)
    for begin in range(0, n_cells, step):
        cells = range(begin, min(begin + step, n_cells))
        shift = build_shift(storage, site.rope_factors, rot_size, cells)
        with shift.arena:
            if shift.graph.n_nodes:
                runner.alloc(shift.graph)
                _set_shift(shift.shift, streams, cells)
                if shift.rot is not None and rot is not None:
                    shift.rot.set(rot)
                try:
                    runner.compute(shift.graph, stoppable=False)
                finally:
                    runner.forget()
        streams.reset_shift(cells)


def _set_shift(shift: Tensor, streams: CellStreams, cells: range) -> None:
    """Fill the input in place where it takes all cells and the host can write there."""
    n_cells = streams.size * streams.n_stream
    if len(cells) == n_cells:
        try:
            slots.fill_k_shift(streams, shift.numpy())
            return
        except BindingError:
            pass  # on a device
    moved = np.empty(n_cells, np.int32)
    slots.fill_k_shift(streams, moved)
    shift.set(moved[cells.start : cells.stop])


def chunk_size(storage: KVStorage, runner: Runner, rot_size: int) -> int:
    """Cells that a K-shift turns at once so that each layer's copies fit in its device's compute memory."""
    spec = storage.spec
    sizes = runner.buffer_sizes()
    reserved = sum(sizes.values())
    size = n_cells = spec.kv_size * spec.n_stream
    for layer in storage.owners:
        kind = layer.k.buffer
        room = sizes.get(kind.buffer_type.name, 0) if kind is not None and reserved else UNRESERVED
        cell = 4 if spec.type_k in IN_PLACE else 4 + 12 * layer.spec.n_embd_k_gqa
        size = min(size, (room - 4 * rot_size**2 - SLACK) // cell)
    size = max(size, MIN_CHUNK)
    return n_cells if size >= n_cells else size // MIN_CHUNK * MIN_CHUNK


def build_shift(storage: KVStorage, factors: Mapping[int, Tensor], rot_size: int, cells: range) -> ShiftGraph:
    """The K-shift graph of `cells`, counted over all streams; `factors` are RoPE divisors by layer, where a layer has them."""
    spec = storage.spec
    n = NODES_A_LAYER * len(spec.layers) + 8
    ctx = TensorArena(2 * n, graph_nodes=n)
    graph = ComputeGraph(ctx, n)
    shift = ctx.new_tensor("i32", len(cells))
    shift.set_input()
    rot = None
    if rot_size:
        rot = ctx.new_tensor("f32", rot_size, rot_size, name="attn_inp_k_rot")
        rot.set_input()
    for layer in storage.owners:
        if layer.spec.n_rot:
            graph.build_forward_expand(
                _turned(ctx, storage, layer.spec, (shift, rot, factors.get(layer.spec.il)), cells)
            )
    return ShiftGraph(ctx, graph, shift, rot)


def _turned(
    ctx: TensorArena,
    storage: KVStorage,
    layer: LayerSpec,
    inputs: tuple[Tensor, Tensor | None, Tensor | None],
    cells: range,
) -> Tensor:
    """The node that writes the turned keys of `layer` back in place; other types pass through f32 whole."""
    shift, rot, factors = inputs
    k = storage.layers[layer.il].k
    head = dtypes.row_size(k.dtype, layer.head_dim_k)
    first = cells.start * k.nb[1]
    params = shift_params(storage.spec, layer)
    if k.dtype in IN_PLACE:
        first += layer.n_embd_nope * k.nb[0]
        rows = ops.view_3d(ctx, k, layer.n_rot, layer.n_head_kv, len(cells), head, k.nb[1], first)
        return ops.rope_ext_inplace(ctx, rows, shift, factors, params)
    rows = ops.view_3d(ctx, k, layer.head_dim_k, layer.n_head_kv, len(cells), head, k.nb[1], first)
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
