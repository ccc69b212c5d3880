"""Case 23: rows written into a cache of any type are the quantiser's bytes, others stay; what cannot be is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pyggmlkv import KVCache, KVSpec, LayerSpec
from pyggmlkv.binding import ComputeGraph, Scheduler, TensorArena, cpu_device, dtypes, ops
from pyggmlkv.errors import CacheError, DTypeError, PyggmlkvError, RowIndexError

TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
WIDTHS = [32, 64, 96, 576]
ORDERS = {"not sorted": [6, 1, 4], "repeated": [2, 5, 2], "all": [*range(7, -1, -1)], "one": [7]}
N_ROWS = 8


def written(
    dtype: str, width: int, idxs: list[int], index_type: str, n_stream: int = 1
) -> tuple[bytes, np.ndarray]:
    """Bytes of a cache [width, N_ROWS * n_stream] after a write, and the rows (n, width) that were written."""
    rows = np.random.default_rng(len(idxs)).standard_normal((len(idxs), width), np.float32)
    with cpu_device().init() as backend, TensorArena(8, graph_nodes=8, data_bytes=1 << 18) as ctx:
        backend.set_n_threads(1)
        cache = ctx.new_tensor(dtype, width, N_ROWS * n_stream)
        cache.set_bytes(bytes([85]) * cache.nbytes)
        source, index = ctx.new_tensor("f32", width, len(idxs)), ctx.new_tensor(index_type, len(idxs))
        source.set(rows)
        index.set(np.array(idxs, np.int64 if index_type == "i64" else np.int32))
        graph = ComputeGraph(ctx, 8)
        graph.build_forward_expand(ops.set_rows(ctx, cache, source, index))
        backend.graph_compute(graph)
        return cache.get_bytes(), rows


@pytest.mark.parametrize("index_type", ["i32", "i64"])
@pytest.mark.parametrize("idxs", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", TYPES)
def test_written_rows_are_the_quantisers_bytes(
    dtype: str, width: int, idxs: list[int], index_type: str
) -> None:
    data, rows = written(dtype, width, idxs, index_type, n_stream=2)
    size = dtypes.row_size(dtype, width)
    last = {cell: row for cell, row in zip(idxs, rows, strict=True)}
    for cell in range(2 * N_ROWS):
        found = data[cell * size : (cell + 1) * size]
        if cell not in last:
            assert found == bytes([85]) * size, cell
        elif dtype == "iq4_nl":  # files are made with a search that writes do not take the time for
            gap = (
                np.square(dtypes.dequantize(dtype, found, width) - last[cell]).sum()
                / np.square(last[cell]).sum()
            )
            assert gap < 1e-2, cell
        else:
            assert found == dtypes.quantize(dtype, last[cell]), cell


@pytest.mark.parametrize("index_type", ["i32", "i64"])
@pytest.mark.parametrize("bad", [N_ROWS, -1, 2**31 - 1])
def test_a_row_that_is_not_there_is_refused_before_anything_is_written(bad: int, index_type: str) -> None:
    with pytest.raises(RowIndexError, match=str(bad)):
        written("f16", 64, [1, bad, 2], index_type)
    with cpu_device().init() as backend, TensorArena(8, graph_nodes=8, data_bytes=1 << 16) as ctx:
        cache, source = ctx.new_tensor("f16", 64, N_ROWS), ctx.new_tensor("f32", 64, 2)
        index = ctx.new_tensor(index_type, 2)
        cache.set_bytes(bytes([85]) * cache.nbytes)
        source.set(np.zeros((2, 64), np.float32))
        index.set(np.array([0, bad], index.dtype_info.numpy))
        graph = ComputeGraph(ctx, 8)
        graph.build_forward_expand(ops.set_rows(ctx, cache, source, index))
        with pytest.raises(RowIndexError, match="nothing was run"):
            backend.graph_compute(graph)
        assert cache.get_bytes() == bytes([85]) * cache.nbytes
        index.set(np.array([0, 1], index.dtype_info.numpy))
        backend.graph_compute(graph)
        assert cache.get_bytes() != bytes([85]) * cache.nbytes


def test_a_scheduler_looks_at_row_ids_before_each_run() -> None:
    with (
        cpu_device().init() as backend,
        Scheduler([backend], graph_size=64) as scheduler,
        TensorArena(8, graph_nodes=8) as ctx,
    ):
        rows, ids = ctx.new_tensor("f32", 4, N_ROWS), ctx.new_tensor("i32", 3)
        rows.set_input()
        ids.set_input()
        graph = ComputeGraph(ctx, 8)
        out = ops.get_rows(ctx, rows, ids)
        graph.build_forward_expand(out)
        scheduler.alloc_graph(graph)
        rows.set(np.arange(4 * N_ROWS, dtype=np.float32).reshape(N_ROWS, 4))
        for given, fits in (([0, 7, 3], True), ([0, 8, 3], False), ([-1, 0, 0], False), ([1, 1, 1], True)):
            ids.set(np.array(given, np.int32))
            if fits:
                scheduler.graph_compute(graph)
                assert out.to_numpy()[:, 0].tolist() == [4.0 * i for i in given]
            else:
                with pytest.raises(RowIndexError, match="0 to 7"):
                    scheduler.graph_compute(graph)


@pytest.mark.parametrize("dtype", [t for t in TYPES if t not in ("f32", "f16", "bf16")])
@pytest.mark.parametrize("head_dim", [48, 80])
def test_a_width_that_is_no_whole_block_is_refused_when_the_cache_is_built(dtype: str, head_dim: int) -> None:
    for types in ({"type_k": dtype}, {"type_v": dtype}):
        with pytest.raises(CacheError, match=rf"{head_dim}.*{dtype}"):
            KVCache(KVSpec(LayerSpec.uniform(1, 1, head_dim), 32, **types))
    with pytest.raises(PyggmlkvError), TensorArena(4) as ctx:
        ctx.new_tensor(dtype, head_dim, 8)


@pytest.mark.parametrize("dtype", ["q2_K", "iq2_xxs", "i32", "f64", "nothing"])
def test_a_type_that_no_write_makes_is_refused_when_the_cache_is_built(dtype: str) -> None:
    with pytest.raises(CacheError, match=f"type_k='{dtype}'"):
        KVCache(KVSpec(LayerSpec.uniform(1, 1, 64), 32, type_k=dtype))


def test_the_device_says_which_writes_it_has_and_the_op_refuses_the_rest() -> None:
    with TensorArena(64) as ctx:
        b, c = ctx.new_tensor("f32", 256, 2), ctx.new_tensor("i64", 2)
        for dtype in TYPES:
            assert cpu_device().supports_op(ops.set_rows(ctx, ctx.new_tensor(dtype, 256, 8), b, c)), dtype
        with pytest.raises(DTypeError, match="iq2_xxs"):
            ops.set_rows(ctx, ctx.new_tensor("iq2_xxs", 256, 8), b, c)
