"""Builds the reference, libllama, from its pinned source distribution on top of this package's own ggml.

Both sides then run the very same kernels, so parity is bit for bit. Test-only: the package never needs it.
Also compiles the small cffi module through which `tests/oracle/libllama` calls it. Everything lands in the
cache folder, keyed by what went in; a second run finds it there. Knows nothing of pyggmlkv's Python side.
Upstream: CMakeLists.txt, LLAMA_USE_SYSTEM_GGML.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ORACLE_SOURCES = REPOSITORY / "tests" / "oracle" / "libllama"
REQUIREMENT = "llama-cpp-python==0.3.35"
SDIST_NAME = "llama_cpp_python-0.3.35.tar.gz"
SDIST_SHA256 = "1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12"
INSIDE = "llama_cpp_python-0.3.35/vendor/llama.cpp/"
KEPT = (
    "CMakeLists.txt",
    "LICENSE",
    "cmake/",
    "include/",
    "src/",
    "ggml/include/",
    "ggml/cmake/",
    "licenses/",
)
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_USE_SYSTEM_GGML=ON",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)
MODULE_NAME = "_llama_oracle"
LIBRARY_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class BuildError(Exception):
    """The reference could not be built; the message is for people and says what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ggml:
    """The ggml libraries to build against: a folder and the two files that libllama links."""

    folder: Path
    ggml: Path
    base: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What a build left behind. `seconds` is 0.0 when everything was there already."""

    libllama: Path
    module: Path
    ggml: Path
    seconds: float


def say(text: str) -> None:
    print(f"reference: {text}", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """`PYGGMLKV_CACHE`, else the user's cache folder."""
    if named := os.environ.get("PYGGMLKV_CACHE"):
        return Path(named).expanduser().resolve()
    try:
        import platformdirs
    except ImportError:
        return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "pyggmlkv"
    return Path(platformdirs.user_cache_dir("pyggmlkv"))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One build at a time in a cache folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def find_ggml(given: Path | None) -> Ggml:
    """The package's own ggml, or the folder (or install prefix) that was given."""
    roots = [given] if given else [REPOSITORY / "pyggmlkv"]
    for root in roots:
        for base in sorted(root.rglob(f"libggml-base*{LIBRARY_SUFFIX}*"), key=lambda p: len(p.name)):
            others = sorted(base.parent.glob(f"libggml{LIBRARY_SUFFIX}*"), key=lambda p: len(p.name))
            if others:
                return Ggml(base.parent.resolve(), others[0].absolute(), base.absolute())
    raise BuildError(
        f"no libggml and libggml-base under {roots[0]}: build them first (make build, or build_ggml.py), "
        "or name a folder with --ggml"
    )


def find_source(given: Path | None, work: Path) -> Path:
    """A llama.cpp tree: the one given (folder or source distribution), else the pin, by pip."""
    if given and given.is_dir():
        for tree in (given, given / "vendor" / "llama.cpp"):
            if (tree / "include" / "llama.h").exists():
                return tree.resolve()
        raise BuildError(f"{given} holds no llama.cpp tree (include/llama.h is missing there)")
    tree = work / f"llama.cpp-{digest_of(SDIST_SHA256, *KEPT)}"
    if not (tree / "CMakeLists.txt").exists():
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            unpack(given or download(Path(scratch)), tree)
    return tree


def download(folder: Path) -> Path:
    """The pinned source distribution, by pip, which checks the hash as well."""
    say(f"downloading the source distribution of {REQUIREMENT} with pip ...")
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{REQUIREMENT} --hash=sha256:{SDIST_SHA256}\n")
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-binary",
        ]
        + [":all:", "--require-hashes", "-r", str(wanted), "-d", str(folder)],
        folder / "pip.log",
        f"pip could not download {REQUIREMENT}. Fetch {SDIST_NAME} by other means and name it with --source",
    )
    return folder / SDIST_NAME


