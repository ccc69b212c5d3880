"""Row numbers that a graph takes as data: out of range, ggml would end the process in the middle of a run.

Finds the operands once a graph is allocated and looks at their values before each run. Ids that a node computes, or
that lie on a device, are not seen.  Upstream: the assertions of get_rows, set_rows, mul_mat_id and add_id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding import arrays
from pyggmlkv.binding.arena import address
from pyggmlkv.binding.cgraph import ComputeGraph
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import RowIndexError


class RowIds(NamedTuple):
    """Ids given as data, how many rows there are to choose from, and a node that uses them."""

    ids: Tensor
    n_rows: int
    node: Tensor


def row_ids_of(graph: ComputeGraph) -> tuple[RowIds, ...]:
    """Every operand of row ids that is an input in host memory; where several nodes share one, the strictest."""
    nodes = lib.ggml_graph_nodes(graph._pointer)
    strictest: dict[int, tuple[int, Any, Any]] = {}
    for i in range(graph.n_nodes):
        node = nodes[i]
        found = _operand(node)
        if found is None:
            continue
        ids, n_rows = found
        root = ids if ids.view_src == ffi.NULL else ids.view_src
        if root.op != lib.GGML_OP_NONE or not _in_host_memory(root):
            continue
        where = address(ids)
        if where not in strictest or n_rows < strictest[where][0]:
            strictest[where] = (n_rows, ids, node)
    wrap = graph.arena._wrap
    return tuple(RowIds(wrap(ids), n_rows, wrap(node)) for n_rows, ids, node in strictest.values())


def _in_host_memory(tensor: Any) -> bool:
    if tensor.data == ffi.NULL:
        return False
    return bool(tensor.buffer == ffi.NULL or lib.ggml_backend_buffer_is_host(tensor.buffer))


def _operand(node: Any) -> tuple[Any, int] | None:
    """The ids that a node reads, and the number of rows they choose from."""
    op, src = node.op, node.src
    if op == lib.GGML_OP_GET_ROWS:
        return src[1], int(src[0].ne[1])
    if op == lib.GGML_OP_SET_ROWS:
        return src[1], int(node.ne[1])
    if op == lib.GGML_OP_MUL_MAT_ID:
        return src[2], int(src[0].ne[2])
    if op == lib.GGML_OP_ADD_ID:
        return src[2], int(src[1].ne[1])
    return None


def check_row_ids(operands: tuple[RowIds, ...]) -> None:
    """Look at every id.  Raises: RowIndexError; nothing has run."""
    for ids, n_rows, node in operands:
        values = arrays.view(ids).reshape(-1)
        wrong = values[(values < 0) | (values >= n_rows)]
        if wrong.size:
            raise RowIndexError(
                f"{node!r}: row ids {wrong[:4].tolist()} given, 0 to {n_rows - 1} expected; nothing was run",
                ids=wrong.tolist(),
                n_rows=n_rows,
                node=node.name,
            )
