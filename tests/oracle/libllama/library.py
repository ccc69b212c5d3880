"""Loads the compiled oracle module, makes sure there is one libggml in the process, captures the log.

Knows nothing of models or contexts. Upstream: llama.h, llama_log_set.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODULE_NAME = "_llama_oracle"


class OracleError(Exception):
    """The reference refused, or the oracle was set up wrongly."""


class Library:
    """The reference's functions (`lib`), its types (`ffi`), and the log."""

    def __init__(self, module: Any) -> None:
        self.ffi = module.ffi
        self.lib = module.lib
        self._sinks: list[list[str]] = []
        self._callbacks: dict[str, Callable[..., Any]] = {}
        self._log = self.ffi.def_extern(name="oracle_on_log")(self._on_log)
        self.ffi.def_extern(name="oracle_on_eval", error=False)(self._on_eval)
        self.ffi.def_extern(name="oracle_on_tensor")(self._on_tensor)
        package_logs = any(name.startswith("pyggmlkv.binding") for name in sys.modules)
        self.lib.oracle_log_set(self.lib.oracle_on_log, self.ffi.NULL, package_logs)
        self.lib.llama_backend_init()
        count = self.lib.GGML_TYPE_COUNT
        names = [self.lib.ggml_type_name(i) for i in range(count)]
        self.type_numbers = {self.ffi.string(n).decode().lower(): i for i, n in enumerate(names) if n}

    def type_number(self, name: str) -> int:
        """The number of a ggml type by its lower-case name, such as `f16` or `q8_0`."""
        try:
            return self.type_numbers[name]
        except KeyError:
            raise OracleError(f"no ggml type {name!r}; there are {', '.join(self.type_numbers)}") from None

    def type_name(self, number: int) -> str:
        """The name of a ggml type by its number."""
        return str(self.ffi.string(self.lib.ggml_type_name(number)).decode().lower())

    def _on_log(self, level: int, text: Any, user_data: Any) -> None:
        if self._sinks:
            self._sinks[-1].append(self.ffi.string(text).decode(errors="replace"))

    def _on_eval(self, tensor: Any, ask: bool, user_data: Any) -> bool:
        return bool(self.ffi.from_handle(user_data)(tensor, ask))

    def _on_tensor(self, tensor: Any, user_data: Any) -> None:
        self.ffi.from_handle(user_data)(tensor)

    @contextlib.contextmanager
    def captured_log(self) -> Iterator[list[str]]:
        """Collects what the reference logs meanwhile, every level; otherwise it is silent."""
        sink: list[str] = []
        self._sinks.append(sink)
        try:
            yield sink
        finally:
            self._sinks.remove(sink)


def mapped_libraries(part: str) -> set[Path]:
    """The files mapped into this process whose name begins with `part`; nothing where /proc is missing."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return set()
    paths = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if line.count("/")}
    return {Path(p).resolve() for p in paths if Path(p).name.startswith(part)}


def check_one_ggml() -> None:
    """Raises: OracleError, when more than one libggml-base is mapped: two copies would share nothing."""
    for part in ("libggml-base", "libggml.", "libggml-cpu"):
        found = mapped_libraries(part)
        if len(found) > 1:
            listed = ", ".join(map(str, sorted(found)))
            raise OracleError(
                f"{len(found)} copies of {part} are loaded ({listed}): import pyggmlkv before the reference, "
                "and build the reference against the package's ggml (make reference)"
            )


@functools.cache
def load(module: Path) -> Library:
    """The reference, loaded once a process. `module` is the file that scripts/build_reference.py names.

    The package's extension is loaded first, so that its ggml is the one in the process.
    """
    importlib.import_module("pyggmlkv._ggml")
    spec = importlib.util.spec_from_file_location(MODULE_NAME, module)
    if spec is None or spec.loader is None:
        raise OracleError(f"{module} is not an extension module of this Python ({sys.version.split()[0]})")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    check_one_ggml()
    return Library(loaded)