def unpack(sdist: Path, tree: Path) -> None:
    """The parts of llama.cpp that the build reads, hash verified first; all of them or nothing at `tree`."""
    if not sdist.is_file():
        raise BuildError(f"{sdist} does not exist: --source takes {SDIST_NAME} or an unpacked folder of it")
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise BuildError(
            f"{sdist} has sha256 {digest}, the pin is {SDIST_SHA256}: delete it and fetch it again"
        )
    with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
        with tarfile.open(sdist) as archive:
            for member in archive:
                inside = member.name.removeprefix(INSIDE)
                if inside != member.name and inside.startswith(KEPT) and (member.isfile() or member.isdir()):
                    member.name = inside
                    archive.extract(member, Path(scratch) / "tree", filter="data")
        shutil.rmtree(tree, ignore_errors=True)
        (Path(scratch) / "tree").rename(tree)


def find_tool(*names: str) -> str | None:
    """The first of these programs found beside this Python or on the path."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return next((found for name in names if (found := shutil.which(name, path=beside))), None)


def compiler(variable: str, *names: str) -> list[str]:
    """A compiler command, from the environment or by name."""
    if named := os.environ.get(variable):
        return named.split()
    if found := find_tool(*names):
        return [found]
    raise BuildError(
        f"no compiler found ({', '.join(names)}; or set {variable}). Debian: apt-get install g++"
    )


def run(command: Sequence[str], log: Path, what: str) -> None:
    """Runs a command with its output in `log`; a failure shows the end of it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        try:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
        except FileNotFoundError as error:
            raise BuildError(f"{what}: {command[0]} is not installed") from error
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise BuildError(f"{what} (exit status {done.returncode}, whole output in {log}):\n{end}")


def write_ggml_package(folder: Path, ggml: Ggml, tree: Path) -> None:
    """A CMake package `ggml` that points at the two libraries; headers are the pin's own, byte for byte."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ggml-config.cmake").write_text(
        "add_library(ggml::ggml-base SHARED IMPORTED)\n"
        f'set_target_properties(ggml::ggml-base PROPERTIES IMPORTED_LOCATION "{ggml.base}"\n'
        f'  INTERFACE_INCLUDE_DIRECTORIES "{tree}/ggml/include")\n'
        "add_library(ggml::ggml SHARED IMPORTED)\n"
        f'set_target_properties(ggml::ggml PROPERTIES IMPORTED_LOCATION "{ggml.ggml}"\n'
        '  INTERFACE_LINK_LIBRARIES "ggml::ggml-base")\n'
    )


def build_libllama(tree: Path, ggml: Ggml, target: Path, jobs: int) -> None:
    """Compiles libllama into `target`/lib, in about 2 minutes. It finds ggml through the oracle module."""
    cmake = find_tool("cmake")
    if cmake is None:
        raise BuildError("cmake is not installed: pip install cmake ninja (make build does that)")
    generator = ["-G", "Ninja"] if find_tool("ninja") else []
    ninja = [f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}"] if generator else []
    build = target.with_name(target.name + ".build")
    log = target.with_name(target.name + ".log")
    log.unlink(missing_ok=True)
    write_ggml_package(build / "ggml", ggml, tree)
    say(f"building libllama with {jobs} jobs (about 2 minutes on 2 cores), log in {log}")
    run(
        [cmake, *generator, *ninja, "-S", str(tree), "-B", str(build), f"-Dggml_DIR={build / 'ggml'}"]
        + ["-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN", *CMAKE_OPTIONS],
        log,
        "cmake could not configure libllama",
    )
    run([cmake, "--build", str(build), "--target", "llama", "-j", str(jobs)], log, "libllama did not compile")
    shutil.rmtree(target, ignore_errors=True)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(build / "bin", partial / "lib", symlinks=True)
    partial.rename(target)
    shutil.rmtree(build)


def build_module(tree: Path, ggml: Ggml, libllama: Path, module: Path) -> None:
    """Compiles the cffi module: the C++ shim over private headers, and C that checks every layout."""
    import cffi

    say("building the oracle's cffi module")
    work = module.parent.with_name(module.parent.name + ".build")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    log = work.with_suffix(".log")
    log.unlink(missing_ok=True)
    ffi = cffi.FFI()
    ffi.cdef((ORACLE_SOURCES / "cdef.h").read_text())
    ffi.set_source(MODULE_NAME, '#include "llama.h"\n#include "shim.h"\n')
    with contextlib.redirect_stdout(sys.stderr):
        ffi.emit_c_code(str(work / "module.c"))
    include = [f"-I{p}" for p in (tree / "include", tree / "ggml" / "include", tree / "src", ORACLE_SOURCES)]
    include.append(f"-I{sysconfig.get_paths()['include']}")
    cxx, cc = compiler("CXX", "c++", "g++", "clang++"), compiler("CC", "cc", "gcc", "clang")
    what = "the oracle module did not compile"
    flags = ["-O1", "-fPIC", "-w", *include, "-c"]
    run([*cxx, "-std=c++17", *flags, str(ORACLE_SOURCES / "shim.cpp"), "-o", str(work / "shim.o")], log, what)
    run([*cc, *flags, str(work / "module.c"), "-o", str(work / "module.o")], log, what)
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-Wl,--no-as-needed"]
    rpath = [f"-Wl,-rpath,{folder}" for folder in (ggml.folder, libllama.parent)]
    built = work / module.name
    objects = [str(work / "shim.o"), str(work / "module.o")]
    run(
        [*cxx, "-shared", *objects, *undefined, str(ggml.base), str(ggml.ggml), str(libllama), *rpath]
        + ["-o", str(built)],
        log,
        what,
    )
    module.parent.mkdir(parents=True, exist_ok=True)
    built.replace(module)
    shutil.rmtree(work)
    log.unlink(missing_ok=True)


def digest_of(*parts: str | Path) -> str:
    """A short key over texts and files' contents."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        whole.update(b"\0")
    return whole.hexdigest()[:16]


