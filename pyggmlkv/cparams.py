"""The context's settled parameters: what was asked, with upstream's defaults and padding applied.

Knows hyperparameters only.  Upstream: llama_cparams and the first half of llama_context::llama_context.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypedDict, cast, get_args

import numpy as np

from pyggmlkv.errors import ParameterError
from pyggmlkv.gguf.hparams import ROLLBACK_ARCHS, HParams
from pyggmlkv.types import MAX_SEQ, FlashAttn

Pooling: TypeAlias = Literal["none", "mean", "cls", "last", "rank"]
RopeScaling: TypeAlias = Literal["none", "linear", "yarn", "longrope"]
Shift: TypeAlias = Literal["upstream", "pure"]
Forget: TypeAlias = Literal["reuse", "prune"]


@dataclasses.dataclass(frozen=True, slots=True)
class ContextParams:
    """What a caller may ask for; None takes the model's own or upstream's default. Counts are tokens or cells."""

    n_ctx: int | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int | None = None
    n_threads_batch: int | None = None
    flash_attn: FlashAttn = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    kv_unified: bool = False
    swa_full: bool = False
    swa_forget: Forget = "reuse"
    offload_kqv: bool = True
    op_offload: bool = True
    attn_rot: bool | None = None
    embeddings: bool = False
    pooling: Pooling | None = None
    causal_attn: bool | None = None
    rope_scaling: RopeScaling | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    shift: Shift = "upstream"
    n_rs_seq: int = 0
    graph_reuse: bool = True


class ContextKeywords(TypedDict, total=False):
    """The fields of `ContextParams` but `n_ctx` as keyword arguments."""

    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_threads: int | None
    n_threads_batch: int | None
    flash_attn: FlashAttn
    type_k: str
    type_v: str
    kv_unified: bool
    swa_full: bool
    swa_forget: Forget
    offload_kqv: bool
    op_offload: bool
    attn_rot: bool | None
    embeddings: bool
    pooling: Pooling | None
    causal_attn: bool | None
    rope_scaling: RopeScaling | None
    rope_freq_base: float | None
    rope_freq_scale: float | None
    yarn_orig_ctx: int | None
    yarn_ext_factor: float | None
    yarn_attn_factor: float | None
    yarn_beta_fast: float | None
    yarn_beta_slow: float | None
    shift: Shift
    n_rs_seq: int
    graph_reuse: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CParams:
    """Settled values that graphs and memory are built with. Names and meaning: llama_cparams."""

    n_ctx: int
    n_ctx_seq: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_ctx_orig_yarn: int
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    flash_attn: bool
    kv_unified: bool
    causal_attn: bool
    embeddings: bool
    offload_kqv: bool
    pooling: Pooling
    type_k: str = "f16"
    type_v: str = "f16"
    swa_full: bool = False
    swa_forget: Forget = "reuse"
    attn_rot: bool | None = None
    shift: Shift = "upstream"
    n_rs_seq: int = 0


CHOICES = {
    "flash_attn": FlashAttn,
    "pooling": Pooling,
    "rope_scaling": RopeScaling,
    "shift": Shift,
    "swa_forget": Forget,
}
FLAGS = ("kv_unified", "swa_full", "offload_kqv", "op_offload", "embeddings", "graph_reuse")
ABOVE_ZERO = ("rope_freq_base", "rope_freq_scale")
FACTORS = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
MAY_BE_NONE = frozenset(f.name for f in dataclasses.fields(ContextParams) if f.default is None)


def check(asked: ContextParams) -> None:
    """Refuse values that no context can have.

    Raises:
        ParameterError: names the parameter, what was given and what is expected.
    """
    counts = ("n_batch", "n_ubatch", "n_seq_max", "n_ctx", "n_threads", "n_threads_batch", "yarn_orig_ctx")
    for name in counts:
        _check(asked, name, _is_count, "a whole number from 1 to 2^31 - 1")
    if asked.n_seq_max > MAX_SEQ:
        raise ParameterError(f"n_seq_max={asked.n_seq_max}: at most {MAX_SEQ}", parameter="n_seq_max")
    _check(asked, "n_rs_seq", lambda n: n == 0 or _is_count(n), "0 or more snapshots")
    for name, choices in CHOICES.items():
        _check(asked, name, get_args(choices).__contains__, f"one of {', '.join(get_args(choices))}")
    for name in (*FLAGS, "attn_rot", "causal_attn"):
        _check(asked, name, lambda flag: isinstance(flag, bool | np.bool_), "True or False")
    for name in ABOVE_ZERO:
        _check(asked, name, lambda x: _is_finite(x) and x > 0, "a number above 0")
    for name in FACTORS:
        _check(asked, name, _is_finite, "a finite number")


def _check(asked: ContextParams, name: str, fits: Callable[[Any], bool], expected: str) -> None:
    value = getattr(asked, name)
    if value is None and name in MAY_BE_NONE:
        return
    if not fits(value):
        none = " (None is the default)" if name in MAY_BE_NONE else ""
        raise ParameterError(f"{name}={value!r}: expected {expected}{none}", parameter=name)


def _is_count(value: Any) -> bool:
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_whole and 1 <= int(value) < 2**31


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_number and bool(np.isfinite(value))


def signature() -> inspect.Signature:
    """What `Context` takes, with defaults, for `help` and editors: its keywords are the fields of `ContextParams`."""
    kind = inspect.Parameter.KEYWORD_ONLY
    fields = [
        inspect.Parameter(f.name, kind, default=f.default, annotation=f.type)
        for f in dataclasses.fields(ContextParams)
    ]
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    model = inspect.Parameter("model", either, annotation="Model")
    params = inspect.Parameter("params", kind, default=None, annotation="ContextParams | None")
    return inspect.Signature([model, fields[0].replace(kind=either), *fields[1:], params])


def cells_per_stream(n_ctx: int, n_streams: int) -> int:
    """Cells a stream for a context of `n_ctx`, rounded up to 256.

    Differs: a context of less than 256 cells stays as asked; upstream rounds it up too.
    """
    if n_ctx < 256:
        return max(1, n_ctx // n_streams)
    return -(-(-(-n_ctx // 256) * 256 // n_streams) // 256) * 256


def _f32(x: float) -> float:
    """`x` as C's `float` would hold it, so that products round as upstream's do."""
    return float(np.float32(x))


def _attn_factor(hp: HParams, ext_factor: float, asked: float, freq_scale: float) -> float:
    """The YaRN magnitude factor, with the one cancelled that the RoPE op applies by itself."""
    f32 = np.float32
    factor = f32(asked)
    if ext_factor != 0.0:
        scale = f32(1.0) / f32(freq_scale)

        def mscale(m: float) -> np.float32:
            return f32(1.0) if scale <= 1.0 else f32(f32(0.1) * f32(m) * f32(np.log(scale)) + f32(1.0))

        if hp.rope_yarn_log_mul != 0.0:
            all_dims = hp.rope_yarn_log_mul
            one = all_dims if hp.arch == "deepseek2" and all_dims != 1.0 else 1.0
            factor = f32(mscale(one) / mscale(all_dims))
        else:
            factor = mscale(1.0)
        factor = f32(factor * (f32(1.0) / (f32(1.0) + f32(0.1) * f32(np.log(scale)))))
    return float(f32(factor * f32(hp.rope_attn_factor)))


def _pooling(hp: HParams) -> Pooling:
    return "none" if hp.pooling_type == "unspecified" else cast(Pooling, hp.pooling_type)


def settle(asked: ContextParams, hp: HParams) -> CParams:
    """Apply defaults, scaling rules and padding in upstream's order."""

    def or_else(value: float | None, default: float) -> float:
        return default if value is None else value

    n_ctx = asked.n_ctx or hp.n_ctx_train
    freq_scale = _f32(or_else(asked.rope_freq_scale, hp.rope_freq_scale_train))
    scaling = asked.rope_scaling or hp.rope_scaling_type_train
    if scaling == "none":
        freq_scale = 1.0
    ext_factor = or_else(asked.yarn_ext_factor, hp.yarn_ext_factor)
    if ext_factor < 0.0:
        ext_factor = 1.0 if scaling == "yarn" else 0.0
    causal = hp.causal_attn if asked.causal_attn is None else asked.causal_attn
    n_batch = min(n_ctx, asked.n_batch) if causal else asked.n_batch
    n_ubatch = min(n_batch, asked.n_ubatch or asked.n_batch)
    n_streams = 1 if asked.kv_unified else asked.n_seq_max
    n_ctx_seq = cells_per_stream(n_ctx, n_streams)
    return CParams(
        n_ctx=n_ctx_seq * n_streams,
        n_ctx_seq=n_ctx_seq,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        n_seq_max=asked.n_seq_max,
        n_ctx_orig_yarn=asked.yarn_orig_ctx or hp.n_ctx_orig_yarn or hp.n_ctx_train,
        rope_freq_base=_f32(or_else(asked.rope_freq_base, hp.rope_freq_base_train)),
        rope_freq_scale=freq_scale,
        yarn_ext_factor=_f32(ext_factor),
        yarn_attn_factor=_attn_factor(
            hp, ext_factor, or_else(asked.yarn_attn_factor, hp.yarn_attn_factor), freq_scale
        ),
        yarn_beta_fast=_f32(or_else(asked.yarn_beta_fast, hp.yarn_beta_fast)),
        yarn_beta_slow=_f32(or_else(asked.yarn_beta_slow, hp.yarn_beta_slow)),
        flash_attn=asked.flash_attn != "off",
        kv_unified=asked.kv_unified,
        causal_attn=causal,
        embeddings=asked.embeddings,
        offload_kqv=asked.offload_kqv,
        pooling=asked.pooling or _pooling(hp),
        type_k=asked.type_k,
        type_v=asked.type_v,
        swa_full=asked.swa_full,
        swa_forget=asked.swa_forget,
        attn_rot=asked.attn_rot,
        shift=asked.shift,
        n_rs_seq=asked.n_rs_seq if hp.arch in ROLLBACK_ARCHS else 0,
    )
