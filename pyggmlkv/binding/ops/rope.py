"""Rotary position embedding: parameters and the ops. Upstream: ggml.c, ggml_rope_impl; ggml-cpu/ops.cpp,
rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.dtypes import F32, I32
from pyggmlkv.binding.ops.checks import F32_F16, dtype_error, enter, shape_error, want_i32, want_rows
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import BindingError, DTypeError, ShapeError

RopeMode = Literal["normal", "neox", "mrope", "imrope", "vision"]
_MODES: Mapping[str, int] = MappingProxyType(
    {
        "normal": lib.GGML_ROPE_TYPE_NORMAL,
        "neox": lib.GGML_ROPE_TYPE_NEOX,
        "mrope": lib.GGML_ROPE_TYPE_MROPE,
        "imrope": lib.GGML_ROPE_TYPE_IMROPE,
        "vision": lib.GGML_ROPE_TYPE_VISION,
    }
)


@dataclass(frozen=True)
class RopeParams:
    """How to rotate. `ext_factor` above 0 turns YaRN on; `sections` splits the pairs for the multi-position
    modes.

    Raises: BindingError for an unknown mode; ShapeError for odd or negative `n_dims` or missing sections.
    """

    n_dims: int
    mode: RopeMode = "normal"
    n_ctx_orig: int = 0
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    sections: tuple[int, int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise BindingError(f"RopeParams: mode must be one of {', '.join(_MODES)}, got {self.mode!r}")
        if self.n_dims < 0 or self.n_dims % 2:
            raise ShapeError(f"RopeParams: n_dims must be even, got {self.n_dims}", n_dims=self.n_dims)
        if self.sections is not None and (len(self.sections) != 4 or min(self.sections) < 0):
            raise ShapeError(f"RopeParams: sections must be 4 numbers of pairs, got {self.sections}")
        if self.is_multi and (self.sections is None or max(self.sections[:3]) == 0):
            raise ShapeError(f"RopeParams: mode {self.mode} needs sections, got {self.sections}")

    @property
    def is_multi(self) -> bool:
        """True for the modes with four positions a token."""
        return self.mode in ("mrope", "imrope", "vision")

    @cached_property
    def _tail(self) -> tuple[int | float, ...]:
        """What ggml takes after the tensors, without `n_dims` and sections."""
        return (
            _MODES[self.mode],
            self.n_ctx_orig,
            self.freq_base,
            self.freq_scale,
            self.ext_factor,
            self.attn_factor,
            self.beta_fast,
            self.beta_slow,
        )

    @cached_property
    def _sections(self) -> Any:
        return ffi.new("int[4]", self.sections or (0, 0, 0, 0))


def _check(name: str, ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor | None, params: RopeParams) -> None:
    enter(ctx, 1, a, b, c)
    ane = a.ne
    if a._type not in F32_F16:
        raise dtype_error(name, "a", a, F32_F16)
    if b._type != I32:
        want_i32(name, "b", b)
    n_pos = ane[2] * 4 if params.is_multi else ane[2]
    if b.ne != (n_pos, 1, 1, 1):
        raise shape_error(name, f"b must be [{n_pos}] positions for the {ane[2]} tokens of a", a=a, b=b)
    n_dims = params.n_dims
    if n_dims > ane[0]:
        raise shape_error(name, f"n_dims {n_dims} is more than the head's {ane[0]}", a=a, b=b)
    if params.mode == "vision" and n_dims * 2 != ane[0]:
        raise shape_error(name, f"vision mode needs n_dims of half the head's {ane[0]}, got {n_dims}", a=a)
    if params.is_multi and params.sections is not None and sum(params.sections) > ane[0]:
        raise shape_error(name, f"sections {params.sections} are more than the head's {ane[0]}", a=a)
    if c is not None:
        if c._type != F32:
            raise DTypeError(f"{name}: c (frequency factors) is {c.dtype}, expected f32", given=c.dtype)
        if c.ne[0] < n_dims // 2:
            raise shape_error(name, f"c must have n_dims/2 = {n_dims // 2} frequency factors", a=a, c=c)
    want_rows(name, "a", a)


def _one(
    name: str,
    function: Any,
    ctx: TensorArena,
    operands: tuple[Tensor, Tensor, Tensor | None],
    params: RopeParams,
) -> Tensor:
    a, b, c = operands
    if params.is_multi:
        raise BindingError(
            f"{name}: mode {params.mode} needs the op with sections, rope_multi", mode=params.mode
        )
    _check(name, ctx, a, b, c, params)
    return ctx._made(
        function(ctx._p, a._p, b._p, ffi.NULL if c is None else c._p, params.n_dims, *params._tail)
    )


def _multi(
    name: str,
    function: Any,
    ctx: TensorArena,
    operands: tuple[Tensor, Tensor, Tensor | None],
    params: RopeParams,
) -> Tensor:
    a, b, c = operands
    if not params.is_multi:
        raise BindingError(f"{name}: mode {params.mode} has no sections, use rope_ext", mode=params.mode)
    _check(name, ctx, a, b, c, params)
    factors = ffi.NULL if c is None else c._p
    return ctx._made(function(ctx._p, a._p, b._p, factors, params.n_dims, params._sections, *params._tail))


def rope(ctx: TensorArena, a: Tensor, b: Tensor, n_dims: int, mode: RopeMode) -> Tensor:
    """`rope_ext` with base 10000 and no scaling."""
    return _one("rope", lib.ggml_rope_ext, ctx, (a, b, None), _plain(n_dims, mode))


def rope_inplace(ctx: TensorArena, a: Tensor, b: Tensor, n_dims: int, mode: RopeMode) -> Tensor:
    """As `rope`, written into a."""
    return _one("rope_inplace", lib.ggml_rope_ext_inplace, ctx, (a, b, None), _plain(n_dims, mode))


def _plain(n_dims: int, mode: RopeMode) -> RopeParams:
    return RopeParams(n_dims, mode, beta_fast=0.0, beta_slow=0.0)


def rope_ext(ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor | None, params: RopeParams) -> Tensor:
    """Rotate the first `n_dims` of each head: a [head_dim, n_head, n_tokens] f32 or f16, b [n_tokens] i32, c
    factors.
    """
    return _one("rope_ext", lib.ggml_rope_ext, ctx, (a, b, c), params)


def rope_ext_inplace(ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor | None, params: RopeParams) -> Tensor:
    """As `rope_ext`, written into a."""
    return _one("rope_ext_inplace", lib.ggml_rope_ext_inplace, ctx, (a, b, c), params)


def rope_ext_back(ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor | None, params: RopeParams) -> Tensor:
    """Gradient of `rope_ext`: rotate back."""
    return _one("rope_ext_back", lib.ggml_rope_ext_back, ctx, (a, b, c), params)


def rope_multi(ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor | None, params: RopeParams) -> Tensor:
    """As `rope_ext` with four positions a token: b [4 * n_tokens] i32, all of the first kind first."""
    return _multi("rope_multi", lib.ggml_rope_multi, ctx, (a, b, c), params)


def rope_multi_inplace(
    ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor | None, params: RopeParams
) -> Tensor:
    """As `rope_multi`, written into a."""
    return _multi("rope_multi_inplace", lib.ggml_rope_multi_inplace, ctx, (a, b, c), params)


def rope_multi_back(ctx: TensorArena, a: Tensor, b: Tensor, c: Tensor | None, params: RopeParams) -> Tensor:
    """Gradient of `rope_multi`."""
    return _multi("rope_multi_back", lib.ggml_rope_multi_back, ctx, (a, b, c), params)


def rope_custom(ctx: TensorArena, a: Tensor, b: Tensor, params: RopeParams) -> Tensor:
    """`rope_ext` without frequency factors. Upstream prefers `rope_ext`."""
    return _one("rope_custom", lib.ggml_rope_ext, ctx, (a, b, None), params)


def rope_custom_inplace(ctx: TensorArena, a: Tensor, b: Tensor, params: RopeParams) -> Tensor:
    """As `rope_custom`, written into a."""
    return _one("rope_custom_inplace", lib.ggml_rope_ext_inplace, ctx, (a, b, None), params)


def rope_yarn_corr_dims(params: RopeParams) -> tuple[float, float]:
    """First and last dimension pair that YaRN blends."""
    dims = ffi.new("float[2]")
    lib.ggml_rope_yarn_corr_dims(
        params.n_dims, params.n_ctx_orig, params.freq_base, params.beta_fast, params.beta_slow, dims
    )
    return dims[0], dims[1]
