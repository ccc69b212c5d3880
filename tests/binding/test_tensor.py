"""Tensors and arenas: sizes, names, room, and what is gone stays gone."""

from __future__ import annotations

import pytest

from pyggmlkv.binding import Buffer, ComputeGraph, TensorArena, cpu_device, ops
from pyggmlkv.errors import ArenaFullError, BindingError, ClosedError, DTypeError, ShapeError


def test_shape_is_ne_reversed_without_trailing_ones(ctx: TensorArena) -> None:
    for ne, shape in [
        ((4,), (4,)),
        ((4, 3), (3, 4)),
        ((4, 1, 2), (2, 1, 4)),
        ((1, 1, 1, 1), (1,)),
        ((4, 0), (0, 4)),
    ]:
        assert ctx.new_tensor("f32", *ne).shape == shape
    tensor = ctx.new_tensor("f16", 5, 4, 3, 2)
    assert (tensor.ne, tensor.nb, tensor.n_dims) == ((5, 4, 3, 2), (2, 10, 40, 120), 4)
    assert (tensor.nbytes, tensor.n_elements, tensor.dtype) == (240, 120, "f16")


def test_a_node_knows_its_op_operands_and_view(ctx: TensorArena) -> None:
    a, b = ctx.new_tensor("f32", 4, 3, name="a"), ctx.new_tensor("f32", 4, 2, name="b")
    product = ops.mul_mat(ctx, a, b)
    assert (product.op, product.src, product.view_src) == ("MUL_MAT", (a, b), None)
    view = ops.view_1d(ctx, a, 4, a.nb[1])
    assert (view.op, view.view_src, view.view_offs) == ("VIEW", a, 16)
    assert ops.silu(ctx, a).op_desc == "SILU"
    assert a.op == "NONE"


def test_equal_tensors_are_one_tensor(ctx: TensorArena) -> None:
    a = ctx.new_tensor("f32", 4, name="a")
    assert ctx.get("a") == a
    assert hash(ctx.get("a")) == hash(a)
    assert ctx.new_tensor("f32", 4) != a
    assert a != "a"


def test_names_are_kept_whole_or_refused(ctx: TensorArena) -> None:
    a = ctx.new_tensor("f32", 4, name="blk.0.attn_q.weight")
    assert a.name == "blk.0.attn_q.weight"
    a.name = "ü" * 31
    assert a.name == "ü" * 31
    with pytest.raises(BindingError, match="63 bytes"):
        a.name = "x" * 64
    with pytest.raises(BindingError, match="no tensor called 'missing'"):
        ctx.get("missing")


def test_repr_is_one_line(ctx: TensorArena) -> None:
    assert repr(ctx.new_tensor("q8_0", 64, 3, name="w")) == "<Tensor 'w' q8_0 [64, 3] NONE>"


def test_tensors_come_in_the_order_they_were_made(ctx: TensorArena) -> None:
    a = ctx.new_tensor("f32", 4, name="a")
    b = ops.add(ctx, a, a)
    ComputeGraph(ctx, 16)
    c = ctx.new_tensor("f32", 4, name="c")
    assert list(ctx.tensors()) == [a, b, c]
    assert ctx.n_tensors == 3


