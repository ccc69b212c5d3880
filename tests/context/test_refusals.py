"""What a context refuses leaves memory byte for byte as it was, search heads included, and says what was wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch, errors

N_VOCAB = 128


def fingerprint(ctx: pyggmlkv.Context) -> tuple[object, ...]:
    """Every byte that a refusal must leave alone: cells of all streams, heads, pending work, K and V."""
    m = ctx.memory
    streams = m.streams
    cells = [
        (c.pos.tobytes(), c.shift.tobytes(), c.seq.tobytes(), c.n_used, c.has_shift) for c in streams.cells
    ]
    extents = [(s, m.seq_pos_min(s), m.seq_pos_max(s)) for s in range(min(8, m.spec.n_seq_ids))]
    data = [(m.k(il).tobytes(), m.v(il).tobytes()) for il in sorted(m.storage.layers)]
    return (cells, list(streams.heads), list(streams.stream_copies), extents, data)


REFUSED: dict[str, tuple[Callable[[], Batch], type[Exception], str]] = {
    "empty": (lambda: Batch([]), errors.BatchError, "token"),
    "longer than n_batch": (lambda: Batch([1] * 65), errors.BatchError, "65"),
    "no slot": (lambda: Batch([1] * 60), errors.NoSlotError, "free"),
    "no slot at the second ubatch": (lambda: Batch([1] * 50), errors.NoSlotError, "free"),
    "gap after what is stored": (lambda: Batch([1], pos=[25]), errors.BatchError, "25"),
    "gap inside": (lambda: Batch([1, 2, 3], pos=[20, 21, 23]), errors.BatchError, "23"),
    "backwards": (lambda: Batch([1, 2], pos=[20, 19]), errors.BatchError, "19"),
    "a position that is taken": (lambda: Batch([1], pos=[7]), errors.BatchError, "7"),
    "negative position": (lambda: Batch([1], pos=[-3]), errors.BatchError, "-3"),
    "same position twice": (lambda: Batch([1, 2], pos=[20, 20]), errors.BatchError, "20"),
    "token outside the vocabulary": (lambda: Batch([N_VOCAB]), errors.BatchError, "128"),
    "negative token": (lambda: Batch([-1]), errors.BatchError, "-1"),
    "sequence id out of range": (lambda: Batch([1], seq_id=2), errors.BatchError, "2"),
    "negative sequence id": (lambda: Batch([1], seq_id=-1), errors.BatchError, "-1"),
    "token without a sequence": (lambda: Batch([1], seq_id=[[]]), errors.BatchError, "seq"),
    "one sequence wrong": (lambda: Batch([1, 2], pos=[20, 9], seq_id=[0, 1]), errors.BatchError, "9"),
    "embeddings of another width": (lambda: Batch(embd=np.zeros((2, 7), np.float32)), errors.BatchError, "7"),
}


@pytest.fixture
def ctx(model: pyggmlkv.Model) -> pyggmlkv.Context:
    """64 cells for two sequences in one stream, 20 used by sequence 0, 4 by sequence 1, a hole, a shift pending."""
    ctx = pyggmlkv.Context(
        model, n_ctx=64, n_batch=64, n_ubatch=16, n_seq_max=2, kv_unified=False, n_threads=1
    )
    ctx.decode(Batch(np.arange(24) % N_VOCAB))
    ctx.decode(Batch([5, 6, 7, 8], seq_id=1))
    ctx.memory.seq_rm(0, 8, 12)
    ctx.memory.seq_add(0, 12, None, -4)
    return ctx


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_batch_changes_nothing_and_the_right_one_then_works(
    ctx: pyggmlkv.Context, case: str
) -> None:
    make, error, said = REFUSED[case]
    before, logits = fingerprint(ctx), ctx.logits.copy()
    with pytest.raises(error) as refused:
        ctx.decode(make())
    assert isinstance(refused.value, errors.PyggmlkvError)
    assert said in str(refused.value)
    assert fingerprint(ctx) == before
    assert (ctx.logits == logits).all()
    ctx.decode(Batch([3], pos=[20]))
    assert ctx.memory.seq_pos_max(0) == 20


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("n_ctx", 0), ("n_ctx", -1), ("n_ctx", 2.5), ("n_batch", 0), ("n_ubatch", 0), ("n_seq_max", 0),
        ("n_seq_max", 257), ("n_threads", 0), ("n_threads_batch", -2), ("flash_attn", "yes"), ("pooling", "sum"),
        ("rope_scaling", "cubic"), ("shift", "sideways"), ("n_rs_seq", -1), ("yarn_orig_ctx", 0),
        ("type_k", "f13"), ("type_v", "int4"), ("type_k", "q4_K"),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_named(model: pyggmlkv.Model, setting: str, value: object) -> None:
    with pytest.raises(errors.PyggmlkvError, match=setting):
        pyggmlkv.Context(model, **{setting: value})


def test_a_quantised_v_needs_flash_attention(model: pyggmlkv.Model) -> None:
    with pytest.raises(errors.CacheError, match="flash attention"):
        pyggmlkv.Context(model, n_ctx=64, type_v="q8_0", flash_attn="off")


def test_an_unknown_setting_is_a_type_error(model: pyggmlkv.Model) -> None:
    with pytest.raises(TypeError, match="n_contexts"):
        pyggmlkv.Context(model, n_contexts=3)


SEQ_MISUSE: dict[str, Callable[[pyggmlkv.KVCache], object]] = {
    "seq_cp from -1": lambda m: m.seq_cp(-1, 1),
    "seq_cp to an id out of range": lambda m: m.seq_cp(0, 9),
    "seq_cp of a part between streams": lambda m: m.seq_cp(0, 1, 0, 8),
    "seq_keep of -1": lambda m: m.seq_keep(-1),
    "seq_keep out of range": lambda m: m.seq_keep(2),
    "seq_add of -1": lambda m: m.seq_add(-1, 0, None, 1),
    "seq_add beyond int32": lambda m: m.seq_add(0, 0, None, 2**31 - 1),
    "seq_div by zero": lambda m: m.seq_div(0, 0, None, 0),
    "seq_div of an id out of range": lambda m: m.seq_div(7, 0, None, 2),
    "seq_rm of an id out of range": lambda m: m.seq_rm(7),
    "seq_pos_max of an id out of range": lambda m: m.seq_pos_max(7),
    "k of a layer that is not there": lambda m: m.k(99),
}


@pytest.mark.parametrize("case", SEQ_MISUSE)
def test_a_refused_sequence_operation_changes_nothing(ctx: pyggmlkv.Context, case: str) -> None:
    before = fingerprint(ctx)
    with pytest.raises(errors.CacheError):
        SEQ_MISUSE[case](ctx.memory)
    assert fingerprint(ctx) == before


def test_use_after_close_is_a_typed_error(llama_path: Path) -> None:
    model = pyggmlkv.Model.load(llama_path)
    ctx = pyggmlkv.Context(model, n_ctx=64)
    model.close()
    with pytest.raises(errors.ClosedError, match="model"):
        ctx.decode(Batch([1]))
    with pytest.raises(errors.ClosedError, match="model"):
        pyggmlkv.Context(model)
    ctx.close()
    ctx.close()
    for use in (
        lambda: ctx.decode(Batch([1])),
        lambda: ctx.logits,
        lambda: ctx.memory,
        lambda: ctx.embeddings,
    ):
        with pytest.raises(errors.ClosedError, match="context"):
            use()


def test_a_model_that_is_not_there_or_no_gguf_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.GGUFError, match="nowhere"):
        pyggmlkv.Model.load(tmp_path / "nowhere.gguf")
    (tmp_path / "text.gguf").write_text("not a model at all, only text")
    with pytest.raises(errors.GGUFFormatError, match="text"):
        pyggmlkv.Model.load(tmp_path / "text.gguf")
