"""One function for each ggml op: ggml's name without `ggml_`, ggml's argument order, the arena first.

Options are lower-case names. Types, shapes and strides are checked before ggml would abort; the result is
a new node of the arena. Upstream: ggml.h.
"""

# ruff: noqa: I001  (one line for many names)
# fmt: off

from __future__ import annotations

from pyggmlkv.binding.ops.arithmetic import (
    acc, acc_inplace, add, add1, add1_inplace, add_cast, add_id, add_inplace, clamp, div, div_inplace,
    mul, mul_inplace, scale, scale_bias, scale_bias_inplace, scale_inplace, set, set_1d, set_1d_inplace,
    set_2d, set_2d_inplace, set_inplace, sub, sub_inplace,
)
from pyggmlkv.binding.ops.attention import (
    flash_attn_back, flash_attn_ext, flash_attn_ext_add_sinks, flash_attn_ext_get_prec,
    flash_attn_ext_set_prec, lightning_indexer, soft_max, soft_max_add_sinks, soft_max_ext,
    soft_max_ext_back, soft_max_ext_back_inplace, soft_max_ext_inplace, soft_max_inplace,
)
from pyggmlkv.binding.ops.conv import (
    col2im_1d, conv_1d, conv_1d_dw, conv_1d_dw_ph, conv_1d_ph, conv_2d, conv_2d_direct, conv_2d_dw,
    conv_2d_dw_direct, conv_2d_s1_ph, conv_2d_sk_p0, conv_3d, conv_3d_direct, conv_transpose_1d,
    conv_transpose_2d_p0, im2col, im2col_3d, im2col_back,
)
from pyggmlkv.binding.ops.custom import (
    custom_4d, custom_inplace, map_custom1, map_custom1_inplace, map_custom2, map_custom2_inplace,
    map_custom3, map_custom3_inplace, pyggmlkv_custom, pyggmlkv_custom1, pyggmlkv_custom2,
    pyggmlkv_custom3,
)
from pyggmlkv.binding.ops.images import (
    add_rel_pos, add_rel_pos_inplace, get_rel_pos, interpolate, pad, pad_circular, pad_ext,
    pad_ext_circular, pad_reflect_1d, pool_1d, pool_2d, pool_2d_back, roll, upscale, upscale_ext,
    win_part, win_unpart,
)
from pyggmlkv.binding.ops.matmul import (
    mul_mat, mul_mat_id, mul_mat_set_hint, mul_mat_set_prec, out_prod, solve_tri,
)
from pyggmlkv.binding.ops.norm import (
    group_norm, group_norm_inplace, l2_norm, l2_norm_inplace, norm, norm_inplace, rms_norm,
    rms_norm_back, rms_norm_inplace,
)
from pyggmlkv.binding.ops.recurrent import (
    dsv4_hc_comb, dsv4_hc_post, dsv4_hc_pre, gated_delta_net, gated_linear_attn, rwkv_wkv6, rwkv_wkv7,
    ssm_conv, ssm_scan,
)
from pyggmlkv.binding.ops.reduce import (
    arange, argmax, argsort, argsort_top_k, count_equal, cumsum, fill, fill_inplace, mean, sum,
    sum_rows, timestep_embedding, top_k, tri,
)
from pyggmlkv.binding.ops.rope import (
    RopeParams, rope, rope_custom, rope_custom_inplace, rope_ext, rope_ext_back, rope_ext_inplace,
    rope_inplace, rope_multi, rope_multi_back, rope_multi_inplace, rope_yarn_corr_dims,
)
from pyggmlkv.binding.ops.rows import (
    concat, diag, diag_mask_inf, diag_mask_inf_inplace, diag_mask_zero, diag_mask_zero_inplace,
    get_rows, get_rows_back, repeat, repeat_4d, repeat_back, set_rows,
)
from pyggmlkv.binding.ops.training import (
    cross_entropy_loss, cross_entropy_loss_back, opt_step_adamw, opt_step_sgd,
)
from pyggmlkv.binding.ops.unary import (
    abs, abs_inplace, ceil, ceil_inplace, cos, cos_inplace, elu, elu_inplace, exp, exp_inplace, expm1,
    expm1_inplace, floor, floor_inplace, geglu, geglu_erf, geglu_erf_split, geglu_erf_swapped,
    geglu_quick, geglu_quick_split, geglu_quick_swapped, geglu_split, geglu_swapped, gelu, gelu_erf,
    gelu_erf_inplace, gelu_inplace, gelu_quick, gelu_quick_inplace, glu, glu_split, hardsigmoid,
    hardswish, leaky_relu, log, log_inplace, neg, neg_inplace, reglu, reglu_split, reglu_swapped, relu,
    relu_inplace, round, round_inplace, sgn, sgn_inplace, sigmoid, sigmoid_inplace, silu, silu_back,
    silu_inplace, sin, sin_inplace, softplus, softplus_inplace, sqr, sqr_inplace, sqrt, sqrt_inplace,
    step, step_inplace, swiglu, swiglu_oai, swiglu_split, swiglu_swapped, tanh, tanh_inplace, trunc,
    trunc_inplace, unary, unary_inplace, xielu,
)
from pyggmlkv.binding.ops.views import (
    cast, cont, cont_1d, cont_2d, cont_3d, cont_4d, cpy, dup, dup_inplace, permute, reshape, reshape_1d,
    reshape_2d, reshape_3d, reshape_4d, transpose, view_1d, view_2d, view_3d, view_4d, view_tensor,
)
__all__ = [
    "RopeParams", "abs", "abs_inplace", "acc", "acc_inplace", "add", "add1", "add1_inplace", "add_cast",
    "add_id", "add_inplace", "add_rel_pos", "add_rel_pos_inplace", "arange", "argmax", "argsort",
    "argsort_top_k", "cast", "ceil", "ceil_inplace", "clamp", "col2im_1d", "concat", "cont", "cont_1d",
    "cont_2d", "cont_3d", "cont_4d", "conv_1d", "conv_1d_dw", "conv_1d_dw_ph", "conv_1d_ph", "conv_2d",
    "conv_2d_direct", "conv_2d_dw", "conv_2d_dw_direct", "conv_2d_s1_ph", "conv_2d_sk_p0", "conv_3d",
    "conv_3d_direct", "conv_transpose_1d", "conv_transpose_2d_p0", "cos", "cos_inplace", "count_equal",
    "cpy", "cross_entropy_loss", "cross_entropy_loss_back", "cumsum", "custom_4d", "custom_inplace",
    "diag", "diag_mask_inf", "diag_mask_inf_inplace", "diag_mask_zero", "diag_mask_zero_inplace", "div",
    "div_inplace", "dsv4_hc_comb", "dsv4_hc_post", "dsv4_hc_pre", "dup", "dup_inplace", "elu",
    "elu_inplace", "exp", "exp_inplace", "expm1", "expm1_inplace", "fill", "fill_inplace",
    "flash_attn_back", "flash_attn_ext", "flash_attn_ext_add_sinks", "flash_attn_ext_get_prec",
    "flash_attn_ext_set_prec", "floor", "floor_inplace", "gated_delta_net", "gated_linear_attn",
    "geglu", "geglu_erf", "geglu_erf_split", "geglu_erf_swapped", "geglu_quick", "geglu_quick_split",
    "geglu_quick_swapped", "geglu_split", "geglu_swapped", "gelu", "gelu_erf", "gelu_erf_inplace",
    "gelu_inplace", "gelu_quick", "gelu_quick_inplace", "get_rel_pos", "get_rows", "get_rows_back",
    "glu", "glu_split", "group_norm", "group_norm_inplace", "hardsigmoid", "hardswish", "im2col",
    "im2col_3d", "im2col_back", "interpolate", "l2_norm", "l2_norm_inplace", "leaky_relu",
    "lightning_indexer", "log", "log_inplace", "map_custom1", "map_custom1_inplace", "map_custom2",
    "map_custom2_inplace", "map_custom3", "map_custom3_inplace", "mean", "mul", "mul_inplace",
    "mul_mat", "mul_mat_id", "mul_mat_set_hint", "mul_mat_set_prec", "neg", "neg_inplace", "norm",
    "norm_inplace", "opt_step_adamw", "opt_step_sgd", "out_prod", "pad", "pad_circular", "pad_ext",
    "pad_ext_circular", "pad_reflect_1d", "permute", "pool_1d", "pool_2d", "pool_2d_back",
    "pyggmlkv_custom", "pyggmlkv_custom1", "pyggmlkv_custom2", "pyggmlkv_custom3", "reglu",
    "reglu_split", "reglu_swapped", "relu", "relu_inplace", "repeat", "repeat_4d", "repeat_back",
    "reshape", "reshape_1d", "reshape_2d", "reshape_3d", "reshape_4d", "rms_norm", "rms_norm_back",
    "rms_norm_inplace", "roll", "rope", "rope_custom", "rope_custom_inplace", "rope_ext",
    "rope_ext_back", "rope_ext_inplace", "rope_inplace", "rope_multi", "rope_multi_back",
    "rope_multi_inplace", "rope_yarn_corr_dims", "round", "round_inplace", "rwkv_wkv6", "rwkv_wkv7",
    "scale", "scale_bias", "scale_bias_inplace", "scale_inplace", "set", "set_1d", "set_1d_inplace",
    "set_2d", "set_2d_inplace", "set_inplace", "set_rows", "sgn", "sgn_inplace", "sigmoid",
    "sigmoid_inplace", "silu", "silu_back", "silu_inplace", "sin", "sin_inplace", "soft_max",
    "soft_max_add_sinks", "soft_max_ext", "soft_max_ext_back", "soft_max_ext_back_inplace",
    "soft_max_ext_inplace", "soft_max_inplace", "softplus", "softplus_inplace", "solve_tri", "sqr",
    "sqr_inplace", "sqrt", "sqrt_inplace", "ssm_conv", "ssm_scan", "step", "step_inplace", "sub",
    "sub_inplace", "sum", "sum_rows", "swiglu", "swiglu_oai", "swiglu_split", "swiglu_swapped", "tanh",
    "tanh_inplace", "timestep_embedding", "top_k", "transpose", "tri", "trunc", "trunc_inplace",
    "unary", "unary_inplace", "upscale", "upscale_ext", "view_1d", "view_2d", "view_3d", "view_4d",
    "view_tensor", "win_part", "win_unpart", "xielu",
]
