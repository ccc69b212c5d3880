"""The oracle itself: one ggml in the process, cells and state readable, refusals told apart from crashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.oracle.libllama import ContextParams, DecodeError, Library, OracleError, RefContext, RefModel
from tests.oracle.libllama.library import mapped_libraries

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 128, 24)]


@pytest.fixture(scope="module")
def model(reference: Library, tiny_model: Callable[[str], Path]) -> Iterator[RefModel]:
    with RefModel(reference, tiny_model("llama")) as opened:
        yield opened


@pytest.fixture
def ctx(model: RefModel) -> Iterator[RefContext]:
    with model.context(ContextParams(n_ctx=256, n_threads=1, n_seq_max=2, kv_unified=True)) as opened:
        yield opened


def test_one_libggml_is_mapped_and_it_is_the_package_s(reference: Library) -> None:
    found = mapped_libraries("libggml-base")
    if not found:
        pytest.skip("this system does not list mapped libraries in /proc/self/maps")
    assert [path.parent.name for path in found] == ["_lib"]


def test_the_reference_is_deterministic(model: RefModel) -> None:
    rows = []
    for n_threads in (1, 2, 1):
        with model.context(ContextParams(n_ctx=256, n_threads=n_threads)) as ctx:
            ctx.decode(TOKENS, logits="all")
            rows.append(ctx.logits.tobytes())
    assert len(set(rows)) == 1


def test_cells_show_positions_sequences_and_head(ctx: RefContext) -> None:
    ctx.decode(TOKENS[:4], seq_id=[[0], [0, 1], [0], [1]], pos=[0, 1, 2, 2])
    cells = ctx.memory.cells()
    assert cells.pos[:5].tolist() == [0, 1, 2, 2, -1]
    assert [cells.sequences(i) for i in range(5)] == [[0], [0, 1], [0], [1], []]
    assert cells.head == 4


def test_update_applies_pending_shifts(ctx: RefContext) -> None:
    ctx.decode(TOKENS)
    ctx.memory.seq_rm(0, 4, 8)
    ctx.memory.seq_add(0, 8, None, -4)
    assert set(ctx.memory.cells().shift.tolist()) == {0, -4}
    assert ctx.memory.update()
    assert set(ctx.memory.cells().shift.tolist()) == {0}
    assert ctx.memory.seq_pos_max(0) == len(TOKENS) - 5


def test_a_refused_batch_carries_the_code_and_the_reason(ctx: RefContext) -> None:
    ctx.decode(TOKENS[:4])
    with pytest.raises(DecodeError, match="consecutive") as caught:
        ctx.decode(TOKENS[:2], pos=[9, 10])
    assert caught.value.code == -1


def test_a_full_cache_is_code_one(ctx: RefContext) -> None:
    ctx.decode([1] * 200)
    with pytest.raises(DecodeError) as caught:
        ctx.decode([1] * 100)
    assert caught.value.code == 1


def test_what_would_abort_the_reference_is_an_error_here(ctx: RefContext) -> None:
    with pytest.raises(OracleError, match="n_batch is 256"):
        ctx.decode([1] * 300)


@pytest.mark.parametrize("seq_id", [None, 0], ids=["whole", "sequence"])
def test_state_goes_in_and_out(model: RefModel, ctx: RefContext, seq_id: int | None) -> None:
    ctx.decode(TOKENS)
    data = ctx.state_get(seq_id)
    with model.context(ctx.params) as other:
        assert other.state_set(data, seq_id) == len(data)
        assert other.state_get(seq_id) == data
        ctx.decode([5])
        other.decode([5])
        assert other.logits.tobytes() == ctx.logits.tobytes()


@pytest.mark.parametrize("seq_id", [None, 1], ids=["GGSN", "GGSQ"])
def test_state_files_keep_their_tokens(ctx: RefContext, tmp_path: Path, seq_id: int | None) -> None:
    ctx.decode(TOKENS, seq_id=1)
    ctx.state_save(tmp_path / "state", TOKENS, seq_id)
    assert ctx.state_load(tmp_path / "state", seq_id) == TOKENS


def test_nodes_are_captured_by_name(model: RefModel) -> None:
    params = ContextParams(
        n_ctx=256, flash_attn="off", capture=lambda name: name in ("l_out-0", "attn_inp_kq_mask")
    )
    with model.context(params) as ctx:
        ctx.decode(TOKENS[:3])
        assert ctx.nodes["l_out-0"].shape == (1, 1, 3, model.n_embd)
        assert (ctx.nodes["attn_inp_kq_mask"][0, 0, :, :3] == 0).sum() == 6


def test_the_log_is_captured_where_asked(
    model: RefModel, reference: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "3")
    with model.context(ContextParams(n_ctx=256)) as ctx:
        ctx.decode(TOKENS[:3])
        ctx.decode(TOKENS[:3])
        assert any("used =     3" in line for line in ctx.log)
