"""Counts which backends really ran graphs during the tests, and says so at the end of the run.

A device that is present but ran nothing is named as such: a test that meant to use it did not.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest


class BackendsUsed:
    """Graph runs by backend, counted where the package hands a graph to ggml."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.present: list[str] = []
        self.reason = ""

    def watch(self) -> None:
        """Wraps the two classes that run graphs; a package that is not built is remembered as the reason."""
        try:
            from pyggmlkv.binding import Backend, Scheduler, devices

            self.present = [device.name for device in devices()]
        except ImportError as error:
            self.reason = f"the C library is not built ({error})"
            return
        wrap(Backend, "graph_compute", self._count_backend)
        for method in ("graph_compute", "graph_compute_async"):
            wrap(Scheduler, method, self._count_scheduler)

    def _count_backend(self, backend: Any, graph: Any) -> None:
        self.runs[backend.name] += 1

    def _count_scheduler(self, scheduler: Any, graph: Any) -> None:
        names = {backend.name for backend in scheduler.backends}
        if len(names) > 1:
            placed = (scheduler.tensor_backend(node) for node in graph.nodes)
            names = {backend.name for backend in placed if backend is not None}
        for name in names:
            self.runs[name] += 1

    def lines(self) -> list[str]:
        """What the end of the run says."""
        if self.reason:
            return [f"backends really used: none, {self.reason}"]
        used = ", ".join(f"{name} ({n} graph runs)" for name, n in sorted(self.runs.items()))
        idle = [name for name in self.present if name not in self.runs]
        return [
            f"backends really used: {used or 'none'}"
            + (f"; present, not used: {', '.join(idle)}" if idle else "")
        ]


def wrap(owner: type, method: str, count: Any) -> None:
    """Lets `count(self, graph)` be called after each successful `method`."""
    real = getattr(owner, method)

    @functools.wraps(real)
    def counted(self: Any, graph: Any, *rest: Any, **named: Any) -> Any:
        result = real(self, graph, *rest, **named)
        count(self, graph)
        return result

    setattr(owner, method, counted)


USED = BackendsUsed()


def pytest_sessionstart(session: pytest.Session) -> None:
    USED.watch()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in USED.lines():
        terminalreporter.write_line(line)
