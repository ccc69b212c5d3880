"""Functions of one element, and gated linear units.

The result has the shape and type of `a`; an `_inplace` op writes into the memory of `a`.
Upstream: ggml.c, ggml_unary, ggml_glu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pyggmlkv._ggml import lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.dtypes import F32
from pyggmlkv.binding.ops.checks import (
    F32_F16,
    FLOAT,
    SIZE,
    choice,
    dtype_error,
    enter1,
    enter2,
    shape_error,
    show,
    want_contiguous_1,
    want_dtype,
    want_f32,
    want_rows,
    want_same_shape,
)
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import DTypeError

UnaryOp = Callable[[TensorArena, Tensor], Tensor]

_UNARY: Mapping[str, int] = MappingProxyType(
    {
        "abs": lib.GGML_UNARY_OP_ABS,
        "sgn": lib.GGML_UNARY_OP_SGN,
        "neg": lib.GGML_UNARY_OP_NEG,
        "step": lib.GGML_UNARY_OP_STEP,
        "tanh": lib.GGML_UNARY_OP_TANH,
        "elu": lib.GGML_UNARY_OP_ELU,
        "relu": lib.GGML_UNARY_OP_RELU,
        "sigmoid": lib.GGML_UNARY_OP_SIGMOID,
        "gelu": lib.GGML_UNARY_OP_GELU,
        "gelu_quick": lib.GGML_UNARY_OP_GELU_QUICK,
        "silu": lib.GGML_UNARY_OP_SILU,
        "hardswish": lib.GGML_UNARY_OP_HARDSWISH,
        "hardsigmoid": lib.GGML_UNARY_OP_HARDSIGMOID,
        "exp": lib.GGML_UNARY_OP_EXP,
        "expm1": lib.GGML_UNARY_OP_EXPM1,
        "softplus": lib.GGML_UNARY_OP_SOFTPLUS,
        "gelu_erf": lib.GGML_UNARY_OP_GELU_ERF,
        "floor": lib.GGML_UNARY_OP_FLOOR,
        "ceil": lib.GGML_UNARY_OP_CEIL,
        "round": lib.GGML_UNARY_OP_ROUND,
        "trunc": lib.GGML_UNARY_OP_TRUNC,
    }
)
_NO_BF16 = frozenset({"gelu", "gelu_quick", "gelu_erf", "silu"})
_GLU: Mapping[str, int] = MappingProxyType(
    {
        "reglu": lib.GGML_GLU_OP_REGLU,
        "geglu": lib.GGML_GLU_OP_GEGLU,
        "swiglu": lib.GGML_GLU_OP_SWIGLU,
        "geglu_erf": lib.GGML_GLU_OP_GEGLU_ERF,
        "geglu_quick": lib.GGML_GLU_OP_GEGLU_QUICK,
    }
)


def _function(name: str, function: Any, what: str, allowed: frozenset[int] = FLOAT) -> UnaryOp:
    def op(ctx: TensorArena, a: Tensor) -> Tensor:
        enter1(ctx, a)
        if a._type not in allowed:
            raise dtype_error(name, "a", a, allowed)
        if a._p.nb[0] != SIZE[a._type]:
            want_rows(name, "a", a)
        return ctx._made(function(ctx._p, a._p))

    op.__name__ = op.__qualname__ = name
    op.__doc__ = what
    return op


abs = _function("abs", lib.ggml_abs, "|a|.")
abs_inplace = _function("abs_inplace", lib.ggml_abs_inplace, "|a|, written into a.")
sgn = _function("sgn", lib.ggml_sgn, "-1, 0 or 1, the sign of a.")
sgn_inplace = _function("sgn_inplace", lib.ggml_sgn_inplace, "The sign of a, written into a.")
neg = _function("neg", lib.ggml_neg, "-a.")
neg_inplace = _function("neg_inplace", lib.ggml_neg_inplace, "-a, written into a.")
step = _function("step", lib.ggml_step, "1 where a > 0, else 0.")
step_inplace = _function("step_inplace", lib.ggml_step_inplace, "As `step`, written into a.")
tanh = _function("tanh", lib.ggml_tanh, "Hyperbolic tangent.")
tanh_inplace = _function("tanh_inplace", lib.ggml_tanh_inplace, "As `tanh`, written into a.")
elu = _function("elu", lib.ggml_elu, "a where a > 0, else exp(a) - 1.")
elu_inplace = _function("elu_inplace", lib.ggml_elu_inplace, "As `elu`, written into a.")
relu = _function("relu", lib.ggml_relu, "max(a, 0).")
relu_inplace = _function("relu_inplace", lib.ggml_relu_inplace, "As `relu`, written into a.")
sigmoid = _function("sigmoid", lib.ggml_sigmoid, "1 / (1 + exp(-a)).")
sigmoid_inplace = _function("sigmoid_inplace", lib.ggml_sigmoid_inplace, "As `sigmoid`, written into a.")
gelu = _function("gelu", lib.ggml_gelu, "GELU, tanh approximation, by table in f16 precision.", F32_F16)
gelu_inplace = _function("gelu_inplace", lib.ggml_gelu_inplace, "As `gelu`, written into a.", F32_F16)
gelu_erf = _function("gelu_erf", lib.ggml_gelu_erf, "GELU by the error function.", F32_F16)
gelu_erf_inplace = _function(
    "gelu_erf_inplace", lib.ggml_gelu_erf_inplace, "As `gelu_erf`, written into a.", F32_F16
)
gelu_quick = _function("gelu_quick", lib.ggml_gelu_quick, "a * sigmoid(1.702 a).", F32_F16)
gelu_quick_inplace = _function(
    "gelu_quick_inplace", lib.ggml_gelu_quick_inplace, "As `gelu_quick`, written into a.", F32_F16
)
silu = _function("silu", lib.ggml_silu, "a * sigmoid(a).", F32_F16)
silu_inplace = _function("silu_inplace", lib.ggml_silu_inplace, "As `silu`, written into a.", F32_F16)
hardswish = _function("hardswish", lib.ggml_hardswish, "a * relu6(a + 3) / 6.")
hardsigmoid = _function("hardsigmoid", lib.ggml_hardsigmoid, "relu6(a + 3) / 6.")
exp = _function("exp", lib.ggml_exp, "e to the a.")
exp_inplace = _function("exp_inplace", lib.ggml_exp_inplace, "As `exp`, written into a.")
expm1 = _function("expm1", lib.ggml_expm1, "e to the a, minus 1.")
expm1_inplace = _function("expm1_inplace", lib.ggml_expm1_inplace, "As `expm1`, written into a.")
softplus = _function("softplus", lib.ggml_softplus, "log(1 + exp(a)).")
softplus_inplace = _function("softplus_inplace", lib.ggml_softplus_inplace, "As `softplus`, written into a.")
floor = _function("floor", lib.ggml_floor, "The largest integer not above a.")
floor_inplace = _function("floor_inplace", lib.ggml_floor_inplace, "As `floor`, written into a.")
ceil = _function("ceil", lib.ggml_ceil, "The smallest integer not below a.")
ceil_inplace = _function("ceil_inplace", lib.ggml_ceil_inplace, "As `ceil`, written into a.")
round = _function("round", lib.ggml_round, "The nearest integer, halves away from zero.")
round_inplace = _function("round_inplace", lib.ggml_round_inplace, "As `round`, written into a.")
trunc = _function("trunc", lib.ggml_trunc, "a without its fraction.")
trunc_inplace = _function("trunc_inplace", lib.ggml_trunc_inplace, "As `trunc`, written into a.")
sqr = _function("sqr", lib.ggml_sqr, "a squared.")
sqr_inplace = _function("sqr_inplace", lib.ggml_sqr_inplace, "As `sqr`, written into a.")
sqrt = _function("sqrt", lib.ggml_sqrt, "Square root.")
sqrt_inplace = _function("sqrt_inplace", lib.ggml_sqrt_inplace, "As `sqrt`, written into a.")
log = _function("log", lib.ggml_log, "Natural logarithm.")
log_inplace = _function("log_inplace", lib.ggml_log_inplace, "As `log`, written into a.")
sin = _function("sin", lib.ggml_sin, "Sine.")
sin_inplace = _function("sin_inplace", lib.ggml_sin_inplace, "As `sin`, written into a.")
cos = _function("cos", lib.ggml_cos, "Cosine.")
cos_inplace = _function("cos_inplace", lib.ggml_cos_inplace, "As `cos`, written into a.")


def _unary(name: str, function: Any, ctx: TensorArena, a: Tensor, op: str) -> Tensor:
    number = choice(name, "op", op, _UNARY)
    enter1(ctx, a)
    want_dtype(f"{name}({op})", "a", a, F32_F16 if op in _NO_BF16 else FLOAT)
    want_rows(f"{name}({op})", "a", a)
    return ctx._made(function(ctx._p, a._p, number))


def unary(ctx: TensorArena, a: Tensor, op: str) -> Tensor:
    """The function called `op` (`silu`, `relu`, ...). Raises: BindingError for an unknown name."""
    return _unary("unary", lib.ggml_unary, ctx, a, op)


def unary_inplace(ctx: TensorArena, a: Tensor, op: str) -> Tensor:
    """As `unary`, written into a."""
    return _unary("unary_inplace", lib.ggml_unary_inplace, ctx, a, op)


def leaky_relu(ctx: TensorArena, a: Tensor, negative_slope: float, inplace: bool) -> Tensor:
    """a where a > 0, else negative_slope * a; f32 or f16."""
    enter1(ctx, a)
    want_dtype("leaky_relu", "a", a, F32_F16)
    want_contiguous_1("leaky_relu", a)
    return ctx._made(lib.ggml_leaky_relu(ctx._p, a._p, negative_slope, inplace))


def xielu(ctx: TensorArena, a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Tensor:
    """xIELU with softplus-constrained `alpha_n` and `alpha_p`."""
    enter1(ctx, a)
    want_dtype("xielu", "a", a, FLOAT)
    want_contiguous_1("xielu", a)
    return ctx._made(lib.ggml_xielu(ctx._p, a._p, alpha_n, alpha_p, beta, eps))


def silu_back(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """Gradient of silu: a is that of the result, b what silu was given."""
    enter2(ctx, a, b)
    want_dtype("silu_back", "a", a, F32_F16)
    want_same_shape("silu_back", a, b)
    if a._type != b._type:
        raise DTypeError(
            f"silu_back: a is {show(a)}, b is {show(b)}: expected the same type", a=a.dtype, b=b.dtype
        )
    want_contiguous_1("silu_back", a)
    want_contiguous_1("silu_back", b)
    return ctx._made(lib.ggml_silu_back(ctx._p, a._p, b._p))


def _gate(name: str, function: Any, what: str) -> UnaryOp:
    def op(ctx: TensorArena, a: Tensor) -> Tensor:
        enter1(ctx, a)
        _check_halves(name, a)
        return ctx._made(function(ctx._p, a._p))

    op.__name__ = op.__qualname__ = name
    op.__doc__ = what
    return op


def _check_halves(name: str, a: Tensor) -> None:
    if a._type not in F32_F16:
        raise dtype_error(name, "a", a, F32_F16)
    if a.ne[0] % 2:
        raise shape_error(name, "rows must have an even number of elements", a=a)
    want_contiguous_1(name, a)


def _gate_split(name: str, function: Any, what: str) -> Callable[[TensorArena, Tensor, Tensor], Tensor]:
    def op(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
        enter2(ctx, a, b)
        _check_split(name, a, b, F32_F16)
        return ctx._made(function(ctx._p, a._p, b._p))

    op.__name__ = op.__qualname__ = name
    op.__doc__ = what
    return op


def _check_split(name: str, a: Tensor, b: Tensor, allowed: frozenset[int]) -> None:
    if a._type not in allowed:
        raise dtype_error(name, "a", a, allowed)
    if a.ne != b.ne:
        raise shape_error(name, "the shapes differ", a=a, b=b)
    if a._type != b._type:
        raise DTypeError(
            f"{name}: a is {show(a)}, b is {show(b)}: expected the same type", a=a.dtype, b=b.dtype
        )
    want_contiguous_1(name, a, b)


reglu = _gate("reglu", lib.ggml_reglu, "relu(first half of each row) * second half.")
reglu_swapped = _gate("reglu_swapped", lib.ggml_reglu_swapped, "First half * relu(second half).")
reglu_split = _gate_split("reglu_split", lib.ggml_reglu_split, "relu(a) * b.")
geglu = _gate("geglu", lib.ggml_geglu, "gelu(first half of each row) * second half.")
geglu_swapped = _gate("geglu_swapped", lib.ggml_geglu_swapped, "First half * gelu(second half).")
geglu_split = _gate_split("geglu_split", lib.ggml_geglu_split, "gelu(a) * b.")
swiglu = _gate("swiglu", lib.ggml_swiglu, "silu(first half of each row) * second half.")
swiglu_swapped = _gate("swiglu_swapped", lib.ggml_swiglu_swapped, "First half * silu(second half).")
swiglu_split = _gate_split("swiglu_split", lib.ggml_swiglu_split, "silu(a) * b.")
geglu_erf = _gate("geglu_erf", lib.ggml_geglu_erf, "gelu_erf(first half of each row) * second half.")
geglu_erf_swapped = _gate(
    "geglu_erf_swapped", lib.ggml_geglu_erf_swapped, "First half * gelu_erf(second half)."
)
geglu_erf_split = _gate_split("geglu_erf_split", lib.ggml_geglu_erf_split, "gelu_erf(a) * b.")
geglu_quick = _gate("geglu_quick", lib.ggml_geglu_quick, "gelu_quick(first half of each row) * second half.")
geglu_quick_swapped = _gate(
    "geglu_quick_swapped", lib.ggml_geglu_quick_swapped, "First half * gelu_quick(second)."
)
geglu_quick_split = _gate_split("geglu_quick_split", lib.ggml_geglu_quick_split, "gelu_quick(a) * b.")


def glu(ctx: TensorArena, a: Tensor, op: str, swapped: bool) -> Tensor:
    """The gate called `op` (`swiglu`, ...) on the halves of each row."""
    number = choice("glu", "op", op, _GLU)
    enter1(ctx, a)
    _check_halves(f"glu({op})", a)
    return ctx._made(lib.ggml_glu(ctx._p, a._p, number, swapped))


def glu_split(ctx: TensorArena, a: Tensor, b: Tensor, op: str) -> Tensor:
    """The gate called `op` with gate `a` and values `b`."""
    number = choice("glu_split", "op", op, _GLU)
    enter2(ctx, a, b)
    _check_split(f"glu_split({op})", a, b, F32_F16)
    return ctx._made(lib.ggml_glu_split(ctx._p, a._p, b._p, number))


def swiglu_oai(ctx: TensorArena, a: Tensor, b: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss' gate: g = min(a, limit), g * sigmoid(alpha g) * (clamp(b, -limit, limit) + 1); f32."""
    enter2(ctx, a, b)
    want_f32("swiglu_oai", a=a, b=b)
    _check_split("swiglu_oai", a, b, frozenset({F32}))
    return ctx._made(lib.ggml_swiglu_oai(ctx._p, a._p, b._p, alpha, limit))
