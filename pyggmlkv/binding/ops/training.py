"""Losses and optimiser steps; f32. Upstream: ggml.c, ggml_cross_entropy_loss, ggml_opt_step_adamw,
ggml_opt_step_sgd.
"""

from __future__ import annotations

from pyggmlkv._ggml import lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.ops.checks import enter, enter2, shape_error, want_contiguous, want_f32, want_same_shape
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import BindingError, ShapeError


def cross_entropy_loss(ctx: TensorArena, a: Tensor, b: Tensor) -> Tensor:
    """Mean cross entropy of logits `a` against probabilities `b`: [n_classes, n_rows] -> [1]."""
    enter2(ctx, a, b)
    want_f32("cross_entropy_loss", a=a, b=b)
    want_same_shape("cross_entropy_loss", a, b)
    want_contiguous("cross_entropy_loss", a=a, b=b)
    return ctx._made(lib.ggml_cross_entropy_loss(ctx._p, a._p, b._p))


def cross_entropy_loss_back(ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Gradient of `cross_entropy_loss`: a [1] is that of the loss, b the logits, c the probabilities."""
    enter(ctx, 1, a, b, c)
    want_f32("cross_entropy_loss_back", a=a, b=b, c=c)
    if a.n_elements != 1:
        raise shape_error("cross_entropy_loss_back", "a must be one element", a=a)
    if b.ne != c.ne:
        raise shape_error("cross_entropy_loss_back", "the shapes of b and c differ", b=b, c=c)
    want_contiguous("cross_entropy_loss_back", a=a, b=b, c=c)
    return ctx._made(lib.ggml_cross_entropy_loss_back(ctx._p, a._p, b._p, c._p))


def _check_step(name: str, a: Tensor, like: dict[str, Tensor], params: Tensor, n_params: int) -> None:
    if not a._p.flags & lib.GGML_TENSOR_FLAG_PARAM:
        raise BindingError(f"{name}: {a!r} is not trainable; call set_param() on it first")
    want_f32(name, a=a, params=params, **like)
    for label, t in like.items():
        if t.ne != a.ne:
            raise shape_error(name, f"{label} must have the shape of a", a=a, **{label: t})
    if params.n_elements != n_params:
        raise ShapeError(
            f"{name}: expected {n_params} parameters, got {params.n_elements}", expected=n_params
        )
    want_contiguous(name, a=a, params=params, **like)


def opt_step_adamw(
    ctx: TensorArena, a: Tensor, grad: Tensor, m: Tensor, v: Tensor, adamw_params: Tensor
) -> Tensor:
    """One AdamW step on `a`, with moments `m`, `v`; adamw_params [7]: alpha, beta1, beta2, eps, wd, beta1h,
    beta2h.
    """
    enter(ctx, 1, a, grad, m, v, adamw_params)
    _check_step("opt_step_adamw", a, {"grad": grad, "m": m, "v": v}, adamw_params, 7)
    return ctx._made(lib.ggml_opt_step_adamw(ctx._p, a._p, grad._p, m._p, v._p, adamw_params._p))


def opt_step_sgd(ctx: TensorArena, a: Tensor, grad: Tensor, sgd_params: Tensor) -> Tensor:
    """One step of gradient descent on `a`; sgd_params [2]: alpha, weight decay."""
    enter(ctx, 1, a, grad, sgd_params)
    _check_step("opt_step_sgd", a, {"grad": grad}, sgd_params, 2)
    return ctx._made(lib.ggml_opt_step_sgd(ctx._p, a._p, grad._p, sgd_params._p))
