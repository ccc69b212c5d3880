"""Finds the ggml source: a folder that was named, the checked-out submodule, the pinned source distribution.

The distribution is downloaded with pip, checked against its hash and unpacked once into the cache folder.
Does not build anything and never changes a source tree.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ggml_build import BuildError

CHUNK = 1 << 20


@dataclass(frozen=True)
class Pin:
    """One upstream state, and the source distribution that carries the same tree in its `subfolder`."""

    version: str
    commit: str
    distribution: str
    distribution_version: str
    sha256: str
    subfolder: str


GGML = Pin(
    version="0.20.2",
    commit="8c63e70982c95ceb862e3a1073a2c1beef75d60a",
    distribution="libggml-python",
    distribution_version="0.20.2.post1",
    sha256="e47ff53506342959ffb3ce15380b82828fea10ec5f208f9ef6915895f1a7a176",
    subfolder="ggml",
)


@dataclass(frozen=True)
class Source:
    """A ggml tree. `kind` is "given", "submodule" or "distribution"; only the last never changes."""

    path: Path
    kind: str
    version: str
    commit: str | None

    @property
    def immutable(self) -> bool:
        return self.kind == "distribution"


def cache_folder() -> Path:
    """PYGGMLKV_CACHE, else the folder that this system keeps for caches."""
    if given := os.environ.get("PYGGMLKV_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pyggmlkv"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "pyggmlkv" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyggmlkv"


def find_source(root: Path, given: Path | None = None, cache: Path | None = None) -> Source:
    """The ggml tree: `given`, else PYGGMLKV_GGML_SOURCE, else `root`/ggml, else the pinned distribution.

    Raises: BuildError when the folder is not ggml, or the distribution cannot be had or has another hash.
    """
    if given is None and (variable := os.environ.get("PYGGMLKV_GGML_SOURCE")):
        given = Path(variable)
    if given is not None:
        path = given.expanduser().resolve()
        if not _is_ggml(path):
            raise BuildError(f"{path} is not a ggml source tree: it has no CMakeLists.txt and include/ggml.h")
        return Source(path, "given", _version(path), _commit(path))
    if _is_ggml(root / "ggml"):
        path = (root / "ggml").resolve()
        return Source(path, "submodule", _version(path), _commit(path))
    return Source(fetch(GGML, cache or cache_folder()), "distribution", GGML.version, GGML.commit)


def fetch(pin: Pin, cache: Path) -> Path:
    """Folder with the pinned tree; downloads and unpacks it when the cache has it not. Raises: BuildError."""
    target = cache / "source" / f"{pin.distribution}-{pin.distribution_version}-{pin.sha256[:12]}"
    if not (target / pin.subfolder).is_dir():
        archive = _downloaded(pin, cache / "downloads")
        verify(archive, pin.sha256)
        _unpack(archive, pin.subfolder, target)
    return target / pin.subfolder


def verify(archive: Path, sha256: str) -> None:
    """Raises: BuildError when the file's SHA-256 is another.

    It is put aside, so that a rerun downloads it anew.
    """
    digest = hashlib.sha256()
    with archive.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        aside = archive.with_name(archive.name + ".wrong-hash")
        archive.replace(aside)
        raise BuildError(
            f"{archive.name} has SHA-256 {digest.hexdigest()}, expected {sha256}. It is kept as {aside}; "
            "nothing was built. Run again to download it anew; if it stays wrong, do not trust this index"
        )


def _downloaded(pin: Pin, folder: Path) -> Path:
    """.

    He distribution's archive, from the folder when it is there, else through pip (it compiles nothing).
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = pin.distribution.replace("-", "_") + "-" + pin.distribution_version
    archive = folder / f"{stem}.tar.gz"
    if archive.exists():
        return archive
    requirement = f"{pin.distribution}=={pin.distribution_version}"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        # not ":all:": that would compile what builds the metadata too, CMake included
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", pin.distribution]
        command += ["--disable-pip-version-check", "--quiet", "-d", temporary, requirement]
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        found = sorted(Path(temporary).glob("*.tar.gz"))
        if result.returncode or not found:
            raise BuildError(
                f"pip could not download the source of {requirement}.\n{result.stdout.strip()[-2000:]}\n"
                "Without a package index, name a ggml source tree: --source DIR or PYGGMLKV_GGML_SOURCE=DIR"
            )
        found[0].replace(archive)
    return archive


def _unpack(archive: Path, subfolder: str, target: Path) -> None:
    """Unpack `subfolder` of the archive's one top folder into `target`, all or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        with tarfile.open(archive) as tar:
            # older 3.11 releases have no filters, and ignore this; the content is trusted by its hash
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(temporary, [m for m in tar if m.name.split("/")[1:2] == [subfolder]])
        (top,) = Path(temporary).iterdir()
        shutil.rmtree(target, ignore_errors=True)
        top.replace(target)


def _is_ggml(path: Path) -> bool:
    return (path / "CMakeLists.txt").is_file() and (path / "include" / "ggml.h").is_file()


def _version(path: Path) -> str:
    text = (path / "CMakeLists.txt").read_text(errors="replace")
    parts = [re.search(rf"set\(GGML_VERSION_{part}\s+(\d+)\)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) if part else "?" for part in parts)


def _commit(path: Path) -> str | None:
    """The commit checked out in `path`.

    None where git cannot tell, or `path` is only part of another tree.
    """
    if not (path / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "-C", str(path), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None
