"""Builds the vendored ggml with CMake and the cffi extension pyggmlkv._ggml in place; only what is stale.

Libraries go to pyggmlkv/_lib and are found relative to the extension; everything in between stays in the
cache folder, shared by all checkouts. `setup.py` calls the same code. ggml itself is never patched.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ggml_build import BuildError, extension, forward, info, native
from ggml_build.native import BuildOptions, NativeBuild
from ggml_build.source import Source, cache_folder, find_source

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "pyggmlkv"
CDEF = PACKAGE / "binding" / "cdef"
LICENCE = "LICENSE-ggml"


def build_in_place(
    options: BuildOptions, given: Path | None = None, say: Callable[[str], None] = print
) -> bool:
    """Bring pyggmlkv/ up to date with these options; True when anything was built. Raises: BuildError."""
    cache = cache_folder()
    source = find_source(ROOT, given, cache)
    libraries = native.locate(source.path, options, cache)
    with locked(libraries.build.parent):
        built = _build_native(source, options, libraries, say)
        built = _build_extension(source, options, libraries, say) or built
    info.remember(ROOT, source, options, libraries)
    return built


def _build_native(
    source: Source, options: BuildOptions, libraries: NativeBuild, say: Callable[[str], None]
) -> bool:
    """Build ggml unless the source cannot have changed since; then give the package its copies."""
    built = False
    if not (source.immutable and libraries.stamp.exists()):
        if not libraries.stamp.exists():
            say(f"building ggml {source.version} ({source.kind}) with {', '.join(options.backends)}")
            built = True
        native.build(source.path, options, libraries)
    native.copy_libraries(libraries, PACKAGE / "_lib")
    licence = PACKAGE / "_lib" / LICENCE
    if not licence.exists() and (source.path / "LICENSE").exists():
        shutil.copyfile(source.path / "LICENSE", licence)
    return built


def _build_extension(
    source: Source, options: BuildOptions, libraries: NativeBuild, say: Callable[[str], None]
) -> bool:
    """Compile the extension unless this very one is in place or in the cache folder."""
    headers = extension.bound_headers(options.backends)
    extra = forward.forwarders(CDEF, options.backends) if options.portable else ""
    texts = [text for _, text in extension.declarations(CDEF, headers)]
    upstream = [(libraries.include / name).read_text() for name in headers]
    fingerprint = extension.fingerprint(extension.preamble(CDEF, headers, extra), *texts, *upstream)
    if info.read_shipped(PACKAGE).get("extension") == fingerprint and extension.installed(PACKAGE):
        return False
    kept = libraries.build.parent / "extension" / fingerprint[:16]
    built = extension.installed(kept) is None
    if built:
        say("compiling pyggmlkv._ggml")
        c_file = libraries.build.parent / "generated" / "_ggml.c"
        extension.generate(CDEF, headers, c_file, extra)
        names = ["ggml", "ggml-base"] + (
            [] if options.portable else [f"ggml-{name}" for name in options.backends]
        )
        extension.compile_extension(c_file, libraries, names, kept)
    extension.install(kept, PACKAGE)
    info.write_shipped(PACKAGE, info.shipped(source, options, libraries, fingerprint))
    return built


def outputs() -> list[Path]:
    """The files in pyggmlkv/ that a wheel must carry beside the Python files."""
    compiled = extension.installed(PACKAGE)
    libraries = sorted((PACKAGE / "_lib").glob("*"))
    return [path for path in (compiled, PACKAGE / info.SHIPPED, *libraries) if path and path.exists()]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold this build folder against other processes; a second one waits. (No lock on Windows.)"""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def options_from_environment() -> tuple[BuildOptions, Path | None]:
    """What `pip install` builds.

    PYGGMLKV_BACKENDS=LIST and PYGGMLKV_PORTABLE=1 say so; else as is built in place; else the default.
    """
    backends, portable = os.environ.get("PYGGMLKV_BACKENDS"), os.environ.get("PYGGMLKV_PORTABLE")
    if backends is None and portable is None and (recorded := info.recorded_options(ROOT)):
        return recorded
    return BuildOptions(native.parse_backends(backends or ""), portable=portable == "1"), None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="ggml source tree (also PYGGMLKV_GGML_SOURCE)"
    )
    names = ",".join(native.BACKENDS)
    parser.add_argument(
        "--backends", default="cpu", metavar="LIST", help=f"of {names}; cpu and rpc are always built"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--native", action="store_true", help="for this machine's instruction set (default)")
    kind.add_argument(
        "--portable", action="store_true", help="loadable backends, every CPU variant: for wheels"
    )
    parser.add_argument(
        "--build-type", default="Release", choices=("Release", "RelWithDebInfo", "Debug", "MinSizeRel")
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="compile N files at a time (default: ninja decides)"
    )
    parser.add_argument(
        "--print-prefix", action="store_true", help="print the install prefix of the build in place"
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing unless it fails")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    start = time.perf_counter()
    try:
        if given.print_prefix:
            prefix = info.recorded_prefix(ROOT)
            if prefix is None:
                raise BuildError("nothing is built here yet: run build_ggml.py first")
            print(prefix)
            return 0
        options = BuildOptions(
            native.parse_backends(given.backends), given.portable, given.build_type, given.jobs
        )
        say = (lambda _: None) if given.quiet else print
        built = build_in_place(options, given.source, say)
    except BuildError as error:
        print(f"build_ggml: {error}", file=sys.stderr)
        return 1
    say(f"{'built' if built else 'up to date'} in {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
