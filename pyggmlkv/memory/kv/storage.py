"""K and V tensors of a cache, and how a graph writes and reads them.

Owns memory on devices; knows nothing of which cell holds what.
Upstream: llama-kv-cache.cpp, constructor, get_k, get_v, cpy_k, cpy_v.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from pyggmlkv.binding import Buffer, BufferType, Tensor, TensorArena, dtypes, ops
from pyggmlkv.errors import CacheError
from pyggmlkv.memory.config import KVSpec, LayerSpec
from pyggmlkv.memory.site import by_device


@dataclasses.dataclass(frozen=True, slots=True)
class LayerStorage:
    """One layer's rows: `k` [n_embd_k_gqa, kv_size, n_stream], `v` alike or None; 2-D views of each stream."""

    spec: LayerSpec
    k: Tensor
    v: Tensor | None
    k_streams: tuple[Tensor, ...]
    v_streams: tuple[Tensor, ...]


CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
"""Element types that `set_rows` writes."""


def check_types(spec: KVSpec) -> None:
    """Refuse element types that a cache cannot be made of, before anything is allocated.

    Raises:
        CacheError: a type that cannot be written, V quantised while transposed, or a row that is not whole blocks.
    """
    for setting, dtype in (("type_k", spec.type_k), ("type_v", spec.type_v)):
        if dtype not in CACHE_TYPES:
            known = ", ".join(CACHE_TYPES)
            raise CacheError(
                f"{setting}={dtype!r}: a cache can be made of {known}", parameter=setting, dtype=dtype
            )
    block_k = dtypes.dtype_info(spec.type_k).block_size
    v_traits = dtypes.dtype_info(spec.type_v)
    if spec.v_trans and v_traits.is_quantized:
        raise CacheError(
            f"type_v={spec.type_v!r} needs flash attention: a transposed V is written element by element",
            type_v=spec.type_v,
        )
    for layer in spec.layers:
        rows = [("K", spec.type_k, layer.head_dim_k, block_k)]
        if layer.has_v:
            rows.append(("V", spec.type_v, layer.head_dim_v, v_traits.block_size))
        for side, dtype, head_dim, block in rows:
            if head_dim % block:
                raise CacheError(
                    f"layer {layer.il}: {side} heads of {head_dim} elements are not whole blocks of {dtype} ({block})",
                    layer=layer.il,
                    dtype=dtype,
                )


Arenas = dict[BufferType, TensorArena]


def lay_out(
    spec: KVSpec, buffer_type_of: Callable[[int], BufferType]
) -> tuple[Arenas, dict[int, LayerStorage]]:
    """The tensors of a cache without memory: an arena a buffer type, and each owning layer's rows.

    Raises:
        CacheError: see `check_types`.
    """
    check_types(spec)
    arenas: Arenas = {}
    layers: dict[int, LayerStorage] = {}
    for layer in spec.layers:
        buft = buffer_type_of(layer.il)
        arena = arenas.get(buft)
        if arena is None:
            arena = arenas[buft] = TensorArena(2 * (1 + spec.n_stream) * len(spec.layers))
        layers[layer.il] = _layer(spec, arena, layer)
    return arenas, layers


def _layer(spec: KVSpec, arena: TensorArena, layer: LayerSpec) -> LayerStorage:
    size, ns = spec.kv_size, spec.n_stream
    k = arena.new_tensor(spec.type_k, layer.n_embd_k_gqa, size, ns, name=f"cache_k_l{layer.il}")
    v = None
    if layer.has_v:
        row = spec.n_embd_v_row if spec.v_trans else layer.n_embd_v_gqa
        v = arena.new_tensor(spec.type_v, row, size, ns, name=f"cache_v_l{layer.il}")

    def streams(t: Tensor | None) -> tuple[Tensor, ...]:
        if t is None:
            return ()
        return tuple(ops.view_2d(arena, t, t.ne[0], size, t.nb[1], s * t.nb[2]) for s in range(ns))

    return LayerStorage(layer, k, v, streams(k), streams(v))