def build(source: Path | None, ggml_given: Path | None, jobs: int, force: bool) -> Reference:
    """Builds what is missing and says where it is. Raises: BuildError."""
    started = time.monotonic()
    ggml = find_ggml(ggml_given)
    root = cache_folder() / "reference"
    with locked(root):
        origin = str(source.resolve()) if source and source.is_dir() else SDIST_SHA256
        target = root / f"libllama-{digest_of(origin, *CMAKE_OPTIONS)}"
        libllama = target / "lib" / f"libllama{LIBRARY_SUFFIX}"
        sources = sorted(ORACLE_SOURCES.glob("*.h")) + [ORACLE_SOURCES / "shim.cpp"]
        key = digest_of(target.name, str(ggml.folder), sys.version, *sources)
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        module = root / f"oracle-{key}" / f"{MODULE_NAME}{suffix}"
        fresh = libllama.exists() and module.exists() and not force
        if not fresh:
            tree = find_source(source, root)
            if force or not libllama.exists():
                build_libllama(tree, ggml, target, jobs)
            build_module(tree, ggml, libllama, module)
    return Reference(libllama, module, ggml.folder, 0.0 if fresh else time.monotonic() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Build the reference libllama on this package's ggml (tests only)."
    )
    named = os.environ.get("PYGGMLKV_LLAMA_SOURCE")
    parser.add_argument(
        "--source", type=Path, default=Path(named) if named else None,
        help=f"{SDIST_NAME} or an unpacked tree (default: PYGGMLKV_LLAMA_SOURCE, else pip downloads the pin)",
    )  # fmt: skip
    parser.add_argument("--ggml", type=Path, help="folder with libggml (default: the one inside the package)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--force", action="store_true", help="build again even if it is there")
    parser.add_argument("--json", action="store_true", help="print where things are as JSON")
    options = parser.parse_args(arguments)
    try:
        found = build(options.source, options.ggml, options.jobs, options.force)
    except BuildError as error:
        print(f"reference: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(dataclasses.asdict(found), default=str))
    else:
        state = f"built in {found.seconds:.1f} s" if found.seconds else "up to date"
        print(f"reference: {state}: {found.libllama}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
