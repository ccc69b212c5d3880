"""State files: atomic, with a sidecar when asked for, and explained on the command line."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggmlkv
from pyggmlkv.cli import main
from pyggmlkv.errors import StateError
from pyggmlkv.state import files
from pyggmlkv.state.joined import LARGE, joined
from pyggmlkv.state.live import Live
from pyggmlkv.state.sidecar import sidecar_path
from tests.side_by_side import Pair
from tests.state.conftest import OpenModels
from tests.state.kinds import KINDS, decode, everything


@pytest.fixture
def pair(open_models: OpenModels) -> Iterator[Pair]:
    kind = KINDS["kv-q8-q4"]
    with Pair(open_models(kind.model), kind.setup) as opened:
        decode(opened, 9, 0, seed=1)
        decode(opened, 4, 1, seed=2)
        yield opened


def test_tokens_come_back(pair: Pair, tmp_path: Path) -> None:
    pair.ours.state_save(tmp_path / "a", [3, 1, 2])
    assert pair.ours.state_load(tmp_path / "a") == [3, 1, 2]
    pair.ours.state_save(str(tmp_path / "b"), np.array([7]), seq_id=1)
    assert pair.ours.state_load(str(tmp_path / "b"), 0) == [7]
    with pytest.raises(StateError, match="tokens"):
        pair.ours.state_save(tmp_path / "c", [2**31])
    assert not (tmp_path / "c").exists()


def test_a_new_file_has_the_mode_that_open_gives(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    pair.ours.state_save(tmp_path / "state")
    assert stat.S_IMODE(os.stat(tmp_path / "state").st_mode) == stat.S_IMODE(
        os.stat(tmp_path / "plain").st_mode
    )


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "state"
    pair.ours.state_save(path, [1], 0)
    old = path.read_bytes()

    def fails(*arguments: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(files.os, call, fails)
    with pytest.raises(OSError, match="no space"):
        pair.ours.state_save(path, [2], 1)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["state"]


def test_the_new_file_is_synced_before_it_takes_the_place_of_the_old(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            files.os, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1]
        )
    pair.ours.state_save(tmp_path / "state")
    assert calls == ["fsync", "replace", "fsync"]


def test_a_missing_file_is_an_os_error_and_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    before = everything(pair.ours)
    with pytest.raises(FileNotFoundError):
        pair.ours.state_load(tmp_path / "nothing")
    assert everything(pair.ours) == before


# sidecars


def test_a_sidecar_is_written_when_asked_for_and_checked_on_load(
    pair: Pair, open_models: OpenModels, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    pair.ours.state_save(path, [1], 0, sidecar=True)
    assert pair.ours.state_load(path, 1) == [1]
    kind = KINDS["kv-q8-q4"]
    settings: dict[str, Any] = {
        "type_k": "q8_0",
        "type_v": "q4_0",
        "flash_attn": "on",
        "n_seq_max": 3,
        "n_ctx": 768,
    }
    other_rope = {**settings, "rope_freq_base": 5000.0}
    other_rotation = {**settings, "attn_rot": False}
    model = open_models(kind.model).ours
    for changed, field in ((other_rope, "rope freq_base"), (other_rotation, "rotation of K")):
        with pyggmlkv.Context(model, **changed) as ctx:
            before = everything(ctx)
            with pytest.raises(StateError, match=field) as refused:
                ctx.state_load(path, 0)
            assert {"field", "expected", "found"} <= set(refused.value.facts)
            assert everything(ctx) == before
            sidecar_path(path).rename(tmp_path / "aside")
            assert ctx.state_load(path, 0) == [1]
            (tmp_path / "aside").rename(sidecar_path(path))


def test_other_weights_of_the_same_shape_are_told_apart(
    pair: Pair, open_models: OpenModels, tmp_path: Path
) -> None:
    pair.ours.state_save(tmp_path / "state", [], 0, sidecar=True)
    document = json.loads(sidecar_path(tmp_path / "state").read_text())
    document["fingerprint"]["model"] = "0" * 64
    sidecar_path(tmp_path / "state").write_text(json.dumps(document))
    with pytest.raises(StateError, match="model"):
        pair.ours.state_load(tmp_path / "state", 0)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pyggmlkv_sidecar": 99, "fingerprint": {}}'])
def test_a_sidecar_that_is_none_is_refused(pair: Pair, tmp_path: Path, content: str) -> None:
    pair.ours.state_save(tmp_path / "state", [], 0)
    sidecar_path(tmp_path / "state").write_text(content)
    with pytest.raises(StateError, match="sidecar"):
        pair.ours.state_load(tmp_path / "state", 0)


def test_a_save_without_sidecar_removes_the_old_one(pair: Pair, tmp_path: Path) -> None:
    pair.ours.state_save(tmp_path / "state", [], 0, sidecar=True)
    pair.ours.state_save(tmp_path / "state", [], 1)
    assert os.listdir(tmp_path) == ["state"]


# a model without memory


def test_a_model_without_memory_saves_its_name_only(tmp_path: Path) -> None:
    live = Live("bert", None, 2)
    files.save_file(live, tmp_path / "state", [4])
    assert (tmp_path / "state").read_bytes() == struct.pack("=IIIiI", 0x6767736E, 9, 1, 4, 4) + b"bert"
    assert files.load_file(live, tmp_path / "state") == [4]
    with pytest.raises(StateError, match="architecture"):
        files.load_file(Live("t5", None, 2), tmp_path / "state")


# one bytes object


@pytest.mark.parametrize("n", [0, 10, LARGE - 1, LARGE, LARGE + 4097])
def test_pieces_are_joined_as_join_does(n: int) -> None:
    data = np.random.default_rng(n).integers(0, 256, n, np.uint8).tobytes()
    cuts = sorted({0, n // 3, n // 3, n // 2, n})
    pieces = [memoryview(data)[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    assert joined([b"head", *pieces, b"", b"tail"]) == b"head" + data + b"tail"


# the command line


def test_the_state_command_explains_a_file(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state"
    pair.ours.state_save(path, list(range(20)))
    assert main(["state", str(path)]) == 0
    text = capsys.readouterr().out
    for words in (
        "context file",
        "architecture llama",
        "20 tokens: 0 1 2",
        "9 cells",
        "positions 0 to 8",
        "q8_0",
    ):
        assert words in text
    assert main(["state", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parts"][0]["n_stream"] == 3 and facts["tokens"] == list(range(20))


def test_the_state_command_says_where_a_file_is_damaged(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state"
    pair.ours.state_save(path, [1], 0)
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["state", str(path)]) == 1
    assert "damaged" in capsys.readouterr().out
    path.write_bytes(b"\x01")
    assert main(["state", str(path)]) == 1
    assert "pyggmlkv state" in capsys.readouterr().err


def test_the_state_command_explains_every_kind(
    open_models: OpenModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("hybrid-iswa", "m-rope", "recurrent", "kv"):
        kind = KINDS[name]
        with Pair(open_models(kind.model), kind.setup) as pair:
            decode(pair, 3, 0, seed=1)
            (tmp_path / name).write_bytes(pair.ours.state_get(0))
        assert main(["state", str(tmp_path / name)]) == 0
        assert "saved as sequence 0" in capsys.readouterr().out
