"""State-space layers: convolution over a rolling window, then a selective scan over a recurrent state.

Each layer reads its sequences' states from the recurrent memory and writes the new ones back behind `head`.
Upstream: models/mamba-base.cpp, build_mamba_layer, build_mamba2_layer.
"""

from __future__ import annotations

import dataclasses

from pyggmlkv.binding import Tensor, TensorArena, ops
from pyggmlkv.graph.blocks import Linear, Norm, linear, norm
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.inputs import RecurrentInput
from pyggmlkv.graph.recurrent import read_states


@dataclasses.dataclass(frozen=True, slots=True)
class Mamba:
    """Weights of a Mamba layer.

    `ssm_in` [n_embd, 2 * d_inner], `conv1d` [d_conv, d_inner], `x` [d_inner, dt_rank + 2 * d_state],
    `dt` [dt_rank, d_inner], `a` [d_state, d_inner], `d` [d_inner], `out` [d_inner, n_embd]; the norms of dt, B and C
    are there together or not at all.
    """

    ssm_in: Linear
    conv1d: Linear
    x: Linear
    dt: Linear
    a: Tensor
    d: Tensor
    out: Linear
    dt_norm: Norm | None = None
    b_norm: Norm | None = None
    c_norm: Norm | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Mamba2:
    """Weights of a Mamba-2 layer with n_head = dt_rank heads.

    `ssm_in` [n_embd, 2 * d_inner + 2 * n_group * d_state + n_head], `conv1d` [d_conv, d_inner + 2 * n_group * d_state],
    `dt_b` [n_head], `a` and `d` [1, n_head], `norm` [d_inner / n_group, n_group], `out` [d_inner, n_embd].
    """

    ssm_in: Linear
    conv1d: Linear
    dt_b: Tensor
    a: Tensor
    d: Tensor
    norm: Norm
    out: Linear


def mamba_layer(g: GraphBuilder, inp: RecurrentInput, w: Mamba, cur: Tensor, il: int) -> Tensor:
    """`cur` [n_embd, n_tokens] through a Mamba layer; same shape back.  Upstream: build_mamba_layer."""
    ctx, hp = g.ctx, g.hparams
    d_inner, d_state, dt_rank = hp.ssm_d_inner, hp.ssm_d_state, hp.ssm_dt_rank
    n_t, n_seqs = g.ubatch.n_seq_tokens, g.ubatch.n_seqs
    conv = read_window(g, inp, il, hp.ssm_d_conv - 1)
    cur = ops.reshape_3d(ctx, cur, cur.ne[0], n_t, n_seqs)
    xz = linear(g, w.ssm_in, cur)
    x, z = (ops.view_3d(ctx, xz, d_inner, n_t, n_seqs, *xz.nb[1:3], at * xz.nb[0]) for at in (0, d_inner))
    x = _convolved(g, inp, w.conv1d, (conv, x), il)

    x_db = linear(g, w.x, x)
    dt = ops.view_3d(ctx, x_db, dt_rank, n_t, n_seqs, *x_db.nb[1:3], 0)
    b, c = (
        ops.view_4d(ctx, x_db, d_state, 1, n_t, n_seqs, d_state * x_db.nb[0], *x_db.nb[1:3], at * x_db.nb[0])
        for at in (dt_rank, dt_rank + d_state)
    )
    if w.dt_norm is not None and w.b_norm is not None and w.c_norm is not None:
        dt, b, c = norm(g, dt, w.dt_norm, il), norm(g, b, w.b_norm, il), norm(g, c, w.c_norm, il)
    assert w.dt.bias is not None
    dt = ops.add(ctx, linear(g, w.dt, dt), w.dt.bias)
    heads = ops.reshape_4d(ctx, x, 1, d_inner, n_t, n_seqs)
    scanned = _scanned(g, inp, Scan(heads, dt, w.a, b, c), il)

    y = ops.view_3d(ctx, scanned, d_inner, n_t, n_seqs, *heads.nb[2:], 0)
    y = ops.add(ctx, y, ops.mul(ctx, x, w.d))
    y = ops.swiglu_split(ctx, ops.cont(ctx, z), y)
    cur = linear(g, w.out, y)
    return ops.reshape_2d(ctx, cur, cur.ne[0], n_t * n_seqs)