@pytest.mark.parametrize(
    ("dtype", "ne", "error", "message"),
    [
        ("f32", (), ShapeError, "1 to 4 sizes"),
        ("f32", (1, 2, 3, 4, 5), ShapeError, "1 to 4 sizes"),
        ("f32", (4, -1), ShapeError, "negative"),
        ("q4_K", (100,), ShapeError, "whole blocks of q4_K"),
        ("f31", (4,), DTypeError, "unknown element type 'f31'; known are f32"),
        ("f32", (2**40, 2**40), ShapeError, "too many to address"),
    ],
)
def test_bad_tensors_are_refused(
    ctx: TensorArena, dtype: str, ne: tuple[int, ...], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        ctx.new_tensor(dtype, *ne)


def test_a_full_arena_refuses_and_keeps_what_it_has() -> None:
    with TensorArena(2) as arena:
        a = arena.new_tensor("f32", 4)
        ops.silu(arena, a)
        for make in (
            lambda: ops.silu(arena, a),
            lambda: arena.new_tensor("f32", 1),
            lambda: ops.argsort_top_k(arena, a, 1),
        ):
            with pytest.raises(ArenaFullError, match="larger n_tensors"):
                make()
        assert arena.n_tensors == 2


def test_data_memory_runs_out_before_ggml_notices() -> None:
    with TensorArena(10, data_bytes=64) as arena:
        arena.new_tensor("f32", 8)
        with pytest.raises(ArenaFullError, match="32 of 64 data bytes left, 48 needed"):
            arena.new_tensor("f32", 9)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ArenaFullError, match="cannot be reserved"):
        TensorArena(2**50)
    with pytest.raises(ShapeError, match="negative"):
        TensorArena(-1)


def test_a_graph_needs_room_in_its_arena_and_for_its_nodes() -> None:
    with TensorArena(3) as arena, pytest.raises(ArenaFullError, match="graph_nodes=2048"):
        ComputeGraph(arena)
    with TensorArena(40, graph_nodes=4) as arena:
        graph = ComputeGraph(arena, 4)
        x = arena.new_tensor("f32", 4)
        for _ in range(5):
            x = ops.silu(arena, x)
        with pytest.raises(ArenaFullError, match="5 nodes"):
            graph.build_forward_expand(x)
        assert graph.n_nodes == 0
        graph.build_forward_expand(x.src[0])
        assert graph.n_nodes == 4
        with pytest.raises(ArenaFullError):
            graph.build_forward_expand(x)


def test_a_long_chain_does_not_exhaust_the_stack() -> None:
    n = 40_000
    with TensorArena(n + 1, graph_nodes=n) as arena:
        x = first = arena.new_tensor("f32", 1)
        for _ in range(n):
            x = ops.silu(arena, x)
        graph = ComputeGraph(arena, n)
        graph.build_forward_expand(x)
        assert graph.n_nodes == n
        assert graph.node(0).src == (first,)
        assert graph.node(-1) == x


def test_nodes_come_in_the_order_they_run(ctx: TensorArena) -> None:
    a, b = ctx.new_tensor("f32", 4, name="a"), ctx.new_tensor("f32", 4, name="b")
    left, right = ops.silu(ctx, a), ops.relu(ctx, b)
    total = ops.add(ctx, left, right)
    total.name = "total"
    graph = ComputeGraph(ctx, 16)
    graph.build_forward_expand(total)
    assert graph.nodes == [left, right, total]
    assert graph.leafs == [a, b]
    assert graph.tensor("total") == total
    assert len(graph) == 3
    with pytest.raises(BindingError, match="no tensor called"):
        graph.tensor("nothing")
    with pytest.raises(ShapeError, match="node 3 of a graph of 3"):
        graph.node(3)
    graph.clear()
    assert graph.n_nodes == 0


def test_only_the_selected_branch_is_computed(ctx: TensorArena) -> None:
    a = ctx.new_tensor("f32", 4)
    branches = [ops.silu(ctx, a), ops.relu(ctx, a)]
    graph = ComputeGraph(ctx, 300)
    assert graph.build_forward_select(branches, 1) == branches[1]
    assert graph.nodes == branches
    with pytest.raises(ShapeError, match="index 2"):
        graph.build_forward_select(branches, 2)


