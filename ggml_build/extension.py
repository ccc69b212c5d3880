"""Turns the cdef files into the cffi API-mode extension pyggmlkv._ggml, compiled against the built ggml.

One cdef file stands for one upstream header; a backend's header is bound when that backend is built.
Does not know how ggml was built, only where its headers and libraries are.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from ggml_build import BuildError
from ggml_build.native import NativeBuild

CORE_HEADERS = ("ggml.h", "ggml-alloc.h", "ggml-backend.h", "gguf.h", "ggml-opt.h")
BACKEND_HEADERS = {
    "cpu": "ggml-cpu.h",
    "rpc": "ggml-rpc.h",
    "blas": "ggml-blas.h",
    "vulkan": "ggml-vulkan.h",
    "cuda": "ggml-cuda.h",
    "metal": "ggml-metal.h",
}
MODULE = "pyggmlkv._ggml"


def bound_headers(backends: tuple[str, ...]) -> list[str]:
    """The upstream headers that a build with these backends binds, in the order they must be declared."""
    return [*CORE_HEADERS, *(header for name, header in BACKEND_HEADERS.items() if name in backends)]


def declarations(cdef: Path, headers: list[str]) -> list[tuple[str, str]]:
    """(file name, text) of every cdef file to bind, our callbacks last."""
    return [(name, (cdef / name).read_text()) for name in (*headers, "callbacks.h")]


def preamble(cdef: Path, headers: list[str], extra: str = "") -> str:
    """The C text in front of the generated wrappers."""
    includes = "".join(f'#include "{name}"\n' for name in headers)
    return f"{includes}\n{extra}\n{(cdef / 'gates.h').read_text()}"


def fingerprint(*texts: str) -> str:
    """Changes when any of the texts does, or the Python or cffi that would compile them."""
    import cffi

    facts = (
        cffi.__version__,
        sysconfig.get_config_var("SOABI") or "",
        sys.version,
        os.environ.get("CFLAGS", ""),
    )
    return hashlib.sha256("\0".join((*texts, *facts)).encode()).hexdigest()


def generate(cdef: Path, headers: list[str], c_file: Path, extra: str = "") -> None:
    """Write the C source of the extension. Raises: BuildError when cffi does not accept a cdef file."""
    import cffi

    ffi = cffi.FFI()
    for name, text in declarations(cdef, headers):
        try:
            ffi.cdef(text)
        except (cffi.CDefError, cffi.FFIError) as error:
            raise BuildError(f"cdef/{name}: {error}") from error
    ffi.set_source(MODULE, preamble(cdef, headers, extra))
    c_file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):  # cffi says what it writes
        ffi.emit_c_code(str(c_file))


def compile_extension(c_file: Path, native: NativeBuild, libraries: list[str], kept: Path) -> Path:
    """Compile into `kept`, to be installed beside `_lib`. Raises: BuildError when the compiler refuses."""
    try:
        from setuptools import Distribution, Extension
        from setuptools.errors import BaseError, CompileError
    except ImportError as error:
        raise BuildError("setuptools is needed to compile the extension: pip install setuptools") from error
    arguments = [] if sys.platform == "win32" else ["-O2", "-g0", "-Wno-deprecated-declarations"]
    extension = Extension(
        MODULE,
        [str(c_file)],
        include_dirs=[str(native.include)],
        library_dirs=[str(native.lib)],
        libraries=libraries,
        extra_compile_args=arguments,
        extra_link_args=_run_path(),
        py_limited_api=not sysconfig.get_config_var("Py_GIL_DISABLED"),
    )
    with tempfile.TemporaryDirectory() as folder:
        command = Distribution({"ext_modules": [extension]}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = folder, str(c_file.parent)
        try:
            command.ensure_finalized()
            command.run()
        except (BaseError, CompileError, OSError) as error:
            raise BuildError(
                f"compiling {MODULE} failed: {error} (the compiler's own words are above)"
            ) from error
        kept.mkdir(parents=True, exist_ok=True)
        built = Path(command.get_ext_fullpath(MODULE))
        partial = kept / f"{built.name}.part"
        shutil.copy2(built, partial)
        return partial.replace(kept / built.name)


def installed(folder: Path) -> Path | None:
    """The compiled extension in a folder, if there is one."""
    return next((path for path in sorted(folder.glob("_ggml.*")) if path.suffix in (".so", ".pyd")), None)


def install(kept: Path, package: Path) -> Path:
    """Put the extension in `kept` into the package.

    Another one is replaced, not overwritten: it may be mapped.
    """
    compiled, old = installed(kept), installed(package)
    if compiled is None:
        raise BuildError(f"no compiled extension in {kept}: remove that folder and build again")
    if old and old.name != compiled.name:
        old.unlink()
    partial = package / f"{compiled.name}.part"
    shutil.copy2(compiled, partial)
    return partial.replace(package / compiled.name)


def _run_path() -> list[str]:
    if sys.platform == "win32":
        return []
    return [f"-Wl,-rpath,{'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}/_lib"]
