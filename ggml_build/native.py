"""Runs CMake on a ggml source tree: configure, build, install into a prefix, copy what ships to the package.

Does not know where the source comes from (`source`) nor what Python makes of the libraries (`extension`).
The options are those that llama.cpp turns on for ggml, so that both run the same kernels.
Upstream: ggml/CMakeLists.txt.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ggml_build import BuildError

BACKENDS: dict[str, dict[str, str]] = {
    "cpu": {"GGML_CPU": "ON"},
    "rpc": {"GGML_RPC": "ON"},
    "blas": {"GGML_BLAS": "ON"},
    "vulkan": {"GGML_VULKAN": "ON"},
    "cuda": {"GGML_CUDA": "ON", "GGML_CUDA_GRAPHS": "ON"},
    "metal": {"GGML_METAL": "ON", "GGML_METAL_EMBED_LIBRARY": "ON"},
}
ALWAYS = ("cpu", "rpc")
OFF_UNLESS_ASKED = ("GGML_RPC", "GGML_BLAS", "GGML_VULKAN", "GGML_CUDA", "GGML_METAL")


@dataclass(frozen=True)
class BuildOptions:
    """What to build.

    `portable`: backends as loadable modules with every CPU variant; else for this machine.
    """

    backends: tuple[str, ...] = ALWAYS
    portable: bool = False
    build_type: str = "Release"
    jobs: int | None = None

    def cmake_flags(self) -> dict[str, str]:
        """The CMake cache entries these options stand for."""
        origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
        flags = {
            "CMAKE_BUILD_TYPE": self.build_type,
            "CMAKE_INSTALL_RPATH": origin,
            "CMAKE_INSTALL_LIBDIR": "lib",
            "CMAKE_INSTALL_BINDIR": "lib",
            "BUILD_SHARED_LIBS": "ON",
            "GGML_BUILD_TESTS": "OFF",
            "GGML_BUILD_EXAMPLES": "OFF",
            "GGML_LLAMAFILE": "ON",
            "GGML_CPU_REPACK": "ON",
            "GGML_OPENMP": "ON",
            "GGML_NATIVE": "OFF" if self.portable else "ON",
            "GGML_BACKEND_DL": "ON" if self.portable else "OFF",
            "GGML_CPU_ALL_VARIANTS": "ON" if self.portable else "OFF",
        }
        flags |= dict.fromkeys(OFF_UNLESS_ASKED, "OFF")
        for name in self.backends:
            flags |= BACKENDS[name]
        return flags

    def key(self, source: Path) -> str:
        """Name of the build folder: the same source and flags share one, whatever checkout asks."""
        facts = {
            "source": str(source),
            "flags": self.cmake_flags(),
            "cc": os.environ.get("CC", ""),
            "cxx": os.environ.get("CXX", ""),
            "cflags": os.environ.get("CFLAGS", ""),
            "cxxflags": os.environ.get("CXXFLAGS", ""),
            "platform": sysconfig.get_platform(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def parse_backends(text: str) -> tuple[str, ...]:
    """Names of a comma-separated list, in one order, plus those that are always built. Raises: BuildError."""
    names = {name.strip().lower() for name in text.split(",") if name.strip()}
    if unknown := names - BACKENDS.keys():
        raise BuildError(
            f"unknown backend {', '.join(sorted(unknown))}: expected some of {', '.join(BACKENDS)}"
        )
    return tuple(name for name in BACKENDS if name in names or name in ALWAYS)


@dataclass(frozen=True)
class NativeBuild:
    """Folders of one configuration.

    `prefix` has include/, lib/ and lib/cmake/ggml for `find_package(ggml)`.
    """

    build: Path
    prefix: Path

    @property
    def include(self) -> Path:
        return self.prefix / "include"

    @property
    def lib(self) -> Path:
        return self.prefix / "lib"

    @property
    def stamp(self) -> Path:
        return self.prefix / "pyggmlkv-stamp.json"


def find_tool(name: str) -> Path:
    """`cmake` or `ninja`: from PATH, else from the package of that name in this Python.

    Raises: BuildError when there is neither.
    """
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found:
        return Path(found)
    raise BuildError(f"{name} was not found on PATH or beside {sys.executable}: pip install {name}")


def check_compilers() -> None:
    """Raises: BuildError when there is no C or C++ compiler. (CMake finds MSVC by itself.)"""
    if sys.platform == "win32":
        return
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        given = os.environ.get(variable)
        candidates = (given.split()[0],) if given else names
        if not any(shutil.which(candidate) for candidate in candidates):
            tried = f"{variable}={given}" if given else ", ".join(names)
            raise BuildError(
                f"no {'C' if variable == 'CC' else 'C++'} compiler ({tried}): install one "
                f"(Debian: apt-get install g++, macOS: xcode-select --install) or set {variable}"
            )


def run(command: Sequence[str | Path], what: str) -> str:
    """Run a step quietly and return its output. Raises: BuildError with the end of it when it fails."""
    words = [str(word) for word in command]
    try:
        result = subprocess.run(
            words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise BuildError(f"{what}: {words[0]} did not start: {error}") from error
    if result.returncode:
        tail = "\n".join(result.stdout.strip().splitlines()[-30:])
        raise BuildError(f"{what} failed (exit {result.returncode}).\n{tail}\ncommand: {' '.join(words)}")
    return result.stdout


def locate(source: Path, options: BuildOptions, cache: Path) -> NativeBuild:
    """The folders that belong to this source and these options; they need not exist yet."""
    root = cache / "ggml-build" / options.key(source)
    return NativeBuild(build=root / "build", prefix=root / "prefix")


def build(source: Path, options: BuildOptions, native: NativeBuild) -> None:
    """Configure (when new or stale), compile what changed and install into the prefix.

    Raises: BuildError for a missing tool or compiler, or when CMake or the compiler fails.
    """
    cmake, ninja = find_tool("cmake"), find_tool("ninja")
    if not configured(native):
        check_compilers()
        native.build.mkdir(parents=True, exist_ok=True)
        flags = options.cmake_flags() | {
            "CMAKE_INSTALL_PREFIX": str(native.prefix),
            "CMAKE_MAKE_PROGRAM": str(ninja),
        }
        defines = [f"-D{name}={value}" for name, value in flags.items()]
        run([cmake, "-S", source, "-B", native.build, "-G", "Ninja", *defines], "configuring ggml")
    jobs = ["-j", str(options.jobs)] if options.jobs else []
    done = run([cmake, "--build", native.build, *jobs], "compiling ggml")
    if "no work to do" in done and native.stamp.exists():
        return  # installing again would strip, that is rewrite, libraries that a process may have mapped
    run([cmake, "--install", native.build, "--strip"], "installing ggml")
    facts = {"source": str(source), "options": asdict(options), "flags": options.cmake_flags()}
    native.stamp.write_text(json.dumps(facts, indent=1) + "\n")


def configured(native: NativeBuild) -> bool:
    """False when there is no CMake cache, or one whose cmake or ninja has gone (a past isolated build's)."""
    cache = native.build / "CMakeCache.txt"
    if not cache.exists() or not (native.build / "build.ninja").exists():
        return False
    for line in cache.read_text(errors="replace").splitlines():
        if (
            line.startswith(("CMAKE_COMMAND:", "CMAKE_MAKE_PROGRAM:"))
            and not Path(line.partition("=")[2]).exists()
        ):
            cache.unlink()
            return False
    return True


def shared_libraries(lib: Path) -> dict[str, Path]:
    """Name to load by (the soname) -> file, for every shared library in a folder.

    Its links are not counted.
    """
    groups: dict[Path, list[str]] = {}
    for path in sorted(lib.iterdir()):
        if ".so" in path.name or path.suffix in (".dylib", ".dll"):
            groups.setdefault(path.resolve(), []).append(path.name)
    # libX.so -> libX.so.0 -> libX.so.0.20.2: the loader asks for the middle one
    return {sorted(names, key=len)[len(names) // 2]: real for real, names in groups.items()}


def copy_libraries(native: NativeBuild, target: Path) -> list[str]:
    """Bring `target` to hold exactly the built libraries, each once, under the name the loader asks for."""
    wanted = shared_libraries(native.lib)
    if "ggml-base" not in "".join(wanted):
        raise BuildError(f"no ggml libraries in {native.lib}: remove {native.build.parent} and build again")
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if old.name not in wanted and not old.name.startswith("LICENSE"):
            old.unlink()
    for name, real in wanted.items():
        copy = target / name
        if not copy.exists() or copy.stat().st_mtime_ns != real.stat().st_mtime_ns:
            copy.unlink(missing_ok=True)  # never write into a library that some process has mapped
            shutil.copy2(real, copy)
    return sorted(wanted)