def test_tensors_of_a_reset_arena_are_gone() -> None:
    arena = TensorArena(8, graph_nodes=8)
    a = arena.new_tensor("f32", 4)
    graph = ComputeGraph(arena, 8)
    arena.reset()
    b = arena.new_tensor("f32", 4)
    assert arena.n_tensors == 1
    uses = [
        lambda: a.nbytes,
        lambda: a.name,
        lambda: a.src,
        lambda: ops.silu(arena, a),
        lambda: graph.n_nodes,
        a.numpy,
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="reset"):
            use()
    assert repr(a) == "<Tensor of a reset arena>"
    assert a != b
    arena.close()
    for use in (
        lambda: b.name,
        lambda: ops.silu(arena, b),
        lambda: arena.new_tensor("f32", 1),
        arena.reset,
        lambda: list(arena.tensors()),
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_closed_buffer_is_noticed_by_everything_that_reads_it() -> None:
    with TensorArena(4) as weights, TensorArena(8, graph_nodes=8) as arena:
        w = weights.new_tensor("f32", 4, name="w")
        buffer = cpu_device().buffer_type.alloc_tensors(weights)
        assert w.buffer is buffer
        graph = ComputeGraph(arena, 8)
        graph.build_forward_expand(ops.silu(arena, w))
        buffer.close()
        with pytest.raises(ClosedError, match="Buffer was used after close"):
            w.numpy()
        with pytest.raises(ClosedError, match="Buffer was closed"):
            arena._check_operands()


def test_a_buffer_refuses_what_does_not_fit() -> None:
    kind = cpu_device().buffer_type
    assert (kind.name, kind.is_host) == ("CPU", True)
    with TensorArena(8) as arena, kind.alloc(kind.alignment * 2) as buffer:
        a, b, big = (arena.new_tensor("f32", n) for n in (4, 4, 1000))
        buffer.place(a, 0)
        with pytest.raises(BindingError, match="has memory already"):
            buffer.place(a, 0)
        with pytest.raises(BindingError, match="multiple of"):
            buffer.place(b, 1)
        with pytest.raises(ShapeError, match="needs 4000 bytes"):
            buffer.place(big, 0)
        view = ops.view_1d(arena, b, 2, 0)
        with pytest.raises(BindingError, match="without memory"):
            buffer.place(view, 0)
        buffer.place(b, kind.alignment)
        buffer.place(view, 0)
        buffer.clear(0)
        assert list(view.numpy()) == [0, 0]


def test_a_buffer_takes_usages_by_name() -> None:
    with cpu_device().buffer_type.alloc(64) as buffer:
        assert buffer.usage == "any"
        buffer.usage = "weights"
        assert buffer.usage == "weights"
        with pytest.raises(BindingError, match="any, weights, compute"):
            buffer.usage = "toys"  # type: ignore[assignment]


def test_host_memory_is_used_in_place_and_kept_alive() -> None:
    import mmap

    import numpy as np

    memory = mmap.mmap(-1, 4096)
    memory[:8] = np.array([1.5, 2.5], np.float32).tobytes()
    with TensorArena(2) as arena, Buffer.from_host_memory(cpu_device(), memory, 4096) as buffer:
        a = arena.new_tensor("f32", 2)
        buffer.place(a, 0)
        assert list(a.numpy()) == [1.5, 2.5]
        with pytest.raises(BufferError):
            memory.close()
    memory.close()
    unaligned = np.zeros(101, np.uint8)[1:]
    with pytest.raises(BindingError, match="multiple of"):
        Buffer.from_host_memory(cpu_device(), unaligned, 100)


def test_read_only_memory_is_not_written() -> None:
    import numpy as np

    memory = np.zeros(4096 + 64, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :][:4096]
    aligned.flags.writeable = False
    with TensorArena(2) as arena, Buffer.from_host_memory(cpu_device(), aligned, 4096) as buffer:
        a = arena.new_tensor("f32", 2)
        buffer.place(a, 0)
        assert not a.numpy().flags.writeable
        for write in (lambda: a.set([1.0, 2.0]), a.set_zero, lambda: a.set_bytes(b"1"), buffer.clear):
            with pytest.raises(BindingError, match="read-only"):
                write()
