"""Calls from C into Python: stopping a run, watching its nodes, and ggml's log.

C comes in through the extension's gates, which answer without the GIL where they can. What Python raises
waits until C has returned. ggml logs from any thread, in pieces; pieces are joined to lines per thread.
Upstream: ggml.h, ggml_abort_callback, ggml_log_set; ggml-backend.h, ggml_backend_sched_eval_callback.
"""

from __future__ import annotations

import atexit
import logging
import threading
from _thread import interrupt_main
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.logs import ggml_logger

if TYPE_CHECKING:
    from pyggmlkv.binding.arena import TensorArena
    from pyggmlkv.binding.tensor import Tensor


class StoredError:
    """The first exception raised below C."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def store(self, error: BaseException) -> None:
        """Keep it unless an earlier one is kept."""
        if self.error is None:
            self.error = error

    def reraise(self) -> None:
        """Raise what was stored, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class AbortGate:
    """Stops a run: at once with `stop()`, from any thread; or when `function`, asked once in `interval_ms`,
    says so.
    """

    __slots__ = ("__weakref__", "_function", "_handle", "_stored", "function", "state")

    def __init__(self, function: Callable[[], bool] | None = None, interval_ms: float = 20.0) -> None:
        self._function = function
        self._stored = StoredError()
        self._handle = ffi.new_handle(self)
        self.function = lib.pyggmlkv_abort_gate
        self.state = ffi.new("struct pyggmlkv_abort_state *")
        self.state.interval_us = 2**62 if function is None else int(interval_ms * 1000)
        self.state.next_us = 2**62 if function is None else 0
        self.state.user_data = self._handle

    def stop(self) -> None:
        """Stop the run before its next node. Safe in a signal handler and in any thread."""
        self.state.stop = 1

    @property
    def stopping(self) -> bool:
        """True between a stop and the end of the run it stops."""
        return bool(self.state.stop)

    def finish(self) -> None:
        """A run ended: the next one starts unstopped. Raises what the function raised."""
        self.state.stop = 0
        self._stored.reraise()

    def escaped(self, error: BaseException) -> None:
        """Keep what was raised at the callback's door."""
        self._stored.store(error)

    def ask(self) -> bool:
        """Called from C."""
        try:
            return self._function is not None and bool(self._function())
        except BaseException as error:  # noqa: BLE001  (raised again once C has returned)
            self._stored.store(error)
            return True


class EvalWatch:
    """Shows nodes to a Python function while a Scheduler runs: `function(tensor, ask) -> bool`.

    With `ask` the answer says whether the node is wanted; without, its data is there, and False stops the
    run.
    """

    __slots__ = ("_function", "_stored", "arena", "handle", "stopped")

    def __init__(self, function: Callable[[Tensor, bool], bool]) -> None:
        self._function = function
        self._stored = StoredError()
        self.handle = ffi.new_handle(self)
        self.arena: TensorArena | None = None
        self.stopped = False

    def begin(self, arena: TensorArena) -> None:
        """A run of a graph of `arena` starts."""
        self.arena = arena
        self.stopped = False
        self._stored.error = None

    def reraise(self) -> None:
        """Raise what the function raised."""
        self._stored.reraise()

    def escaped(self, error: BaseException) -> None:
        """Keep what was raised at the callback's door, and stop."""
        self._stored.store(error)
        self.stopped = True

    def show(self, pointer: Any, ask: bool) -> bool:
        """Called from C."""
        if self.stopped or self.arena is None:
            return False
        try:
            answer = bool(self._function(self.arena._wrap(pointer), ask))
        except BaseException as error:  # noqa: BLE001  (raised again once C has returned)
            self._stored.store(error)
            self.stopped = True
            return False
        if not ask and not answer:
            self.stopped = True
        return answer


def _escaped(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
    """An exception that began before a callback's first line: Ctrl-C, as a rule. Kept like any other."""
    called: AbortGate | EvalWatch = ffi.from_handle(trace.tb_frame.f_locals["user_data"])
    called.escaped(error)


@ffi.def_extern(error=True, onerror=_escaped)  # type: ignore[untyped-decorator]
def pyggmlkv_abort(user_data: Any) -> bool:
    gate: AbortGate = ffi.from_handle(user_data)
    return gate.ask()


@ffi.def_extern(error=False, onerror=_escaped)  # type: ignore[untyped-decorator]
def pyggmlkv_eval(tensor: Any, ask: bool, user_data: Any) -> bool:
    watch: EvalWatch = ffi.from_handle(user_data)
    return watch.show(tensor, ask)


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


def _later(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
    """Nobody waits for a log line: Ctrl-C that arrives in one is raised at the next chance, the rest is dropped."""
    if issubclass(kind, KeyboardInterrupt):
        interrupt_main()


@ffi.def_extern(onerror=_later)  # type: ignore[untyped-decorator]
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
