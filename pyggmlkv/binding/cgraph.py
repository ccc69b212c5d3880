"""A compute graph: nodes in the order they run. Its memory is the arena's; room is checked before ggml would
abort.

Does not know where it will run. Upstream: ggml.h, ggml_cgraph, ggml_build_forward_expand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyggmlkv._ggml import ffi, lib
from pyggmlkv.binding.arena import TENSOR_OVERHEAD, TensorArena, address
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import ArenaFullError, BindingError, ShapeError

_DEEP = 16384  # graphs beyond this many tensors are expanded node by node: upstream recurses once a level


class ComputeGraph:
    """A graph with room for `size` nodes and as many leafs, in arena `ctx`; it lives and dies with the
    arena's tensors.

    Raises: ShapeError; ArenaFullError if the arena was made with too few `graph_nodes`.
    """

    __slots__ = ("_live", "_p", "arena", "checked", "size")

    def __init__(self, ctx: TensorArena, size: int = 2048) -> None:
        pointer = ctx._pointer
        if not 0 < size < 2**28:
            raise ShapeError(f"ComputeGraph: size must be positive, got {size}", size=size)
        needed = int(lib.ggml_graph_overhead_custom(size, False))
        if needed > ctx._graph_room:
            slots = -(-(needed - ctx._graph_room) // TENSOR_OVERHEAD)
            if slots > ctx._room:
                raise ArenaFullError(
                    f"a graph of {size} nodes needs {needed} bytes, this arena keeps {ctx._graph_room}; "
                    f"make it with graph_nodes={size}",
                    needed=needed,
                )
            ctx._room -= slots
            ctx._graph_room += slots * TENSOR_OVERHEAD
        ctx._graph_room -= needed
        self.arena = ctx
        self.size = size
        self._p = lib.ggml_new_graph_custom(pointer, size, False)
        self._live = ctx._live
        self.checked: set[int] = set()
        """Ids of the schedulers that looked through this graph already (see scheduler.py)."""

    @property
    def _pointer(self) -> Any:
        if not self._live:
            raise self.arena._stale()
        return self._p

    def build_forward_expand(self, tensor: Tensor) -> None:
        """Add `tensor` and everything it needs that is not in the graph yet.

        Raises: ArenaFullError if they would be more than `size`; ClosedError.
        """
        pointer = self._pointer
        tensor._pointer  # noqa: B018  (raises if stale)
        arena = self.arena
        if tensor._live is not arena._live:
            arena._adopt(tensor)
        self.checked.clear()
        bound = _n_headers(arena, set())
        if bound > self.size or bound > _DEEP:
            self._expand_checked(tensor)
        else:
            lib.ggml_build_forward_expand(pointer, tensor._p)

    def build_forward_select(self, tensors: Sequence[Tensor], index: int) -> Tensor:
        """Add all of `tensors`, of which only number `index` is computed; returns that one.

        For graphs of constant topology that compute different things. Raises: as `build_forward_expand`;
        ShapeError.
        """
        if not 0 <= index < len(tensors):
            raise ShapeError(f"build_forward_select: index {index} of {len(tensors)} tensors", index=index)
        self._want_room_for_all(tensors)
        operands = ffi.new("struct ggml_tensor *[]", [t._p for t in tensors])
        lib.ggml_build_forward_select(self._p, operands, len(tensors), index)
        return tensors[index]

    def build_forward_order(self, tensor: Tensor) -> None:
        """Add `tensor` and what it needs, computed only if a node that is computed needs them."""
        self._want_room_for_all([tensor])
        lib.ggml_build_forward_order(self._p, tensor._p)

    def _want_room_for_all(self, tensors: Sequence[Tensor]) -> None:
        self._pointer  # noqa: B018  (raises if stale)
        self.arena._adopt(*tensors)
        self.checked.clear()
        bound = _n_headers(self.arena, set())
        if bound > self.size:
            raise ArenaFullError(
                f"this graph has room for {self.size} nodes, its arenas hold {bound} tensors: make it larger",
                size=self.size,
                needed=bound,
            )

    def _expand_checked(self, tensor: Tensor) -> None:
        """Count first, then add in post-order, so that upstream's recursion stays shallow."""
        pointer = self._p
        nodes = lib.ggml_graph_nodes(pointer)
        n_nodes = lib.ggml_graph_n_nodes(pointer)
        known = {address(nodes[i]) for i in range(n_nodes)}
        leafs: set[int] = set()
        for i in range(n_nodes):
            leafs.update(address(s) for s in nodes[i].src if s != ffi.NULL and address(s) not in known)
        order: list[Any] = []
        stack: list[tuple[Any, bool]] = [(tensor._p, False)]
        while stack:
            current, done = stack.pop()
            if done:
                order.append(current)
                continue
            where = address(current)
            if where in known or where in leafs:
                continue
            if current.op == lib.GGML_OP_NONE and not current.flags & lib.GGML_TENSOR_FLAG_PARAM:
                leafs.add(where)
                if current == tensor._p:
                    order.append(current)
                continue
            known.add(where)
            stack.append((current, True))
            stack.extend((s, False) for s in reversed(list(current.src)) if s != ffi.NULL)
        if len(known) > self.size or len(leafs) > self.size:
            raise ArenaFullError(
                f"this graph has room for {self.size} nodes and as many leafs; {len(known)} nodes and "
                f"{len(leafs)} leafs are needed: make it larger",
                size=self.size,
                nodes=len(known),
                leafs=len(leafs),
            )
        for node in order:
            lib.ggml_build_forward_expand(pointer, node)

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return int(lib.ggml_graph_n_nodes(self._pointer))

    def node(self, i: int) -> Tensor:
        """Node `i`; negative counts from the end. Raises: ShapeError out of range."""
        n = self.n_nodes
        if not -n <= i < n:
            raise ShapeError(f"node {i} of a graph of {n} nodes", i=i, n_nodes=n)
        return self.arena._wrap(lib.ggml_graph_node(self._p, i))

    @property
    def nodes(self) -> list[Tensor]:
        """All nodes in the order they run."""
        return [self.node(i) for i in range(self.n_nodes)]

    @property
    def leafs(self) -> list[Tensor]:
        """Operands that no node makes: inputs, weights, caches; in the order they are first needed."""
        nodes = self.nodes
        seen = set(nodes)
        found: list[Tensor] = []
        for node in nodes:
            for source in node.src:
                if source not in seen:
                    seen.add(source)
                    found.append(source)
        return found

    def n_tensors(self, enough: int) -> int:
        """Nodes and leafs together, or a cheap upper bound if that is at most `enough`."""
        bound = _n_headers(self.arena, set())
        return bound if bound <= enough else self.n_nodes + len(self.leafs)

    def tensor(self, name: str) -> Tensor:
        """The node or leaf called `name`. Raises: BindingError if there is none."""
        found = lib.ggml_graph_get_tensor(self._pointer, name.encode())
        if found == ffi.NULL:
            raise BindingError(f"this graph has no tensor called {name!r}", name=name)
        return self.arena._wrap(found)

    def clear(self) -> None:
        """Remove all nodes; the tensors stay."""
        lib.ggml_graph_clear(self._pointer)
        self.checked.clear()

    def __len__(self) -> int:
        return self.n_nodes

    def __repr__(self) -> str:
        if not self._live:
            return "<ComputeGraph of a closed or reset arena>"
        return f"<ComputeGraph {self.n_nodes} of {self.size} nodes>"


def _n_headers(arena: TensorArena, seen: set[int]) -> int:
    """Upper bound of the tensors that a graph in `arena` can reach."""
    seen.add(id(arena))
    n = arena._capacity[0] - arena._room
    for other in arena._foreign:
        if id(other) not in seen:
            n += _n_headers(other, seen)
    return n
