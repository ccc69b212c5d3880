"""Loading weights: shapes, the buffer types libllama would choose, mapped or copied data, cancelling."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from pyggmlkv.backend.placement import place_layers
from pyggmlkv.binding import set_log_level
from pyggmlkv.binding.handle import Resource
from pyggmlkv.errors import ClosedError, GGUFFormatError, GGUFTensorError, LoadCancelledError
from pyggmlkv.gguf.hparams import base_hparams
from pyggmlkv.gguf.reader import GGUFReader
from pyggmlkv.gguf.weights import LoadOptions, TensorLoader
from tests.oracle.libllama import Library

N_EMBD, N_FF, N_VOCAB, N_LAYER = 64, 128, 96, 2


def write_model(
    path: Path, weight_type: str = "F32", changes: dict[str, np.ndarray | None] | None = None, **options: int
) -> dict[str, np.ndarray]:
    """A tiny llama file by the `gguf` package; `changes` replaces tensors, or drops those set to None."""
    kind = gguf.GGMLQuantizationType[weight_type]
    rng = np.random.default_rng(3)
    tensors: dict[str, np.ndarray] = {"token_embd.weight": rng.normal(size=(N_VOCAB, N_EMBD))}
    tensors["output_norm.weight"] = rng.normal(size=N_EMBD)
    for i in range(N_LAYER):
        tensors[f"blk.{i}.attn_norm.weight"] = rng.normal(size=N_EMBD)
        tensors[f"blk.{i}.attn_q.weight"] = rng.normal(size=(N_EMBD, N_EMBD))
        tensors[f"blk.{i}.ffn_up.weight"] = rng.normal(size=(N_FF, N_EMBD))
    tensors |= changes or {}
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=options.get("split", 0))
    if "alignment" in options:
        writer.add_custom_alignment(options["alignment"])
    for key, n in [("context_length", 32), ("embedding_length", N_EMBD), ("block_count", N_LAYER)]:
        writer.add_uint32(f"llama.{key}", n)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_uint32("llama.vocab_size", N_VOCAB)
    written = {}
    for name, values in tensors.items():
        if values is None:
            continue
        if values.ndim > 1 and weight_type != "F32":
            written[name] = gguf.quants.quantize(values.astype(np.float32), kind)
            writer.add_tensor(name, written[name], raw_dtype=kind)
        else:
            written[name] = values.astype(np.float32)
            writer.add_tensor(name, written[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def declare(t: TensorLoader) -> None:
    """Ask for every tensor of a llama-like file, the embeddings as output where there is no output matrix."""
    hp = t.hparams
    t.tensor("token_embd.weight", hp.n_embd, hp.n_vocab)
    if t.tensor("output.weight", hp.n_embd, hp.n_vocab, required=False) is None:
        t.tensor("token_embd.weight", hp.n_embd, hp.n_vocab, duplicated=True)
    for name, info in t.reader.tensors.items():
        if name not in ("token_embd.weight", "output.weight"):
            t.tensor(name, *info.ne)


def held() -> dict[str, int]:
    """Open files, arenas and buffers."""
    counts = Resource.open_count()
    return {kind: counts.get(kind, 0) for kind in ("GGUFFile", "TensorArena", "Buffer")}


def load(path: Path, options: LoadOptions = LoadOptions(), extra: bool = True, progress=None):  # noqa: B008
    with GGUFReader(path) as reader:
        hp = base_hparams(reader.keys_of())
        with TensorLoader(reader, hp, place_layers(hp.n_layer_all, use_extra_bufts=extra), options) as t:
            declare(t)
            return t.load(progress)


@contextmanager
def loader_of(path: Path) -> Iterator[TensorLoader]:
    with GGUFReader(path) as reader:
        hp = base_hparams(reader.keys_of())
        with TensorLoader(reader, hp, place_layers(hp.n_layer_all)) as t:
            yield t


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_model(path)
    return path


# -- values ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> gguf.GGUFReader:
    """SmolLM2 as the `gguf` package reads it (which takes seconds)."""
    return gguf.GGUFReader(smollm2)


@pytest.mark.parametrize("use_mmap", [True, False], ids=["mmap", "copy"])
def test_every_weight_has_the_bytes_of_the_file(smollm2, theirs, use_mmap):
    with load(smollm2, LoadOptions(use_mmap=use_mmap), extra=False) as weights:
        assert len(weights.tensors) == len(theirs.tensors)
        for t in theirs.tensors:
            assert weights.tensors[t.name].get_bytes() == t.data.tobytes(), t.name
        assert weights.n_params == 134_515_008
        assert weights.nbytes == sum(t.n_bytes for t in theirs.tensors)


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight"])
def test_dequantised_weights_equal_those_of_the_gguf_package(smollm2, theirs, name):
    weight = next(t for t in theirs.tensors if t.name == name)
    expected = gguf.quants.dequantize(weight.data, weight.tensor_type)
    with load(smollm2, extra=False) as weights:
        got = weights.tensors[name].to_numpy()
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_dequantised_tiny_weights_equal_those_of_the_gguf_package(tmp_path, kind):
    path = tmp_path / "tiny.gguf"
    written = write_model(path, kind)
    expected = gguf.quants.dequantize(written["blk.1.ffn_up.weight"], gguf.GGMLQuantizationType[kind])
    with load(path, extra=False) as weights:
        np.testing.assert_array_equal(weights.tensors["blk.1.ffn_up.weight"].to_numpy(), expected)


def test_weights_outlive_the_reader_and_the_file(model, tmp_path):
    with load(model) as weights:
        before = weights.tensors["token_embd.weight"].to_numpy()
        (tmp_path / "model.gguf").unlink()
        np.testing.assert_array_equal(weights.tensors["token_embd.weight"].to_numpy(), before)


def test_closing_releases_everything_and_stops_use(model):
    before = held()
    weights = load(model)
    tensor = weights.tensors["output_norm.weight"]
    weights.close()
    weights.close()
    assert held() == before
    with pytest.raises(ClosedError):
        tensor.to_numpy()


@pytest.mark.parametrize("use_mmap", [True, False], ids=["mmap", "copy"])
def test_files_with_a_small_alignment_are_copied_where_mapping_would_misalign(tmp_path, use_mmap):
    path = tmp_path / "aligned8.gguf"
    odd = {"blk.0.attn_norm.weight": np.arange(N_EMBD + 2, dtype=np.float32)}
    written = write_model(path, changes=odd, alignment=8)
    with load(path, LoadOptions(use_mmap=use_mmap)) as weights:
        for name, values in written.items():
            np.testing.assert_array_equal(weights.tensors[name].to_numpy(), values)
        assert "CPU_Mapped" not in weights.breakdown()


def test_a_split_model_loads_as_one(tmp_path):
    written = write_model(tmp_path / "split.gguf", split=3)
    first = tmp_path / "split-00001-of-00003.gguf"
    assert first.exists()
    with load(first) as weights:
        assert set(weights.tensors) == set(written)
        for name, values in written.items():
            np.testing.assert_array_equal(weights.tensors[name].to_numpy(), values)
    with pytest.raises(GGUFFormatError, match="shard 1 of a split model; open the first"):
        GGUFReader(tmp_path / "split-00002-of-00003.gguf")
    first.rename(tmp_path / "other.gguf")
    with pytest.raises(GGUFFormatError, match="must be named"):
        GGUFReader(tmp_path / "other.gguf")


# -- what is refused -------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(model):
    with loader_of(model) as t, pytest.raises(GGUFTensorError, match="'blk.0.attn_k.weight' is missing"):
        t.tensor("blk.0.attn_k.weight", N_EMBD, N_EMBD)


def test_an_optional_tensor_that_is_missing_is_none(model):
    with loader_of(model) as t:
        assert t.tensor("blk.0.attn_q.bias", N_EMBD, required=False) is None


@pytest.mark.parametrize(
    "ne", [(N_VOCAB, N_EMBD), (N_EMBD,), (N_EMBD, N_VOCAB, 2), (N_EMBD * N_VOCAB,)], ids=str
)
def test_a_wrong_shape_names_tensor_expected_and_found(model, ne):
    with loader_of(model) as t, pytest.raises(GGUFTensorError) as e:
        t.tensor("token_embd.weight", *ne)
    text = str(e.value)
    assert "'token_embd.weight'" in text
    assert str([N_EMBD, N_VOCAB]) in text
    assert str(list(ne)) in text
    assert e.value.facts["found"] == (N_EMBD, N_VOCAB, 1, 1)


def test_a_tensor_may_be_taken_in_another_shape_of_as_many_elements(model):
    with loader_of(model) as t:
        assert t.tensor_reshaped("output_norm.weight", N_EMBD // 4, 4).ne == (N_EMBD // 4, 4, 1, 1)
        with pytest.raises(GGUFTensorError, match="elements"):
            t.tensor_reshaped("blk.0.attn_norm.weight", 7)


def test_tensors_that_nobody_asked_for_are_named(model):
    before = held()
    with GGUFReader(model) as reader:
        hp = base_hparams(reader.keys_of())
        t = TensorLoader(reader, hp, place_layers(N_LAYER))
        t.tensor("token_embd.weight", N_EMBD, N_VOCAB)
        t.skip("output_norm.weight")
        with pytest.raises(
            GGUFTensorError, match=r"6 tensors that architecture 'llama' does not use: blk\.0"
        ):
            t.load()
    assert held() == before


def test_a_tensor_is_taken_once(model):
    with loader_of(model) as t:
        t.tensor("output_norm.weight", N_EMBD)
        with pytest.raises(GGUFTensorError, match="asked for twice"):
            t.tensor("output_norm.weight", N_EMBD)


def test_a_weight_that_does_not_fit_its_op_is_refused_and_not_aborted_on(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(
        path, changes={"blk.0.ssm_conv1d.weight": np.ones((2, 3, 4)), "blk.9.nobody.weight": np.ones(3)}
    )
    with loader_of(path) as t:
        with pytest.raises(GGUFTensorError, match="'blk.0.ssm_conv1d.weight'.*cannot be used for ssm_conv"):
            t.tensor("blk.0.ssm_conv1d.weight", 4, 3, 2)
        with pytest.raises(GGUFTensorError, match="'blk.9.nobody.weight'"):
            t.tensor("blk.9.nobody.weight", 3)


@pytest.mark.parametrize("use_mmap", [True, False], ids=["mmap", "copy"])
def test_invalid_data_is_refused_only_when_asked_to_look(tmp_path, use_mmap):
    bad = np.ones((N_FF, N_EMBD), np.float32)
    bad[5, 7] = np.nan
    path = tmp_path / "nan.gguf"
    write_model(path, changes={"blk.1.ffn_up.weight": bad})
    load(path, LoadOptions(use_mmap=use_mmap)).close()
    with pytest.raises(GGUFTensorError, match="invalid data.*blk.1.ffn_up.weight") as e:
        load(path, LoadOptions(use_mmap=use_mmap, check_tensors=True))
    assert e.value.facts["tensors"] == ["blk.1.ffn_up.weight"]


# -- progress --------------------------------------------------------------------------------------


def test_progress_rises_from_0_to_1(model):
    seen: list[float] = []
    load(model, progress=seen.append).close()
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    assert seen == sorted(seen)


class Stop(Exception):
    pass


@pytest.mark.parametrize("use_mmap", [True, False], ids=["mmap", "copy"])
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("how", ["false", "raise"])
def test_progress_cancels_and_everything_is_released(model, how, at, use_mmap):
    def progress(fraction: float) -> bool:
        if fraction < at:
            return True
        if how == "raise":
            raise Stop
        return False

    before = held()
    with pytest.raises(Stop if how == "raise" else LoadCancelledError):
        load(model, LoadOptions(use_mmap=use_mmap), progress=progress)
    assert held() == before


# -- which memory ----------------------------------------------------------------------------------


def test_the_embeddings_serve_as_output_in_the_memory_of_a_matrix_product(tmp_path):
    """Rows are looked up in plain memory, products may want a repacked copy: then there are two tensors."""
    path = tmp_path / "q4_0.gguf"
    write_model(path, "Q4_0")
    with GGUFReader(path) as reader:
        hp = base_hparams(reader.keys_of())
        placement = place_layers(hp.n_layer_all)
        with TensorLoader(reader, hp, placement) as t:
            embd = t.tensor("token_embd.weight", N_EMBD, N_VOCAB)
            output = t.tensor("token_embd.weight", N_EMBD, N_VOCAB, duplicated=True)
            query = t.tensor("blk.0.attn_q.weight", N_EMBD, N_EMBD)
            again = t.tensor("token_embd.weight", N_EMBD, N_VOCAB, duplicated=True)
            for name in [n for n in reader.tensors if n not in ("token_embd.weight", "blk.0.attn_q.weight")]:
                t.tensor(name, *reader.tensors[name].ne)
            with t.load() as weights:
                assert again == output
                assert (output == embd) == (output.arena is embd.arena)
                assert output.arena is query.arena
                assert weights.tensors["token_embd.weight"] == embd
                if query.buffer.name == "CPU":
                    pytest.skip("this CPU has no repacked layout for q4_0")
                assert output != embd


def test_a_plain_placement_uses_no_repacked_memory(tmp_path):
    path = tmp_path / "q4_0.gguf"
    write_model(path, "Q4_0")
    with load(path, extra=False) as weights:
        assert set(weights.breakdown()) <= {"CPU", "CPU_Mapped"}


@pytest.fixture
def ggml_log(caplog):
    """ggml's log of every level; both sides run on one ggml, so it has what either does."""
    set_log_level(logging.DEBUG)
    yield caplog
    set_log_level(logging.WARNING)