def predict(spec: KVSpec, buffer_type_of: Callable[[int], BufferType]) -> dict[str, int]:
    """Bytes that `KVStorage` would allocate, by device name; nothing is allocated.

    Raises:
        CacheError: see `check_types`.
    """
    arenas, _ = lay_out(spec, buffer_type_of)
    try:
        return by_device((buft, buft.alloc_tensors_size(arena)) for buft, arena in arenas.items())
    finally:
        for arena in arenas.values():
            arena.close()


class KVStorage:
    """Allocates the tensors of a `KVSpec`, zeroed, one buffer per buffer type.

    `borrowed` lists the layers that read rows of others: `layers` has them, graphs must not write them.
    """

    def __init__(self, spec: KVSpec, buffer_type_of: Callable[[int], BufferType]) -> None:
        for il, owner in spec.reuse.items():
            _check_reuse(spec, il, owner)
        self.spec = spec
        arenas, self.layers = lay_out(spec, buffer_type_of)
        self._arenas = tuple(arenas.values())
        self.buffers: tuple[Buffer, ...] = tuple(buft.alloc_tensors(arena) for buft, arena in arenas.items())
        self.clear()
        self.layers |= {il: self.layers[owner] for il, owner in spec.reuse.items()}
        self.borrowed = frozenset(spec.reuse)

    @property
    def owners(self) -> list[LayerStorage]:
        """Layers that own storage, in model order."""
        return [self.layers[layer.il] for layer in self.spec.layers]

    @property
    def nbytes_k(self) -> int:
        return sum(layer.k.nbytes for layer in self.owners)

    @property
    def nbytes_v(self) -> int:
        return sum(layer.v.nbytes for layer in self.owners if layer.v is not None)

    def clear(self) -> None:
        """Zero all rows; masked cells enter products as 0 x row, so none may hold a NaN."""
        for buffer in self.buffers:
            buffer.clear(0)

    def copy_stream(self, src: int, dst: int) -> None:
        """Copy one stream's rows over another's, every layer.  Upstream: llama_kv_cache::update."""
        for layer in self.owners:
            layer.k_streams[dst].copy_from(layer.k_streams[src])
            if layer.v is not None:
                layer.v_streams[dst].copy_from(layer.v_streams[src])

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        for arena in self._arenas:
            arena.close()

    # graph side

    def cpy_k(self, ctx: TensorArena, k_cur: Tensor, k_idxs: Tensor, il: int) -> Tensor:
        """Write rows `k_cur` [head_dim_k, n_head_kv, n_tokens] to the cells `k_idxs` [n_tokens] i64.

        Raises:
            CacheError: the layer borrows its rows.
        """
        k = self._written(il).k
        rows = ops.view_2d(ctx, k_cur, k_cur.ne[0] * k_cur.ne[1], k_cur.ne[2], k_cur.nb[2], 0)
        return ops.set_rows(ctx, self._all_streams(ctx, k), rows, k_idxs)

    def cpy_v(self, ctx: TensorArena, v_cur: Tensor, v_idxs: Tensor, il: int) -> Tensor:
        """Write rows `v_cur` [head_dim_v, n_head_kv, n_tokens]; transposed V takes one index an element.

        Raises:
            CacheError: the layer borrows its rows.
        """
        v = self._written(il).v
        assert v is not None
        n_gqa, n_tokens = v_cur.ne[0] * v_cur.ne[1], v_cur.ne[2]
        if not self.spec.v_trans:
            rows = ops.view_2d(ctx, v_cur, n_gqa, n_tokens, v_cur.nb[2], 0)
            return ops.set_rows(ctx, self._all_streams(ctx, v), rows, v_idxs)
        if v_cur.nb[2] == n_gqa * v_cur.nb[0]:
            rows = ops.reshape_2d(ctx, v_cur, n_gqa, n_tokens)
        else:
            rows = ops.cont_2d(ctx, v_cur, n_gqa, n_tokens)
        if n_gqa < v.ne[0]:
            rows = ops.pad(ctx, rows, v.ne[0] - n_gqa, 0, 0, 0)
        view = ops.reshape_2d(ctx, v, 1, v.n_elements)
        return ops.set_rows(ctx, view, ops.reshape_2d(ctx, rows, 1, rows.n_elements), v_idxs)

    def _written(self, il: int) -> LayerStorage:
        if il in self.borrowed:
            owner = self.layers[il].spec.il
            raise CacheError(
                f"layer {il} reads the rows of layer {owner} and must not write them", layer=il, owner=owner
            )
        return self.layers[il]

    def _all_streams(self, ctx: TensorArena, t: Tensor) -> Tensor:
        return ops.reshape_2d(ctx, t, t.ne[0], t.ne[1] * t.ne[2]) if t.ne[2] > 1 else t

    def get_k(self, ctx: TensorArena, il: int, n_kv: int, streams: range) -> Tensor:
        """First `n_kv` cells of the streams: [head_dim_k, n_head_kv, n_kv, n_stream]."""
        layer = self.layers[il]
        k, spec = layer.k, layer.spec
        head = dtypes.row_size(k.dtype, spec.head_dim_k)
        ne = (spec.head_dim_k, spec.n_head_kv, n_kv, len(streams))
        return ops.view_4d(ctx, k, *ne, head, k.nb[1], k.nb[2], k.nb[2] * streams.start)

    def get_v(self, ctx: TensorArena, il: int, n_kv: int, streams: range) -> Tensor:
        """As `get_k`; transposed: [n_kv, n_head_kv, head_dim_v, n_stream]."""
        layer = self.layers[il]
        v, spec = layer.v, layer.spec
        assert v is not None
        first = v.nb[2] * streams.start
        if not self.spec.v_trans:
            head = dtypes.row_size(v.dtype, spec.head_dim_v)
            ne = (spec.head_dim_v, spec.n_head_kv, n_kv, len(streams))
            return ops.view_4d(ctx, v, *ne, head, v.nb[1], v.nb[2], first)
        column = self.spec.kv_size * v.nb[0]
        ne = (n_kv, spec.n_head_kv, spec.head_dim_v, len(streams))
        return ops.view_4d(ctx, v, *ne, column * spec.head_dim_v, column, v.nb[2], first)


