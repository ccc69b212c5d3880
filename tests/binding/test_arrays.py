"""Data in and out: the copy cases of upstream's Python example, strided views, every type, closed owners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyggmlkv.binding import Backend, ComputeGraph, TensorArena, cpu_device, dtypes, ops
from pyggmlkv.errors import BindingError, ClosedError, DTypeError, ShapeError
from tests.binding.conftest import Evaluate, tensor_of

DIMS = [(10,), (2, 3), (2, 3, 4), (2, 3, 4, 5)]
TYPES = [("i32", np.int32), ("f32", np.float32), ("f16", np.float16)]


# -- upstream: examples/python/test_tensor.py --


@pytest.mark.parametrize("ne", DIMS, ids=lambda ne: f"{len(ne)}d")
@pytest.mark.parametrize(("dtype", "numpy_type"), TYPES, ids=[t[0] for t in TYPES])
def test_copy_array_to_tensor(ctx: TensorArena, dtype: str, numpy_type: Any, ne: tuple[int, ...]) -> None:
    tensor = ctx.new_tensor(dtype, *ne)
    array = np.arange(np.prod(ne), dtype=numpy_type).reshape(ne[::-1])
    original = array.copy()
    tensor.set(array)
    np.testing.assert_array_equal(tensor.numpy(), original)
    np.testing.assert_array_equal(tensor.to_numpy(), original)


@pytest.mark.parametrize(("dtype", "numpy_type"), TYPES, ids=[t[0] for t in TYPES])
def test_copy_array_to_tensor_of_unpacked_sizes(ctx: TensorArena, dtype: str, numpy_type: Any) -> None:
    sizes = [2, 3, 4, 5]
    tensor = ctx.new_tensor(dtype, *sizes)
    array = np.arange(np.prod(sizes), dtype=numpy_type).reshape(tensor.shape)
    tensor.set(array)
    np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize(("dtype", "value"), [("i32", 42), ("f32", np.float32(4.2))], ids=["i32", "f32"])
def test_set_and_get_one_number(ctx: TensorArena, dtype: str, value: Any) -> None:
    tensor = ctx.new_tensor(dtype, 1)
    tensor.set(np.array([value], tensor.dtype_info.numpy))
    assert tensor.numpy()[0] == value


@pytest.mark.parametrize(("ne", "wrong"), [((10,), (5, 2)), ((3, 2), (3, 2)), ((4, 3, 2), (2, 4, 3)), ((5, 4, 3, 2), (2, 3, 5, 4))], ids=["1d", "2d", "3d", "4d"])  # fmt: skip  # noqa: E501
def test_copy_of_another_shape_is_refused(
    ctx: TensorArena, ne: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    tensor = ctx.new_tensor("f32", *ne)
    array = np.arange(np.prod(ne), dtype=np.float32)
    tensor.set(array.reshape(ne[::-1]))
    with pytest.raises(ShapeError, match="NumPy order"):
        tensor.set(array.reshape(wrong))


def test_copy_f16_to_f32(ctx: TensorArena) -> None:
    tensor = ctx.new_tensor("f32", 1)
    tensor.set(np.array([123.45], np.float16))
    np.testing.assert_allclose(tensor.numpy(), 123.45, rtol=1e-3)


def test_copy_f32_to_f16(ctx: TensorArena) -> None:
    tensor = ctx.new_tensor("f16", 1)
    tensor.set(np.array([123.45], np.float32))
    np.testing.assert_allclose(tensor.numpy(), 123.45, rtol=1e-3)


def test_copy_f16_to_quantised(ctx: TensorArena) -> None:
    tensor = ctx.new_tensor("q5_K", 256)
    array = np.arange(256, dtype=np.float16)
    tensor.set(array)
    np.testing.assert_allclose(array, tensor.to_numpy(), rtol=0.05)


def test_copy_quantised_to_f16(ctx: TensorArena) -> None:
    tensor = ctx.new_tensor("q5_K", 256)
    tensor.set(np.arange(256, dtype=np.float32))
    np.testing.assert_allclose(np.arange(256), tensor.to_numpy().astype(np.float16), rtol=0.05)


def test_copy_between_integers_and_floats_is_refused(ctx: TensorArena) -> None:
    with pytest.raises(DTypeError, match="takes float32, got int16"):
        ctx.new_tensor("f32", 1).set(np.arange(1, dtype=np.int16))
    with pytest.raises(DTypeError, match="takes int32, got float32"):
        ctx.new_tensor("i32", 1).set(np.arange(1, dtype=np.float32))


def test_copy_to_itself(ctx: TensorArena) -> None:
    tensor = tensor_of(ctx, np.array([42], np.int32))
    tensor.copy_from(tensor)
    tensor.set(tensor.numpy())
    assert tensor.numpy()[0] == 42


def test_copy_tensor_to_tensor(ctx: TensorArena) -> None:
    array = np.arange(10, dtype=np.float32)
    first, second = tensor_of(ctx, array), ctx.new_tensor("f32", 10)
    second.copy_from(first)
    np.testing.assert_array_equal(second.numpy(), array)
    with pytest.raises(ShapeError, match="layouts differ"):
        second.copy_from(ctx.new_tensor("f32", 9))


def test_add_in_a_graph(evaluate: Evaluate) -> None:
    a, b = np.arange(256, dtype=np.float32), np.arange(256, 0, -1, dtype=np.float32)
    np.testing.assert_allclose(evaluate(ops.add, a, b), a + b)


def test_quantised_add_in_a_graph(evaluate: Evaluate) -> None:
    a, b = np.arange(256, dtype=np.float32), np.arange(256, 0, -1, dtype=np.float32)
    difference = np.linalg.norm(a + b - evaluate(ops.add, ("q5_K", a), b), np.inf)
    assert 0 < difference < 5  # upstream's example expects more than 4, of an older quantiser


# -- views --


def test_a_view_shows_and_changes_the_tensor(ctx: TensorArena) -> None:
    tensor = tensor_of(ctx, np.zeros((2, 3), np.float32))
    tensor.numpy()[1, 2] = 5
    assert tensor.to_numpy()[1, 2] == 5
    assert not np.shares_memory(tensor.to_numpy(), tensor.numpy())


def test_strided_tensors_are_viewed_read_and_written(ctx: TensorArena) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensor = tensor_of(ctx, array)
    swapped = ops.permute(ctx, tensor, 1, 0, 2, 3)
    np.testing.assert_array_equal(swapped.numpy(), array.swapaxes(1, 2))
    np.testing.assert_array_equal(swapped.to_numpy(), array.swapaxes(1, 2))
    assert np.shares_memory(swapped.numpy(), tensor.numpy())
    swapped.set(array.swapaxes(1, 2) + 1)
    np.testing.assert_array_equal(tensor.numpy(), array + 1)


def test_strided_rows_of_quantised_tensors_are_read_and_written(ctx: TensorArena) -> None:
    array = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    tensor = tensor_of(ctx, ("q8_0", array))
    every_other = ops.view_2d(ctx, tensor, 64, 2, 2 * tensor.nb[1], 0)
    np.testing.assert_allclose(every_other.to_numpy(), array[::2], atol=0.05)
    every_other.set(-array[::2])
    np.testing.assert_allclose(tensor.to_numpy(), array * [[-1], [1], [-1], [1]], atol=0.05)


def test_empty_tensors_are_empty_arrays(ctx: TensorArena) -> None:
    tensor = ctx.new_tensor("f32", 4, 0)
    assert tensor.to_numpy().shape == (0, 4)
    tensor.set(np.zeros((0, 4), np.float32))
    assert tensor.get_bytes() == b""


def test_leading_ones_of_an_array_do_not_matter(ctx: TensorArena) -> None:
    tensor = ctx.new_tensor("f32", 3)
    tensor.set(np.ones((1, 1, 3), np.float32))
    one = ctx.new_tensor("f32", 1)
    one.set(np.float32(2))
    assert one.numpy()[0] == 2


# -- types --


@pytest.mark.parametrize("dtype", ["i8", "i16", "i32", "i64", "f64"])
def test_every_plain_type_comes_and_goes(ctx: TensorArena, dtype: str) -> None:
    tensor = ctx.new_tensor(dtype, 5)
    array = np.arange(5).astype(tensor.dtype_info.numpy)
    tensor.set(array)
    assert tensor.numpy().dtype == array.dtype
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_bf16_shows_as_bits_and_reads_as_floats(ctx: TensorArena) -> None:
    tensor = ctx.new_tensor("bf16", 3)
    tensor.set(np.array([1.0, -2.5, 3.0], np.float32))
    np.testing.assert_array_equal(tensor.numpy(), np.array([0x3F80, 0xC020, 0x4040], np.uint16))
    np.testing.assert_array_equal(tensor.to_numpy(), np.array([1.0, -2.5, 3.0], np.float32))
    assert tensor.to_numpy(dequantize=False).dtype == np.uint16
    tensor.set(np.array([0x3F80] * 3, np.uint16))
    assert list(tensor.to_numpy()) == [1, 1, 1]


QUANTISED = [n for n, i in dtypes.DTYPES.items() if i.is_quantized and n not in ("q8_1", "q8_K")]
SLOW_TABLES = (
    "iq1_s",
    "iq2_s",
    "iq2_xs",
    "iq2_xxs",
    "iq1_m",
    "iq3_s",
    "iq3_xxs",
)  # seconds to set up for writing
UNREAD = ("q1_0", "q2_0")  # types that the gguf package does not read yet


def gguf_dequantize(dtype: str, packed: bytes) -> Any:
    gguf = pytest.importorskip("gguf")
    kind = getattr(gguf.GGMLQuantizationType, dtype.upper())
    return gguf.quants.dequantize(np.frombuffer(packed, np.uint8), kind)


@pytest.mark.parametrize("dtype", [n for n in QUANTISED if n not in SLOW_TABLES])
def test_quantising_keeps_the_values_nearly(dtype: str) -> None:
    array = (
        np.random.default_rng(3).standard_normal((2, dtypes.dtype_info(dtype).block_size)).astype(np.float32)
    )
    packed = dtypes.quantize(dtype, array)
    assert len(packed) == dtypes.row_size(dtype, array.size)
    ours = dtypes.dequantize(dtype, packed, array.size)
    assert np.abs(ours.reshape(array.shape) - array).mean() < 0.9
    if dtype not in UNREAD:
        np.testing.assert_allclose(ours, gguf_dequantize(dtype, packed), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", SLOW_TABLES)
def test_dequantising_any_bytes_gives_what_the_gguf_package_gives(dtype: str) -> None:
    info = dtypes.dtype_info(dtype)
    packed = np.random.default_rng(5).integers(0, 64, 4 * info.type_size, dtype=np.uint8).tobytes()
    ours = dtypes.dequantize(dtype, packed, 4 * info.block_size)
    np.testing.assert_allclose(ours, gguf_dequantize(dtype, packed), rtol=1e-5, atol=1e-6)


def test_types_that_need_an_importance_matrix_say_so() -> None:
    assert dtypes.requires_imatrix("iq2_xxs")
    with pytest.raises(DTypeError, match="importance matrix"):
        dtypes.quantize("iq2_xxs", np.zeros((1, 256), np.float32))
    with pytest.raises(ShapeError, match="imatrix"):
        dtypes.quantize("iq2_xxs", np.zeros((1, 256), np.float32), np.ones(3, np.float32))
    with pytest.raises(DTypeError, match="no quantiser"):
        dtypes.quantize("i32", np.zeros(4, np.float32))
    with pytest.raises(DTypeError, match="into floats"):
        dtypes.dequantize("i32", bytes(16), 4)
    with pytest.raises(ShapeError, match="need 34 bytes, got 3"):
        dtypes.dequantize("q8_0", bytes(3), 32)


def test_type_names_are_understood_in_any_case() -> None:
    assert dtypes.type_traits("q4_k") == dtypes.type_traits("Q4_K") == (256, 144, True)
    assert dtypes.row_size("f16", 10) == 20


# -- bytes --


def test_bytes_are_checked_against_the_tensor(ctx: TensorArena) -> None:
    tensor = tensor_of(ctx, np.arange(4, dtype=np.int32))
    assert tensor.get_bytes(4, 4) == b"\x01\0\0\0"
    tensor.set_bytes(b"\x09\0\0\0", 8)
    assert tensor.numpy()[2] == 9
    tensor.set_zero()
    assert not tensor.numpy().any()
    for offset, n in [(0, 17), (-1, 1), (16, 1), (0, -1)]:
        with pytest.raises(ShapeError, match="outside"):
            tensor.get_bytes(offset, n)
    with pytest.raises(ShapeError, match="outside"):
        tensor.set_bytes(bytes(5), 12)


def test_unallocated_tensors_have_no_data() -> None:
    with TensorArena(2) as arena:
        tensor = arena.new_tensor("f32", 4, name="x")
        assert not tensor.is_allocated
        for use in (
            tensor.numpy,
            tensor.to_numpy,
            tensor.get_bytes,
            lambda: tensor.set(np.zeros(4, np.float32)),
        ):
            with pytest.raises(BindingError, match="'x' f32 .* has no memory yet"):
                use()


def test_quantised_tensors_cannot_be_viewed(ctx: TensorArena) -> None:
    with pytest.raises(DTypeError, match="to_numpy"):
        ctx.new_tensor("q8_0", 32).numpy()


# -- lifetimes --


def test_a_view_keeps_the_memory_of_a_closed_owner() -> None:
    arena = TensorArena(4)
    tensor = arena.new_tensor("f32", 1 << 16)
    buffer = cpu_device().buffer_type.alloc_tensors(arena)
    tensor.set(np.full(1 << 16, 3, np.float32))
    view = tensor.numpy()
    half = view[::2]
    del view
    buffer.close()
    arena.close()
    assert buffer.closed
    with pytest.raises(ClosedError):
        tensor.numpy()
    assert (half == 3).all()


def test_a_view_keeps_dropped_owners_alive() -> None:
    def make() -> Any:
        arena = TensorArena(4, data_bytes=1024)
        return tensor_of(arena, np.arange(8, dtype=np.float32)).numpy()

    assert list(make()) == list(range(8))


def test_an_arena_with_views_is_not_reset() -> None:
    with TensorArena(4, data_bytes=1024) as arena:
        view = tensor_of(arena, np.arange(8, dtype=np.float32)).numpy()
        with pytest.raises(BindingError, match="NumPy views"):
            arena.reset()
        assert view[7] == 7
        del view
        arena.reset()


def test_results_are_not_read_once_their_memory_went_to_another_graph(cpu: Backend) -> None:
    from pyggmlkv.binding import Scheduler

    with (
        TensorArena(8, graph_nodes=8) as first,
        TensorArena(8, graph_nodes=8) as second,
        Scheduler([cpu]) as scheduler,
    ):
        results = []
        for arena in (first, second):
            x = arena.new_tensor("f32", 4)
            x.set_input()
            graph = ComputeGraph(arena, 8)
            results.append(ops.silu(arena, x))
            graph.build_forward_expand(results[-1])
            scheduler.reset()
            scheduler.alloc_graph(graph)
            x.set(np.ones(4, np.float32))
            scheduler.graph_compute(graph)
            assert results[-1].numpy()[0] == pytest.approx(0.7310586)
        with pytest.raises(ClosedError, match="newer graph"):
            results[0].numpy()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0", "i32"])
def test_raw_shows_the_bytes_of_any_type_in_place(dtype: str) -> None:
    with TensorArena(2) as arena:
        tensor = arena.new_tensor(dtype, 64, 3)
        with cpu_device().buffer_type.alloc_tensors(arena):
            tensor.set_bytes(bytes(range(48)) * (tensor.nbytes // 48))
            raw = tensor.raw()
            assert raw.tobytes() == tensor.get_bytes()
            raw[5] = 200
            assert tensor.get_bytes(5, 1) == bytes([200])


def test_raw_of_a_strided_view_is_refused() -> None:
    with TensorArena(3) as arena:
        tensor = arena.new_tensor("q8_0", 64, 3)
        view = ops.view_2d(arena, tensor, 32, 3, tensor.nb[1], 0)
        with cpu_device().buffer_type.alloc_tensors(arena), pytest.raises(BindingError, match="strided"):
            view.raw()