@pytest.mark.parametrize("use_mmap", [True, False], ids=["mmap", "copy"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3_270m"])
def test_buffers_are_the_reference_libllamas(request, reference: Library, name, use_mmap, ggml_log):
    """Same buffer types, same sizes, and the same tensors repacked, by what both sides log."""
    path: Path = request.getfixturevalue(name)
    lib = reference.lib
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mode = lib.LLAMA_LOAD_MODE_MMAP if use_mmap else lib.LLAMA_LOAD_MODE_NONE
    with reference.captured_log() as log:
        model = lib.llama_model_load_from_file(str(path).encode(), params)
    lib.llama_model_free(model)
    text = "".join(log)
    expected = {m[1]: m[2] for m in re.finditer(r"(\S+) model buffer size = +([\d.]+) MiB", text)}
    repacked = set(re.findall(r"repack tensor (\S+) with", text + ggml_log.text))
    with load(path, LoadOptions(use_mmap=use_mmap)) as weights:
        got = {kind: f"{n / 2**20:.2f}" for kind, n in weights.breakdown().items()}
        ours = {n for n, t in weights.tensors.items() if t.buffer.name == "CPU_REPACK"}
    assert got == expected
    assert ours == repacked


def test_scales_beside_weights_are_found(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path, changes={"blk.0.attn_q.scale": np.ones(1), "blk.1.ffn_up.input_scale": np.ones(1)})
    with GGUFReader(path) as reader:
        hp = base_hparams(reader.keys_of())
        with TensorLoader(reader, hp, place_layers(N_LAYER)) as t:
            for name in [n for n in reader.tensors if not n.endswith("scale")]:
                t.tensor(name, *reader.tensors[name].ne)
            assert set(t.scales()) == {"blk.0.attn_q.scale", "blk.1.ffn_up.input_scale"}
            t.load().close()


def test_shared_rope_factors_are_one_tensor_for_layers_in_one_place(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path, changes={"rope_freqs.weight": np.ones(8)})
    with loader_of(path) as t:
        first = t.tensor("rope_freqs.weight", 8, il=0)
        assert t.tensor("rope_freqs.weight", 8, il=1) == first


def test_a_loader_is_used_once(model):
    with loader_of(model) as t:
        declare(t)
        t.load().close()
        with pytest.raises(ClosedError):
            t.load()
        with pytest.raises(ClosedError):
            t.tensor("output_norm.weight", N_EMBD)


def test_loading_many_times_leaks_nothing(model):
    load(model).close()
    before = held()
    for _ in range(20):
        load(model).close()
    assert held() == before


def test_a_model_with_adapters_chosen_by_token_multiplies_them_by_id(model):
    with loader_of(model) as t:
        t.hparams = replace(t.hparams, router_layer=1)
        assert t.tensor("token_embd.weight", N_EMBD, N_VOCAB) is not None


def test_a_repacked_weight_says_that_it_cannot_be_read_back() -> None:
    """Its buffer type has no way back: ggml would follow a null pointer."""
    from pyggmlkv.binding import TensorArena, cpu_device
    from pyggmlkv.errors import BindingError

    kinds = [kind for kind in cpu_device().extra_buffer_types if "REPACK" in kind.name]
    if not kinds:
        pytest.skip("this CPU has no repacked layouts")
    with TensorArena(2) as arena:
        weight = arena.new_tensor("q4_0", 256, 64, name="weight")
        with kinds[0].alloc_tensors(arena) as buffer:
            assert buffer.is_repacked
            weight.set_bytes(bytes(weight.nbytes))
            for use in (weight.to_numpy, weight.get_bytes, weight.set_zero):
                with pytest.raises(BindingError, match="read back"):
                    use()
            with pytest.raises(BindingError, match="whole"):
                weight.set_bytes(b"123", 3)
            with pytest.raises(BindingError, match="whole"):
                weight.set_bytes(b"123")