class BorrowedStorage(KVStorage):
    """Another storage's rows under other layer numbers: `share` maps this model's layers to those of `source`.

    Owns nothing and writes nothing.  Upstream: layer_share_cb.
    """

    def __init__(self, source: KVStorage, share: Mapping[int, int]) -> None:
        for il, layer in share.items():
            if layer not in source.layers:
                raise CacheError(
                    f"layer {il} is to share layer {layer}, which the other cache does not have; it has "
                    f"{sorted(source.layers)}",
                    layer=il,
                    source=layer,
                )
        self.layers = {il: source.layers[layer] for il, layer in share.items()}
        layers = tuple(dataclasses.replace(layer.spec, il=il) for il, layer in self.layers.items())
        self.spec = dataclasses.replace(source.spec, layers=layers, reuse={})
        self.borrowed = frozenset(share)
        self.buffers = ()
        self._arenas = ()

    @property
    def owners(self) -> list[LayerStorage]:
        return []


def _check_reuse(spec: KVSpec, il: int, owner: int) -> None:
    owners = {layer.il for layer in spec.layers}
    if owner not in owners:
        raise CacheError(
            f"layer {il} is to reuse layer {owner}, which has no storage here; layers {sorted(owners)} have",
            layer=il,
            owner=owner,
        )
    if il in owners:
        raise CacheError(
            f"layer {il} is to reuse layer {owner} but has storage of its own", layer=il, owner=owner
        )
