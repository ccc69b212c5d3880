"""Models, contexts and batches as DESIGN names them: every keyword, what comes back, who closes what."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv import Batch, errors

from .conftest import N_TOKENS, Kind

Load = Callable[[str], pyggmlkv.Model]
N_VOCAB, N_EMBD = 128, 256
DEFAULTS: dict[str, Any] = {
    "n_ctx": None,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_threads": None,
    "n_threads_batch": None,
    "flash_attn": "auto",
    "type_k": "f16",
    "type_v": "f16",
    "kv_unified": False,
    "swa_full": False,
    "offload_kqv": True,
    "attn_rot": None,
    "embeddings": False,
    "pooling": None,
    "rope_freq_base": None,
    "rope_freq_scale": None,
    "yarn_orig_ctx": None,
    "yarn_ext_factor": None,
    "yarn_attn_factor": None,
    "yarn_beta_fast": None,
    "yarn_beta_slow": None,
}


def test_load_takes_what_the_design_says(tiny_model: Callable[[str], Path]) -> None:
    parameters = inspect.signature(pyggmlkv.Model.load).parameters
    assert {n: p.default for n, p in parameters.items() if n != "path"} == {
        "devices": None,
        "n_gpu_layers": None,
        "use_mmap": True,
        "progress": None,
    }
    seen: list[float] = []
    path = tiny_model("llama")
    with pyggmlkv.Model.load(
        str(path), devices=["CPU"], n_gpu_layers=0, use_mmap=False, progress=seen.append
    ) as model:
        assert seen[0] == 0.0 and seen[-1] == 1.0 and seen == sorted(seen)
        assert model.nbytes > 4 * model.n_params * 0.99


@pytest.mark.parametrize("devices", [["CPU"], "CPU", [], None], ids=str)
def test_the_cpu_may_be_named_or_not(tiny_model: Callable[[str], Path], devices: Any) -> None:
    with pyggmlkv.Model.load(tiny_model("llama"), devices=devices) as model:
        assert model.placement.devices == () or devices is None


def test_a_device_that_is_not_there_and_a_wrong_count_are_named(tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model("llama")
    with pytest.raises(errors.DeviceNotFoundError, match=r"'Warp0'.*CPU"):
        pyggmlkv.Model.load(path, devices=["Warp0"])
    for n in (-1, 2.5, "all"):
        with pytest.raises(errors.ParameterError, match="n_gpu_layers"):
            pyggmlkv.Model.load(path, n_gpu_layers=n)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [lambda fraction: False, lambda fraction: 1 // 0], ids=["False", "raises"])
def test_progress_can_cancel(tiny_model: Callable[[str], Path], stop: Any) -> None:
    with pytest.raises((errors.LoadCancelledError, ZeroDivisionError)):
        pyggmlkv.Model.load(tiny_model("llama"), progress=stop)


def test_a_model_describes_its_file(model_of: Load) -> None:
    model = model_of("llama")
    assert model.arch == "llama"
    assert isinstance(model.metadata, Mapping) and isinstance(model.tensors, Mapping)
    assert model.metadata["general.architecture"] == "llama"
    assert model.metadata["llama.block_count"] == model.hparams.n_layer == 2
    info = model.tensors["token_embd.weight"]
    assert (info.dtype, info.ne[:2], info.nbytes) == ("f32", (N_EMBD, N_VOCAB), 4 * N_EMBD * N_VOCAB)
    assert model.nbytes == sum(t.nbytes for t in model.tensors.values())
    with pytest.raises(KeyError):
        model.tensors["nothing.weight"]


def test_context_keywords_and_defaults_are_those_of_the_design(model_of: Load) -> None:
    parameters = inspect.signature(pyggmlkv.Context).parameters
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS
    with pyggmlkv.Context(model_of("llama"), 64, n_threads=1) as ctx:
        assert ctx.n_ctx == 64


def test_every_keyword_is_taken_by_name(model_of: Load) -> None:
    given = {
        **DEFAULTS,
        **{
            "n_ctx": 64,
            "n_batch": 32,
            "n_ubatch": 16,
            "n_threads": 1,
            "n_threads_batch": 1,
            "pooling": "mean",
        },
        **{"rope_freq_base": 5000, "rope_freq_scale": 0.5, "yarn_orig_ctx": 32, "yarn_ext_factor": 1.0},
        **{"yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "attn_rot": False},
    }
    with pyggmlkv.Context(model_of("llama"), **given) as ctx:
        ctx.decode(Batch([1, 2, 3]))
        assert ctx.cparams.rope_freq_base == 5000.0
        assert (ctx.cparams.n_batch, ctx.cparams.n_ubatch) == (32, 16)
        assert np.isfinite(ctx.logits).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_freq_base", -1.0), ("rope_freq_base", "x"), ("rope_freq_scale", 0.0), ("rope_freq_scale", float("nan")),
        ("yarn_ext_factor", "a"), ("yarn_beta_fast", float("inf")), ("yarn_attn_factor", True), ("kv_unified", "yes"),
        ("embeddings", 1), ("attn_rot", "off"), ("offload_kqv", None), ("n_ctx", "64"), ("n_ubatch", True),
        ("flash_attn", True), ("pooling", "sum"), ("n_seq_max", None),
    ],
)  # fmt: skip
def test_a_setting_of_the_wrong_kind_is_named(model_of: Load, name: str, value: object) -> None:
    with pytest.raises(errors.ParameterError, match=name) as refused:
        pyggmlkv.Context(model_of("llama"), **{"n_ctx": 64, name: value})
    assert isinstance(refused.value, ValueError)
    assert repr(value) in str(refused.value)


def test_counts_may_be_numpy_integers(model_of: Load) -> None:
    with pyggmlkv.Context(model_of("llama"), n_ctx=np.int64(64), n_threads=np.int32(1)) as ctx:
        assert ctx.n_ctx == 64


BATCHES: dict[str, Batch] = {
    "list": Batch([1, 2, 3]),
    "array": Batch(np.array([1, 2, 3])),
    "range": Batch(range(1, 4)),
    "positions": Batch([1, 2, 3], pos=[0, 1, 2]),
    "positional": Batch([1, 2, 3], None, 0, "last"),
    "one id": Batch([1, 2, 3], seq_id=0),
    "id per token": Batch([1, 2, 3], seq_id=[0, 0, 0]),
    "ids per token": Batch([1, 2, 3], seq_id=[[0], [0], [0]]),
    "mask": Batch([1, 2, 3], logits=[False, False, True]),
    "index": Batch([1, 2, 3], logits=[2]),
}


@pytest.mark.parametrize("form", BATCHES)
def test_every_form_of_a_batch_is_the_same_batch(model_of: Load, form: str) -> None:
    out = []
    for batch in (BATCHES["list"], BATCHES[form]):
        with pyggmlkv.Context(model_of("llama"), n_ctx=64, n_threads=1) as ctx:
            ctx.decode(batch)
            out.append(ctx.logits)
    assert out[0].shape == (1, N_VOCAB)
    np.testing.assert_array_equal(out[0], out[1])


def test_tokens_of_several_sequences_at_once(model_of: Load) -> None:
    with pyggmlkv.Context(model_of("llama"), n_ctx=64, n_seq_max=2, kv_unified=True, n_threads=1) as ctx:
        ctx.decode(Batch([1, 2, 3], seq_id=[[0, 1], [0, 1], [1]], logits="all"))
        assert ctx.logits.shape == (3, N_VOCAB)
        assert [ctx.memory.seq_pos_max(s) for s in (0, 1)] == [1, 2]


@pytest.mark.parametrize(
    ("asked", "n_rows"), [("all", 6), ("last", 1), ("none", 0), ([4, 0, 2], 3), ([], 0)], ids=str
)
@pytest.mark.parametrize("n_ubatch", [2, 512])
def test_rows_come_in_the_order_asked_for(model_of: Load, asked: Any, n_rows: int, n_ubatch: int) -> None:
    with pyggmlkv.Context(model_of("llama"), n_ctx=64, n_threads=1, n_ubatch=n_ubatch) as ctx:
        ctx.decode(Batch(range(6), logits="all"))
        every = ctx.logits
        ctx.memory.clear()
        ctx.decode(Batch(range(6), logits=asked))
        assert ctx.logits.shape == (n_rows, N_VOCAB)
        assert ctx.logits.dtype == np.float32
        wanted = {"all": slice(None), "last": [5], "none": []}.get(asked) if isinstance(asked, str) else asked
        np.testing.assert_allclose(ctx.logits, every[wanted], atol=1e-4)


@pytest.mark.parametrize(
    "what", [[1, 2, 3], None, "text", np.arange(3)], ids=["list", "None", "str", "array"]
)
@pytest.mark.parametrize("verb", ["decode", "encode"])
def test_what_is_no_batch_is_refused_by_name(model_of: Load, what: Any, verb: str) -> None:
    with (
        pyggmlkv.Context(model_of("llama"), n_ctx=64, n_threads=1) as ctx,
        pytest.raises(errors.BatchError, match="Batch" if verb == "decode" else "no encoder"),
    ):
        getattr(ctx, verb)(what)


def test_a_decoder_cannot_encode_and_says_what_to_do(model_of: Load) -> None:
    with pyggmlkv.Context(model_of("llama"), n_ctx=64, n_threads=1) as ctx:
        with pytest.raises(errors.BatchError, match="llama has no encoder; decode"):
            ctx.encode(Batch([1, 2]))
        ctx.decode(Batch([1, 2]))
        assert ctx.memory.seq_pos_max(0) == 1


def test_before_the_first_decode_there_are_no_rows(model_of: Load) -> None:
    with pyggmlkv.Context(model_of("llama"), n_ctx=64, n_threads=1) as ctx:
        assert (ctx.logits.shape, ctx.embeddings.shape) == ((0, N_VOCAB), (0, N_EMBD))


def test_a_model_without_a_memory_has_none(model_of: Load) -> None:
    with pyggmlkv.Context(model_of("t5encoder"), n_ctx=64, n_threads=1) as ctx:
        assert ctx.memory is None
        ctx.encode(Batch([1, 2, 3]))
        assert ctx.embeddings.shape == (3, N_EMBD)


def test_state_goes_through_bytes_and_files(ctx: pyggmlkv.Context, kind: Kind, tmp_path: Path) -> None:
    whole, one = ctx.state_get(), ctx.state_get(seq_id=0)
    assert isinstance(whole, bytes) and isinstance(one, bytes)
    ctx.state_save(tmp_path / "whole.bin", tokens=range(N_TOKENS))
    ctx.state_save(tmp_path / "one.bin", [7, 8], seq_id=0)
    ctx.state_save(str(tmp_path / "none.bin"))
    ctx.memory.clear()
    ctx.state_set(whole)
    assert ctx.state_get() == whole
    ctx.memory.clear()
    ctx.state_set(one, seq_id=0)
    assert ctx.memory.seq_pos_max(0) == N_TOKENS - 1
    ctx.memory.clear()
    assert ctx.state_load(tmp_path / "whole.bin") == list(range(N_TOKENS))
    assert ctx.state_get() == whole
    assert ctx.state_load(tmp_path / "one.bin", seq_id=1) == [7, 8]
    assert ctx.memory.seq_pos_max(1) == N_TOKENS - 1
    assert ctx.state_load(tmp_path / "none.bin") == []
    with pytest.raises(errors.StateError):
        ctx.state_set(b"no state")
    for missing in (lambda: ctx.state_get(seq_id=500), lambda: ctx.state_set(one, seq_id=500)):
        with pytest.raises(errors.SequenceError, match="500"):
            missing()


def test_closing_ends_use_and_may_be_repeated(model_of: Load, tiny_model: Callable[[str], Path]) -> None:
    with pyggmlkv.Model.load(tiny_model("llama")) as model:
        with pyggmlkv.Context(model, n_ctx=64, n_threads=1) as ctx:
            ctx.decode(Batch([1]))
        ctx.close()
        for use in (lambda: ctx.decode(Batch([1])), ctx.state_get, lambda: ctx.memory, ctx.__enter__):
            with pytest.raises(errors.ClosedError):
                use()
        assert "closed" in repr(ctx)
        pyggmlkv.Context(model, n_ctx=64, n_threads=1).close()
    model.close()
    assert "closed" in repr(model)
    with pytest.raises(errors.ClosedError):
        pyggmlkv.Context(model)
