"""Ops written in Python: a function that fills the result while the graph runs on the CPU.

It is called once for each of `n_tasks` tasks, from any thread, with (result, operands..., task, n_tasks);
what it raises is raised when the run has ended. Upstream: ggml.c, ggml_map_custom1 ... ggml_custom_inplace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.callbacks import StoredError
from pyggmlkv.binding.dtypes import dtype_info
from pyggmlkv.binding.ops.checks import enter
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import BindingError, ShapeError

CustomFunction = Callable[..., None]


class _PythonOp:
    """What C is given: the function, and where its tensors live."""

    __slots__ = ("arena", "error", "first", "function", "handle", "n_operands")

    def __init__(self, arena: TensorArena, function: CustomFunction, n_operands: int) -> None:
        self.arena = arena
        self.function = function
        self.n_operands = n_operands
        self.first = 0  # source slot of the first operand, for custom ops
        self.error = StoredError()
        self.handle = ffi.new_handle(self)

    def call(self, result: Any, operands: Sequence[Any], task: int, n_tasks: int) -> None:
        """Called from C."""
        try:
            wrap = self.arena._wrap
            self.function(wrap(result), *(wrap(o) for o in operands), task, n_tasks)
        except BaseException as error:  # noqa: BLE001  (raised again once C has returned)
            self.error.store(error)


def _python_op(
    name: str, ctx: TensorArena, function: CustomFunction, n_operands: int, n_tasks: int | None
) -> _PythonOp:
    if not callable(function):
        raise BindingError(f"{name}: expected a function, got {type(function).__name__}")
    if n_tasks is not None and not 0 < n_tasks < 2**31:
        raise BindingError(f"{name}: n_tasks must be positive, or None for one a thread, got {n_tasks}")
    op = _PythonOp(ctx, function, n_operands)
    ctx._keep.append(op)
    ctx._errors.append(op.error)
    return op


def _tasks(n_tasks: int | None) -> int:
    return int(-1 if n_tasks is None else n_tasks)


def map_custom1(ctx: TensorArena, a: Tensor, fun: CustomFunction, n_tasks: int | None = 1) -> Tensor:
    """A tensor like `a`, filled by fun(result, a, task, n_tasks)."""
    enter(ctx, 1, a)
    op = _python_op("map_custom1", ctx, fun, 1, n_tasks)
    return ctx._made(lib.ggml_map_custom1(ctx._p, a._p, lib.pyggmlkv_custom1, _tasks(n_tasks), op.handle))


def map_custom1_inplace(ctx: TensorArena, a: Tensor, fun: CustomFunction, n_tasks: int | None = 1) -> Tensor:
    """As `map_custom1`, written into a."""
    enter(ctx, 1, a)
    op = _python_op("map_custom1_inplace", ctx, fun, 1, n_tasks)
    return ctx._made(
        lib.ggml_map_custom1_inplace(ctx._p, a._p, lib.pyggmlkv_custom1, _tasks(n_tasks), op.handle)
    )


def map_custom2(
    ctx: TensorArena, a: Tensor, b: Tensor, fun: CustomFunction, n_tasks: int | None = 1
) -> Tensor:
    """A tensor like `a`, filled by fun(result, a, b, task, n_tasks)."""
    enter(ctx, 1, a, b)
    op = _python_op("map_custom2", ctx, fun, 2, n_tasks)
    return ctx._made(
        lib.ggml_map_custom2(ctx._p, a._p, b._p, lib.pyggmlkv_custom2, _tasks(n_tasks), op.handle)
    )


def map_custom2_inplace(
    ctx: TensorArena, a: Tensor, b: Tensor, fun: CustomFunction, n_tasks: int | None = 1
) -> Tensor:
    """As `map_custom2`, written into a."""
    enter(ctx, 1, a, b)
    op = _python_op("map_custom2_inplace", ctx, fun, 2, n_tasks)
    function = lib.ggml_map_custom2_inplace
    return ctx._made(function(ctx._p, a._p, b._p, lib.pyggmlkv_custom2, _tasks(n_tasks), op.handle))


def map_custom3(
    ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor, fun: CustomFunction, n_tasks: int | None = 1
) -> Tensor:
    """A tensor like `a`, filled by fun(result, a, b, c, task, n_tasks)."""
    enter(ctx, 1, a, b, c)
    op = _python_op("map_custom3", ctx, fun, 3, n_tasks)
    function = lib.ggml_map_custom3
    return ctx._made(function(ctx._p, a._p, b._p, c._p, lib.pyggmlkv_custom3, _tasks(n_tasks), op.handle))


def map_custom3_inplace(
    ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor, fun: CustomFunction, n_tasks: int | None = 1
) -> Tensor:
    """As `map_custom3`, written into a."""
    enter(ctx, 1, a, b, c)
    op = _python_op("map_custom3_inplace", ctx, fun, 3, n_tasks)
    function = lib.ggml_map_custom3_inplace
    return ctx._made(function(ctx._p, a._p, b._p, c._p, lib.pyggmlkv_custom3, _tasks(n_tasks), op.handle))


def custom_4d(
    ctx: TensorArena, dtype: str, ne0: int, ne1: int, ne2: int, ne3: int,
    args: Sequence[Tensor], fun: CustomFunction, n_tasks: int | None = 1,
) -> Tensor:  # fmt: skip
    """A tensor [ne0, ne1, ne2, ne3] of `dtype`, filled by fun(result, *args, task, n_tasks); at most 9
    operands.
    """
    limit = int(lib.GGML_MAX_SRC) - 1
    if len(args) > limit:
        raise BindingError(f"custom_4d: at most {limit} operands, got {len(args)}", n_args=len(args))
    enter(ctx, 1, *args)
    info = dtype_info(dtype)
    ne = (ne0, ne1, ne2, ne3)
    if min(ne) < 0 or ne0 % info.block_size:
        raise ShapeError(f"custom_4d: expected four sizes in whole blocks of {info.name}, got {ne}", ne=ne)
    op = _python_op("custom_4d", ctx, fun, len(args), n_tasks)
    operands = ffi.new("struct ggml_tensor *[]", [a._p for a in args])
    call = (operands, len(args), lib.pyggmlkv_custom, _tasks(n_tasks), op.handle)
    return ctx._made(lib.ggml_custom_4d(ctx._p, info.number, *ne, *call))


def custom_inplace(
    ctx: TensorArena, a: Tensor, args: Sequence[Tensor], fun: CustomFunction, n_tasks: int | None = 1
) -> Tensor:
    """`a`, changed by fun(a, *args, task, n_tasks); at most 8 operands."""
    limit = int(lib.GGML_MAX_SRC) - 2
    if len(args) > limit:
        raise BindingError(f"custom_inplace: at most {limit} operands, got {len(args)}", n_args=len(args))
    enter(ctx, 1, a, *args)
    op = _python_op("custom_inplace", ctx, fun, len(args), n_tasks)
    op.first = 1  # slot 0 is a
    operands = ffi.new("struct ggml_tensor *[]", [t._p for t in args])
    call = (operands, len(args), lib.pyggmlkv_custom, _tasks(n_tasks), op.handle)
    return ctx._made(lib.ggml_custom_inplace(ctx._p, a._p, *call))


def _op_of(userdata: Any) -> _PythonOp:
    op: _PythonOp = ffi.from_handle(userdata)
    return op


def _escaped(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
    """An exception that began before a callback's first line: Ctrl-C, as a rule. Kept like any other."""
    _op_of(trace.tb_frame.f_locals["userdata"]).error.store(error)


@ffi.def_extern(onerror=_escaped)  # type: ignore[untyped-decorator]
def pyggmlkv_custom1(dst: Any, a: Any, ith: int, nth: int, userdata: Any) -> None:
    _op_of(userdata).call(dst, (a,), ith, nth)


@ffi.def_extern(onerror=_escaped)  # type: ignore[untyped-decorator]
def pyggmlkv_custom2(dst: Any, a: Any, b: Any, ith: int, nth: int, userdata: Any) -> None:
    _op_of(userdata).call(dst, (a, b), ith, nth)


@ffi.def_extern(onerror=_escaped)  # type: ignore[untyped-decorator]
def pyggmlkv_custom3(dst: Any, a: Any, b: Any, c: Any, ith: int, nth: int, userdata: Any) -> None:
    _op_of(userdata).call(dst, (a, b, c), ith, nth)


@ffi.def_extern(onerror=_escaped)  # type: ignore[untyped-decorator]
def pyggmlkv_custom(dst: Any, ith: int, nth: int, userdata: Any) -> None:
    op = _op_of(userdata)
    first = op.first
    op.call(dst, [dst.src[i] for i in range(first, first + op.n_operands)], ith, nth)
