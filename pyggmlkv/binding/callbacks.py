"""Calls from C into Python: stopping a run and watching its nodes. What Python raises there waits until C returned.

C holds a handle of one of the classes below and comes in through the extension's gates, which answer without the
GIL where they can. Upstream: ggml.h, ggml_abort_callback; ggml-backend.h, ggml_backend_sched_eval_callback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyggmlkv._ggml import ffi, lib
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
    """Stops a run: at once with `stop()`, from any thread; or when `function`, asked once in `interval_ms`, says so."""

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

    def ask(self) -> bool:
        """Called from C."""
        try:
            return self._function is not None and bool(self._function())
        except BaseException as error:  # noqa: BLE001  (raised again once C has returned)
            self._stored.store(error)
            return True


class EvalWatch:
    """Shows nodes to a Python function while a Scheduler runs: `function(tensor, ask) -> bool`.

    With `ask` the answer says whether the node is wanted; without, its data is there, and False stops the run.
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


@ffi.def_extern()  # type: ignore[untyped-decorator]
def pyggmlkv_abort(user_data: Any) -> bool:
    gate: AbortGate = ffi.from_handle(user_data)
    return gate.ask()


@ffi.def_extern()  # type: ignore[untyped-decorator]
def pyggmlkv_eval(tensor: Any, ask: bool, user_data: Any) -> bool:
    watch: EvalWatch = ffi.from_handle(user_data)
    return watch.show(tensor, ask)
