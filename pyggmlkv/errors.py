"""Every error pyggmlkv raises, as a small tree that callers can catch by stage or by builtin.

Knows nothing of C or of any other module. Leaves also inherit the builtin that fits, so `except ValueError` works;
none shadows one. Facts travel as attributes (`error.facts`), the sentence is for people.
"""

from __future__ import annotations


class PyggmlkvError(Exception):
    """Root of all errors raised here. `facts` holds the values the message was made of."""

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.facts = facts


class ParameterError(PyggmlkvError, ValueError):
    """A setting of a context, a memory or a command is out of range; names it."""


class BindingError(PyggmlkvError):
    """The C boundary: handles, tensors, ops, graphs, buffers."""


class ClosedError(BindingError, RuntimeError):
    """An object was used after `close()`."""


class ForkedError(BindingError, RuntimeError):
    """An object made before a fork was used in the child."""


class ShapeError(BindingError, ValueError):
    """An op was given tensors whose shapes, strides or sizes do not fit."""


class RowIndexError(BindingError, IndexError):
    """A graph was given row ids that its tensors do not have."""


class DTypeError(BindingError, TypeError):
    """An op or a copy was given an element type that it does not take."""


class ArenaFullError(BindingError, MemoryError):
    """A tensor arena or a graph has no room for another tensor or node."""


class BackendError(PyggmlkvError):
    """Devices, schedulers and graph runs."""


class DeviceNotFoundError(BackendError, LookupError):
    """A device or backend was asked for by a name that is not there."""


class DeviceMemoryError(BackendError, MemoryError):
    """A buffer could not be allocated on its device."""


class ComputeError(BackendError, RuntimeError):
    """A graph run failed or was stopped."""


class UnsupportedOpError(BackendError, NotImplementedError):
    """No available device supports an op that a graph needs."""


class GGUFError(PyggmlkvError):
    """Model files."""


class GGUFFormatError(GGUFError, ValueError):
    """The file is not a well-formed GGUF file."""


class GGUFKeyError(GGUFError, KeyError):
    """A metadata key is missing or has the wrong type."""

    __str__ = Exception.__str__


class GGUFTensorError(GGUFError, ValueError):
    """A tensor is missing or has the wrong shape or type."""


class LoadCancelledError(GGUFError, RuntimeError):
    """The progress callback asked for loading to stop; everything was released."""


class ArchitectureError(GGUFError, NotImplementedError):
    """The file's architecture, or a variant of it, is not implemented."""


class BatchError(PyggmlkvError, ValueError):
    """A batch was refused; memory is as it was."""


class CacheError(PyggmlkvError):
    """Memory: cells, slots, sequence operations."""


class NoSlotError(CacheError, MemoryError):
    """No slot for a ubatch: names the part, the cells needed and the cells free."""


class SequenceError(CacheError, ValueError):
    """A sequence operation was refused (id out of range, partial copy between streams, ...)."""


class ShiftError(CacheError, ValueError):
    """Positions of this memory cannot be shifted; the message says why."""


class StateError(PyggmlkvError, ValueError):
    """A saved state was refused; memory is as it was."""


class TextError(PyggmlkvError, ValueError):
    """Tokenizers and chat templates: text or token ids that cannot be turned into each other."""


class MissingExtraError(PyggmlkvError, ImportError):
    """A feature needs an optional dependency; the message names the extra to install."""


class FetchError(PyggmlkvError, OSError):
    """A pinned download failed, or what arrived is not what was pinned."""

    __str__ = Exception.__str__


class UsageError(PyggmlkvError, ValueError):
    """A command was called with arguments that do not fit together."""