def mamba2_layer(g: GraphBuilder, inp: RecurrentInput, w: Mamba2, cur: Tensor, il: int) -> Tensor:
    """`cur` [n_embd, n_tokens] through a Mamba-2 layer; same shape back.  Upstream: build_mamba2_layer."""
    ctx, hp = g.ctx, g.hparams
    d_inner, d_state, n_group, n_head = hp.ssm_d_inner, hp.ssm_d_state, hp.ssm_n_group, hp.ssm_dt_rank
    head_dim, d_bc = d_inner // n_head, n_group * d_state
    n_t, n_seqs = g.ubatch.n_seq_tokens, g.ubatch.n_seqs
    conv = read_window(g, inp, il, hp.ssm_d_conv - 1)
    cur = ops.reshape_3d(ctx, cur, cur.ne[0], n_t, n_seqs)
    zxbcdt = linear(g, w.ssm_in, cur)

    def heads(t: Tensor, dim: int, n: int, at: int) -> Tensor:
        return ops.view_4d(ctx, t, dim, n, n_t, n_seqs, dim * t.nb[0], *t.nb[1:3], at * t.nb[0])

    z = heads(zxbcdt, head_dim, n_head, 0)
    xbc = ops.view_3d(ctx, zxbcdt, d_inner + 2 * d_bc, n_t, n_seqs, *zxbcdt.nb[1:3], d_inner * zxbcdt.nb[0])
    at_dt = (2 * d_inner + 2 * d_bc) * zxbcdt.nb[0]
    dt = ops.view_3d(ctx, zxbcdt, n_head, n_t, n_seqs, *zxbcdt.nb[1:3], at_dt)
    xbc = _convolved(g, inp, w.conv1d, (conv, xbc), il)

    x = heads(xbc, head_dim, n_head, 0)
    b, c = heads(xbc, d_state, n_group, d_inner), heads(xbc, d_state, n_group, d_inner + d_bc)
    dt = ops.add(ctx, ops.cont(ctx, dt), w.dt_b)
    scanned = _scanned(g, inp, Scan(x, dt, w.a, b, c), il)

    row = x.nb[1]
    y = ops.view_4d(ctx, scanned, head_dim, n_head, n_t, n_seqs, row, n_head * row, n_t * n_head * row, 0)
    y = g.name(ops.add(ctx, y, ops.mul(ctx, x, w.d)), "mamba2_y_add_d", il)
    y = ops.swiglu_split(ctx, ops.cont(ctx, z), y)
    y = norm(g, ops.reshape_4d(ctx, y, d_inner // n_group, n_group, n_t, n_seqs), w.norm, il)
    cur = linear(g, w.out, ops.reshape_3d(ctx, y, d_inner, n_t, n_seqs))
    return g.name(ops.reshape_2d(ctx, cur, cur.ne[0], n_t * n_seqs), "mamba_out", il)


def read_window(g: GraphBuilder, inp: RecurrentInput, il: int, n: int) -> Tensor:
    """The last `n` columns that each sequence's convolution has seen, [n, n_channels, n_seqs]."""
    conv = read_states(g, inp, inp.step.r(il))
    return ops.reshape_3d(g.ctx, conv, n, conv.ne[0] // n, g.ubatch.n_seqs)


def write_windows(g: GraphBuilder, inp: RecurrentInput, il: int, columns: Tensor, n: int) -> None:
    """Keep the last `n` of `columns` [n_columns, n_channels, n_seqs], and snapshots of a token earlier each.

    Plane j of the memory holds the window as it was j tokens before the newest, as many as this ubatch passes.
    """
    ctx, step = g.ctx, inp.step
    states = step.r(il)
    n_channels, n_seqs = columns.ne[1:3]
    for plane in range(_n_written(g)):
        first = (columns.ne[0] - n - plane) * columns.nb[0]
        window = ops.view_3d(ctx, columns, n, n_channels, n_seqs, *columns.nb[1:3], first)
        at = (plane * step.size + step.head) * states.nb[1]
        g.expand(ops.cpy(ctx, window, ops.view_2d(ctx, states, n * n_channels, n_seqs, states.nb[1], at)))


def _n_written(g: GraphBuilder) -> int:
    return min(g.ubatch.n_seq_tokens, 1 + g.cparams.n_rs_seq)


def _convolved(
    g: GraphBuilder, inp: RecurrentInput, w: Linear, seen: tuple[Tensor, Tensor], il: int
) -> Tensor:
    """SiLU of the causal convolution of (window before, new rows) [n_channels, n_seq_tokens, n_seqs]."""
    window, x = seen
    columns = ops.concat(g.ctx, window, ops.transpose(g.ctx, x), 0)
    write_windows(g, inp, il, columns, window.ne[0])
    assert w.bias is not None
    return ops.silu(g.ctx, ops.add(g.ctx, ops.ssm_conv(g.ctx, columns, w.weight), w.bias))


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """Operands of the selective scan: `x` [head_dim, n_head, n_seq_tokens, n_seqs] and what steers it."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor


def _scanned(g: GraphBuilder, inp: RecurrentInput, scan: Scan, il: int) -> Tensor:
    """The scan's outputs, the new states behind them, flat; the states are written back, snapshots included."""
    step, x = inp.step, scan.x
    states = step.s(il)
    d_state, n_seqs = g.hparams.ssm_d_state, g.ubatch.n_seqs

    def scan_rows(ctx: TensorArena, rows: Tensor, ids: Tensor) -> Tensor:
        s = ops.reshape_4d(ctx, rows, d_state, x.ne[0], x.ne[1], rows.ne[1])
        return ops.ssm_scan(ctx, s, x, scan.dt, scan.a, scan.b, scan.c, ids, 1 + g.cparams.n_rs_seq)

    y = read_states(g, inp, states, scan_rows)
    size, row, n = states.ne[0], states.nb[1], _n_written(g)
    new = ops.view_3d(g.ctx, y, size, n_seqs, n, row, row * n_seqs, x.n_elements * x.nb[0])
    to = ops.view_3d(g.ctx, states, size, n_seqs, n, row, step.size * row, step.head * row)
    g.expand(ops.cpy(g.ctx, new, to))
    return y
