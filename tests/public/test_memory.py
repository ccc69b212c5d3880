"""What every memory offers, whatever its kind: names, defaults, what comes back and what is only read."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.errors import CacheError, SequenceError

from .conftest import N_TOKENS, Kind

SIGNATURES = {
    "seq_rm": "(seq_id, p0=None, p1=None)",
    "seq_cp": "(src, dst, p0=None, p1=None)",
    "seq_keep": "(seq_id)",
    "seq_add": "(seq_id, p0, p1, delta)",
    "seq_div": "(seq_id, p0, p1, d)",
    "seq_pos_min": "(seq_id)",
    "seq_pos_max": "(seq_id)",
    "clear": "(data=True)",
    "update": "()",
    "defrag": "(max_moves=None)",
    "can_resume": "(seq_id, pos)",
    "view": "()",
    "memory_breakdown": "()",
    "render": "()",
    "close": "()",
    "k": "(layer, dequantize=True)",
    "v": "(layer, dequantize=True)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_defaults_are_those_of_the_design(ctx: pyggmlkv.Context, name: str) -> None:
    signature = inspect.signature(getattr(ctx.memory, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def test_positions_and_removal(ctx: pyggmlkv.Context, kind: Kind) -> None:
    m = ctx.memory
    assert (m.seq_pos_max(0), m.seq_pos_max(1), m.seq_pos_min(1)) == (N_TOKENS - 1, None, None)
    assert m.seq_pos_min(0) == (19 if kind.is_recurrent else 12 if kind.recipe == "gemma3" else 0) or (
        kind.recipe == "gemma3"
        and m.seq_pos_min(0) == 0  # cells behind the window stay until they are needed
    )
    assert m.seq_rm(0, 15) is not kind.is_recurrent
    assert m.seq_pos_max(0) == (19 if kind.is_recurrent else 14)
    assert m.seq_rm(0) is True
    assert m.seq_pos_max(0) is None
    ctx.decode(Batch([1, 2]))
    assert m.seq_rm(None) is True
    assert (m.view().used_cells, m.seq_pos_max(0)) == (0, None)


def test_a_whole_sequence_is_copied_and_kept(ctx: pyggmlkv.Context) -> None:
    m = ctx.memory
    assert m.seq_cp(0, 1) is None
    ctx.decode(Batch([5, 6], seq_id=1))
    assert (m.seq_pos_max(0), m.seq_pos_max(1)) == (N_TOKENS - 1, N_TOKENS + 1)
    assert m.seq_rm(0)
    assert m.seq_keep(1) is None
    assert (m.seq_pos_max(0), m.seq_pos_max(1)) == (None, N_TOKENS + 1)


def test_a_shift_waits_for_the_update(ctx: pyggmlkv.Context, kind: Kind) -> None:
    m = ctx.memory
    assert m.can_shift is True
    assert m.update() is False
    m.seq_add(0, 0, None, 5)
    assert m.seq_pos_max(0) == N_TOKENS + 4
    waits = kind.layer is not None
    assert m.has_update is waits
    assert m.cells.shift[0].max() == (5 if waits else 0)
    assert m.update() is waits
    assert not m.cells.shift.any()
    m.seq_div(0, 0, None, 2)
    assert m.seq_pos_max(0) == (N_TOKENS + 4) // 2


def test_clear_empties_cells_and_data_on_request(ctx: pyggmlkv.Context, kind: Kind) -> None:
    m = ctx.memory

    def holds_data() -> bool:
        return bool(m.s(0).any() if kind.layer is None else m.k(kind.layer).any())

    m.clear(data=False)
    assert m.seq_pos_max(0) is None
    assert holds_data()
    m.clear()
    assert not holds_data()


def test_cells_are_read_only_and_per_stream(ctx: pyggmlkv.Context, kind: Kind) -> None:
    m = ctx.memory
    n_used = 1 if kind.layer is None else N_TOKENS
    assert len(m.cells) == kind.n_stream
    stream = m.cells[0]
    assert stream.n_used == n_used
    assert stream.pos[:n_used].tolist() == ([N_TOKENS - 1] if kind.layer is None else list(range(N_TOKENS)))
    assert set(stream.pos[n_used:].tolist()) == {-1}
    assert stream.seq_ids(0) == [0]
    assert stream.seq_ids(n_used) == []
    assert (stream.pos.dtype, stream.shift.dtype, stream.seq.dtype) == (np.int32, np.int32, np.uint64)
    assert m.cells.pos.shape == m.cells.shift.shape == (kind.n_stream, len(stream))
    for array in (stream.pos, stream.shift, stream.seq):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_cells_say_which_sequences_share_them(ctx: pyggmlkv.Context, kind: Kind) -> None:
    ctx.memory.seq_cp(0, 1)
    ctx.memory.update()
    shared = [[0], [1]] if kind.n_stream == 2 else [[0, 1]]
    assert [stream.seq_ids(0) for stream in ctx.memory.cells] == shared


def test_the_view_counts(ctx: pyggmlkv.Context, kind: Kind) -> None:
    view = ctx.memory.view()
    n_used = 1 if kind.layer is None else N_TOKENS
    assert (view.token_count, view.used_cells) == (n_used, n_used)
    n_stream_cells = view.n_cells // kind.n_stream
    assert view.max_contiguous == (n_stream_cells if kind.n_stream == 2 else n_stream_cells - n_used)
    ctx.memory.seq_cp(0, 1)
    twice = ctx.memory.view()
    assert twice.token_count == 2 * n_used
    assert twice.used_cells == (2 * n_used if kind.n_stream == 2 else n_used)


def test_keys_and_values_are_copies_cell_by_cell(ctx: pyggmlkv.Context, kind: Kind) -> None:
    m = ctx.memory
    if kind.layer is None:
        for read in (m.k, m.v):
            with pytest.raises(CacheError, match="recurrent"):
                read(0)
        assert m.s(0).shape[0] == m.r(0).shape[0] == 2
        return
    k, v = m.k(kind.layer), m.v(kind.layer)
    assert k.shape == v.shape == (kind.n_stream, 64 // kind.n_stream, 128)
    assert k[0, :N_TOKENS].any(axis=1).all() and not k[0, N_TOKENS:].any()
    assert v[0, :N_TOKENS].any(axis=1).all() and not v[0, N_TOKENS:].any()
    k[:] = 0
    assert m.k(kind.layer).any()
    with pytest.raises(CacheError, match="99"):
        m.k(99)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "f16", "bf16", "f32"])
def test_what_is_stored_is_dequantised_on_request(model_of: object, dtype: str) -> None:
    model = model_of("llama")  # type: ignore[operator]
    kinds = {"type_k": dtype, "type_v": dtype, "flash_attn": "on", "attn_rot": False, "n_ctx": 32}
    with (
        pyggmlkv.Context(model, n_threads=1, **kinds) as ctx,
        pyggmlkv.Context(model, n_threads=1, **{**kinds, "type_k": "f32", "type_v": "f32"}) as exact,
    ):
        for each in (ctx, exact):
            each.decode(Batch(range(N_TOKENS)))
        limit = {"q8_0": 0.02, "q4_0": 0.3, "f16": 2e-3, "bf16": 2e-2, "f32": 0}[dtype]
        for ours, theirs in (
            (ctx.memory.k(0, dequantize=True), exact.memory.k(0)),
            (ctx.memory.v(0), exact.memory.v(0)),
        ):
            assert np.abs(ours.astype(np.float32) - theirs).max() <= limit * np.abs(theirs).max()
        raw = ctx.memory.k(0, dequantize=False)
        bytes_a_row = {"q8_0": 4 * 34, "q4_0": 4 * 18, "f16": 256, "bf16": 256, "f32": 512}[dtype]
        assert raw.shape[:2] == (1, 32)
        assert raw.nbytes == 32 * bytes_a_row


def test_sizes_add_up_to_what_the_device_holds(ctx: pyggmlkv.Context, kind: Kind) -> None:
    m = ctx.memory
    held = m.memory_breakdown()
    assert set(held) == {"CPU"}
    recurrent = {"recurrent": m, "hybrid": getattr(m, "recr", None)}[
        "recurrent" if kind.layer is None else "hybrid"
    ]
    states = recurrent.size_r_bytes + recurrent.size_s_bytes if recurrent is not None else 0
    assert held["CPU"] == m.size_k_bytes + m.size_v_bytes + states
    n_layer = {"llama": 2, "gemma3": 4, "jamba": 2, "mamba": 0}[kind.recipe]
    assert m.size_k_bytes == m.size_v_bytes == n_layer * 64 * 128 * 2
    assert ctx.memory_breakdown()["memory"] == held


def test_printing_is_one_line_and_render_draws_every_cell(ctx: pyggmlkv.Context, kind: Kind) -> None:
    m = ctx.memory
    assert str(m) == repr(m)
    assert "\n" not in str(m)
    assert str(m).startswith(f"<{type(m).__name__}")
    drawn = m.render()
    assert isinstance(drawn, str)
    if kind.layer is not None:
        assert "0" * N_TOKENS + "." in drawn.replace("\n", "")


def test_defrag_reports_and_the_threshold_is_off_by_default(ctx: pyggmlkv.Context, kind: Kind) -> None:
    m = ctx.memory
    assert m.defrag_threshold is None
    report = m.defrag()
    assert (report.n_moves, report.n_cells, report.done) == (0, 0, True)
    if kind.is_recurrent:
        return
    m.seq_rm(0, 2, 6)
    assert not m.defrag(max_moves=0).done
    first = m.defrag(max_moves=1)
    assert first.n_moves == (2 if kind.recipe == "gemma3" else 1)
    assert m.defrag().done
    assert m.cells[0].pos[: N_TOKENS - 4].min() >= 0
    m.defrag_threshold = 0.1
    assert m.defrag_threshold == 0.1
    ctx.decode(Batch([1]))
    assert m.seq_pos_max(0) == N_TOKENS


@pytest.mark.parametrize("seq_id", [-2, 2, 300])
def test_an_id_that_is_not_there_is_named(ctx: pyggmlkv.Context, seq_id: int) -> None:
    if ctx.cparams.kv_unified and seq_id == 2 and type(ctx.memory).__name__ != "HybridMemory":
        seq_id = 256
    for ask in (ctx.memory.seq_pos_max, ctx.memory.seq_rm, ctx.memory.seq_keep):
        with pytest.raises(SequenceError, match=str(seq_id)):
            ask(seq_id)
