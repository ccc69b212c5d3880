"""One owner for every C object: close in the right order, once, whatever the garbage collector does.

`Resource` is the record of a C object (how to free it, what depends on it); `Owner` is the Python object a
user holds. A resource knows its dependent resources, never the Python objects, so a parent can free its
children first even when the collector finalises a cycle in the wrong order. Knows nothing of ggml.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, Self

from pyggmlkv.errors import BindingError, ClosedError, ForkedError

Release = Callable[[Any], None]


class Resource:
    """One C object: pointer, how to free it, and the resources that must be freed before it."""

    __slots__ = (
        "__weakref__",
        "_children",
        "_exports",
        "_keep",
        "_parents",
        "_release",
        "_state",
        "busy",
        "kind",
        "live",
        "pointer",
    )  # fmt: skip

    # Process-wide by nature: fork and exit concern every C object there is.
    _open: ClassVar[weakref.WeakSet[Resource]] = weakref.WeakSet()
    _entry: ClassVar[threading.Lock] = threading.Lock()
    _exiting: ClassVar[bool] = False
    _threads_lost: ClassVar[bool] = False
    _computed: ClassVar[bool] = False

    def __init__(
        self,
        kind: str,
        pointer: Any,
        release: Release | None,
        parents: Iterable[Resource] = (),
        keep: object = None,
    ) -> None:
        self.kind = kind
        self.pointer = pointer
        self.live: list[bool] = [
            True
        ]  # emptied on close; tensors share it, so a truth test is the whole check
        self.busy = 0
        self._release = release
        self._children: dict[int, Resource] = {}
        self._parents = tuple(parents)
        self._exports = 0
        self._state = "open"
        self._keep = keep
        for parent in self._parents:
            parent._children[id(self)] = self
        Resource._open.add(self)

    @property
    def state(self) -> str:
        """`open`, `closed` or `forked`."""
        return self._state

    def close(self) -> None:
        """Free this and everything that depends on it; a second call does nothing.

        Raises: BindingError while C is running on it in another thread or below a callback.
        """
        if self._state != "open":
            return
        self._refuse_if_busy()
        for child in reversed(list(self._children.values())):
            child.close()
        self._state = "closed"
        self.live.clear()
        for parent in self._parents:
            parent._children.pop(id(self), None)
        if not self._exports:
            self._free()

    def _refuse_if_busy(self) -> None:
        if self.busy:
            raise BindingError(f"{self.kind}: cannot be closed while C code is running on it", kind=self.kind)
        for child in self._children.values():
            child._refuse_if_busy()

    def _free(self) -> None:
        release, pointer = self._release, self.pointer
        self._release = None
        self.pointer = None
        if release is not None and not Resource._exiting:
            release(pointer)
        self._keep = None
        self._parents = ()

    def begin(self, *others: Resource) -> bool:
        """C starts to run on this and `others`: False if it runs on this already, in another thread or above
        here.
        """
        with Resource._entry:
            if self.busy:
                return False
            for resource in (self, *others):
                resource.busy += 1
            return True

    def end(self, *others: Resource) -> None:
        """C has returned."""
        with Resource._entry:
            for resource in (self, *others):
                resource.busy -= 1

    def keep(self, thing: object) -> None:
        """Keep `thing` alive until the C object is freed (replaces what was kept)."""
        self._keep = thing

    @property
    def n_views(self) -> int:
        """NumPy views that point into this memory."""
        return self._exports

    def export(self) -> None:
        """A NumPy view now points into this memory: closing waits for it."""
        self._exports += 1

    def unexport(self) -> None:
        """A NumPy view died; frees the C object if it was closed meanwhile."""
        self._exports -= 1
        if not self._exports and self._state == "closed":
            self._free()

    def error(self) -> BindingError:
        """What a use of this now means."""
        if self._state == "forked":
            return ForkedError(
                f"{self.kind} was made before a fork and cannot be used in the child process; "
                "start the child with multiprocessing's 'spawn' method, or make it anew in the child",
                kind=self.kind,
            )
        return ClosedError(f"{self.kind} was used after close()", kind=self.kind)

    @classmethod
    def mark_computed(cls) -> None:
        """Worker threads may exist from here on: a forked child must not compute."""
        cls._computed = True

    @classmethod
    def refuse_after_fork(cls) -> None:
        """Raises: ForkedError in a child that was forked after its parent had run graphs."""
        if cls._threads_lost:
            raise ForkedError(
                "this process was forked after its parent had run graphs; worker threads do not survive a fork. "
                "Start the child with multiprocessing's 'spawn' method instead"
            )

    @classmethod
    def open_count(cls) -> dict[str, int]:
        """Number of open C objects by kind (for leak tests)."""
        return dict(Counter(r.kind for r in list(cls._open) if r._state == "open"))

    @classmethod
    def _after_fork(cls) -> None:
        cls._threads_lost = cls._computed
        cls._entry = threading.Lock()  # another thread of the parent may have held it
        for resource in list(cls._open):
            resource._release = None  # the parent frees it
            if resource._state == "open":
                resource._state = "forked"
                resource.live.clear()

    @classmethod
    def _at_exit(cls) -> None:
        # Children first, as always. Memory that a NumPy view shows is left to the system; so is everything where C
        # still runs in some thread, or is about to: what it reads (weights, caches) does not know that it is read.
        resources = list(cls._open)
        if any(resource.busy for resource in resources) or _another_thread_is_here():
            cls._exiting = True
            return
        for resource in resources:
            if resource._state == "open" and not resource._parents:
                try:
                    resource.close()
                except BindingError:
                    continue
        cls._exiting = True


def _another_thread_is_here() -> bool:
    """Whether a thread runs this package's code, even between two calls of C."""
    package = __name__.partition(".")[0]
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            inner = (f.f_globals.get("__name__", "") for f, _ in traceback.walk_stack(frame))
            if any(name.partition(".")[0] == package for name in inner):
                return True
    return False


if hasattr(os, "register_at_fork"):  # absent on Windows
    os.register_at_fork(after_in_child=Resource._after_fork)
atexit.register(Resource._at_exit)


class Owner:
    """A Python object that owns a C object: `close()`, `with`, and `__del__` as a net.

    Parents stay alive as long as their children; closing a parent closes its children first; every use after
    close is a ClosedError, every use in a forked child a ForkedError.
    """

    _resource: Resource | None = None  # until the C object exists
    _parents: tuple[Owner, ...] = ()

    def _own(
        self, pointer: Any, release: Release | None, parents: Iterable[Owner] = (), keep: object = None
    ) -> None:
        self._parents = tuple(parents)
        self._resource = Resource(
            type(self).__name__, pointer, release, [p._checked_resource() for p in self._parents], keep
        )

    def _checked_resource(self) -> Resource:
        resource = self._resource
        if resource is None:
            raise ClosedError(f"{type(self).__name__} was never opened")
        if not resource.live:
            raise resource.error()
        return resource

    @property
    def _pointer(self) -> Any:
        return self._checked_resource().pointer

    @property
    def closed(self) -> bool:
        """True once the C object is gone for this process."""
        return self._resource is None or not self._resource.live

    def close(self) -> None:
        """Free the C object, its children first; idempotent, and a no-op in a forked child."""
        if self._resource is not None:
            self._resource.close()

    def __enter__(self) -> Self:
        self._checked_resource()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        resource = self._resource
        if resource is not None and resource.live and not resource.busy:
            resource.close()
