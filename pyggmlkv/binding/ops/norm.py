"""Normalisation along rows or groups; f32. Upstream: ggml.c, ggml_norm, ggml_rms_norm, ggml_group_norm,
ggml_l2_norm.
"""

from __future__ import annotations

from typing import Any

from pyggmlkv._ggml import lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.dtypes import F32
from pyggmlkv.binding.ops.checks import (
    enter1,
    enter2,
    want_f32,
    want_not_negative,
    want_positive,
    want_rows,
    want_same_shape,
)
from pyggmlkv.binding.tensor import Tensor


def _check(name: str, ctx: TensorArena, a: Tensor, eps: float) -> None:
    enter1(ctx, a)
    if a._type != F32:
        want_f32(name, a=a)
    if a._p.nb[0] != 4:
        want_rows(name, "a", a)
    if not eps >= 0.0:
        want_not_negative(name, eps=eps)


def _norm(name: str, function: Any, ctx: TensorArena, a: Tensor, eps: float) -> Tensor:
    _check(name, ctx, a, eps)
    return ctx._made(function(ctx._p, a._p, eps))


def norm(ctx: TensorArena, a: Tensor, eps: float) -> Tensor:
    """(a - mean) / sqrt(variance + eps) of each row."""
    return _norm("norm", lib.ggml_norm, ctx, a, eps)


def norm_inplace(ctx: TensorArena, a: Tensor, eps: float) -> Tensor:
    """As `norm`, written into a."""
    return _norm("norm_inplace", lib.ggml_norm_inplace, ctx, a, eps)


def rms_norm(ctx: TensorArena, a: Tensor, eps: float) -> Tensor:
    """a / sqrt(mean(a^2) + eps) of each row."""
    _check("rms_norm", ctx, a, eps)
    return ctx._made(lib.ggml_rms_norm(ctx._p, a._p, eps))


def rms_norm_inplace(ctx: TensorArena, a: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, written into a."""
    return _norm("rms_norm_inplace", lib.ggml_rms_norm_inplace, ctx, a, eps)


def rms_norm_back(ctx: TensorArena, a: Tensor, b: Tensor, eps: float) -> Tensor:
    """Gradient of rms_norm: a is that of the result, b what rms_norm was given."""
    enter2(ctx, a, b)
    want_f32("rms_norm_back", a=a, b=b)
    want_same_shape("rms_norm_back", a, b)
    want_rows("rms_norm_back", "a", a)
    want_rows("rms_norm_back", "b", b)
    want_not_negative("rms_norm_back", eps=eps)
    return ctx._made(lib.ggml_rms_norm_back(ctx._p, a._p, b._p, eps))


def group_norm(ctx: TensorArena, a: Tensor, n_groups: int, eps: float) -> Tensor:
    """As `norm`, over `n_groups` groups of dimension 2."""
    _check("group_norm", ctx, a, eps)
    want_positive("group_norm", n_groups=n_groups)
    return ctx._made(lib.ggml_group_norm(ctx._p, a._p, n_groups, eps))


def group_norm_inplace(ctx: TensorArena, a: Tensor, n_groups: int, eps: float) -> Tensor:
    """As `group_norm`, written into a."""
    _check("group_norm_inplace", ctx, a, eps)
    want_positive("group_norm_inplace", n_groups=n_groups)
    return ctx._made(lib.ggml_group_norm_inplace(ctx._p, a._p, n_groups, eps))


def l2_norm(ctx: TensorArena, a: Tensor, eps: float) -> Tensor:
    """a / max(|a|, eps) of each row."""
    return _norm("l2_norm", lib.ggml_l2_norm, ctx, a, eps)


def l2_norm_inplace(ctx: TensorArena, a: Tensor, eps: float) -> Tensor:
    """As `l2_norm`, written into a."""
    return _norm("l2_norm_inplace", lib.ggml_l2_norm_inplace, ctx, a, eps)
