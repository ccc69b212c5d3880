"""One built graph, kept as long as the next step has its shape; such a step only fills inputs.

The key holds everything a graph's topology depends on; what may differ between two steps of one key is an input.
Upstream: llm_graph_result::can_reuse, llama_context::process_ubatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from pyggmlkv.backend.runner import Runner
from pyggmlkv.binding import ComputeGraph, Tensor, TensorArena
from pyggmlkv.graph.builder import GraphBuilder, GraphParams
from pyggmlkv.graph.inputs import GraphInput

Build = Callable[[GraphBuilder], None]


def graph_key(params: GraphParams) -> Hashable:
    """Equal keys: same topology, same shapes, same view offsets."""
    u = params.ubatch
    return (
        (u.n_tokens, u.n_seq_tokens, u.n_seqs, u.n_seqs_unq, u.equal_seqs, u.token is None, u.n_pos),
        u.seq_id_unq.tobytes() if u.equal_seqs else b"",
        params.n_outputs,
        params.gtype,
        params.cparams,
        params.cross,
        None if params.step is None else params.step.key,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltGraph:
    """A graph with its inputs and outputs."""

    graph: ComputeGraph
    inputs: tuple[GraphInput, ...]
    logits: Tensor | None
    embd: Tensor | None
    embd_pooled: Tensor | None
    fused: tuple[tuple[str, Tensor, int], ...]

    def fill(self, params: GraphParams) -> None:
        """Write every input for this step."""
        for inp in self.inputs:
            inp.fill(params.ubatch, params.step)


class GraphCache:
    """Builds graphs in one arena and keeps the last. `n_built` and `n_reused` count steps."""

    def __init__(self, runner: Runner, build: Build, max_nodes: int, *, reuse: bool = True) -> None:
        self._runner = runner
        self._build = build
        self._max_nodes = max_nodes
        self._arena = TensorArena(max_nodes, graph_nodes=max_nodes)
        self._key: Hashable = None
        self._last: BuiltGraph | None = None
        self.reuse = reuse
        self.n_built = 0
        self.n_reused = 0

    def build(self, params: GraphParams) -> BuiltGraph:
        """Build without allocating: for reserving buffers. Forgets the kept graph."""
        self._key = self._last = None
        self._runner.forget()
        self._arena.reset()
        g = GraphBuilder(self._arena, self._max_nodes, params)
        self._build(g)
        g.set_outputs()
        return BuiltGraph(g.graph, tuple(g.inputs), g.logits, g.embd, g.embd_pooled, tuple(g.fused))

    def get(self, params: GraphParams) -> BuiltGraph:
        """The kept graph if it fits and is still allocated, else a new one, allocated."""
        key = graph_key(params)
        last = self._last
        if self.reuse and last is not None and key == self._key and self._runner.is_allocated(last.graph):
            self.n_reused += 1
            return last
        built = self.build(params)
        self._runner.alloc(built.graph)
        self._key, self._last = key, built
        self.n_built += 1
        return built

    def close(self) -> None:
        self._key = self._last = None
        self._arena.close()
