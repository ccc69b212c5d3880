"""ggml's log, as records of the logger `pyggmlkv.ggml`. Quiet unless the application sets that logger's level.

ggml writes from any thread, in pieces; pieces are joined to lines per thread. Levels below the logger's are dropped
in C, without the GIL. Upstream: ggml.h, ggml_log_set.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.logs import ggml_logger

_LEVELS: Mapping[int, int] = MappingProxyType(
    {
        lib.GGML_LOG_LEVEL_NONE: logging.INFO,
        lib.GGML_LOG_LEVEL_DEBUG: logging.DEBUG,
        lib.GGML_LOG_LEVEL_INFO: logging.INFO,
        lib.GGML_LOG_LEVEL_WARN: logging.WARNING,
        lib.GGML_LOG_LEVEL_ERROR: logging.ERROR,
    }
)
_SILENT: int = lib.GGML_LOG_LEVEL_ERROR + 1000


class _Pieces(threading.local):
    """What this thread has written of its current line."""

    def __init__(self) -> None:
        self.level = logging.INFO
        self.text = ""


_pieces = _Pieces()  # one per process, as ggml's log is


def _receive(level: int, text: str) -> None:
    if level != lib.GGML_LOG_LEVEL_CONT:
        _flush()
        _pieces.level = _LEVELS.get(level, logging.INFO)
    _pieces.text += text
    if _pieces.text.endswith("\n"):
        _flush()


def _flush() -> None:
    text, _pieces.text = _pieces.text, ""
    for line in text.splitlines():
        if line.strip():
            ggml_logger.log(_pieces.level, "%s", line.rstrip())


@ffi.def_extern()  # type: ignore[untyped-decorator]
def pyggmlkv_log(level: int, text: Any, user_data: Any) -> None:
    try:
        _receive(level, ffi.string(text).decode("utf-8", "replace"))
    except Exception:  # a handler that raises must not reach C; logging reports its own errors
        logging.getLogger("pyggmlkv").debug("a log handler raised", exc_info=True)


def set_log_level(level: int | str | None) -> None:
    """Let records of at least `level` (a `logging` level) through; None is silence, the default is WARNING.

    The logger `pyggmlkv.ggml` gets the same level.
    """
    if level is None:
        ggml_logger.setLevel(logging.CRITICAL + 1)
        lib.pyggmlkv_log_threshold = _SILENT
        return
    ggml_logger.setLevel(level)
    number = ggml_logger.level
    passed = [
        ours for ours, theirs in _LEVELS.items() if theirs >= number and ours != lib.GGML_LOG_LEVEL_NONE
    ]
    lib.pyggmlkv_log_threshold = min(passed, default=_SILENT)


def _silence() -> None:
    lib.pyggmlkv_log_threshold = _SILENT


lib.ggml_log_set(lib.pyggmlkv_log_gate, ffi.NULL)
atexit.register(_silence)
