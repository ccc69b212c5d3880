"""`describe`: a model file as data that JSON holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyggmlkv.gguf.describe import describe
from pyggmlkv.gguf.reader import GGUFReader
from tests.gguf.gguf_bytes import F32, STR, U32, FileBytes, array, f32_tensor, scalar


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = FileBytes(
        [
            scalar(b"general.architecture", STR, b"llama"),
            scalar(b"general.name", STR, b"tiny \xff"),
            scalar(b"llama.block_count", U32, 2),
            scalar(b"llama.context_length", U32, 32),
            scalar(b"llama.embedding_length", U32, 64),
            array(b"llama.attention.head_count", U32, [4, 8]),
            scalar(b"x.inf", F32, float("inf")),
            array(b"x.long", U32, list(range(100))),
            array(b"x.short", STR, [b"a", b"b"]),
        ],
        [f32_tensor(b"token_embd.weight", 4, 3), f32_tensor(b"output_norm.weight", 8)],
    )
    file = tmp_path / "m.gguf"
    file.write_bytes(made.build())
    return file


def test_sizes_types_and_tensors(path):
    with GGUFReader(path) as r:
        d = describe(r)
    assert (d["arch"], d["n_params"], d["nbytes"], d["bits_per_weight"]) == ("llama", 20, 80, 32.0)
    assert d["types"] == {"f32": {"tensors": 2, "n_params": 20, "nbytes": 80}}
    assert d["tensors"][0] == {"name": "token_embd.weight", "type": "f32", "shape": [4, 3], "nbytes": 48}


def test_long_arrays_are_shortened_and_the_rest_is_whole(path):
    with GGUFReader(path) as r:
        m = describe(r)["metadata"]
    assert m["x.long"] == {"type": "arr[u32]", "length": 100, "first": list(range(8))}
    assert m["x.short"] == ["a", "b"]
    assert m["llama.block_count"] == 2


def test_hparams_show_what_the_file_sets(path):
    with GGUFReader(path) as r:
        hp = describe(r)["hparams"]
    assert hp["n_head_arr"] == [4, 8]
    assert hp["n_layer_all"] == 2
    assert "xielu_eps" not in hp
    assert "n_swa" not in hp


def test_the_result_is_strict_json(path):
    with GGUFReader(path) as r:
        text = json.dumps(describe(r), allow_nan=False)
    assert json.loads(text)["metadata"]["x.inf"] == "inf"
    text.encode()


def test_a_file_that_is_no_whole_model_is_described_too(tmp_path):
    file = tmp_path / "part.gguf"
    file.write_bytes(
        FileBytes([scalar(b"general.architecture", STR, b"clip")], [f32_tensor(b"v.w", 4)]).build()
    )
    with GGUFReader(file) as r:
        d = describe(r)
    assert d["hparams"] is None
    assert "clip.block_count" in d["hparams_error"]
    assert len(d["tensors"]) == 1
