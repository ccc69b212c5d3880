"""From token embeddings to one row a sequence.  Upstream: llm_graph_context::build_pooling."""

from __future__ import annotations

from pyggmlkv.binding import ops
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.encoder_inputs import ClsInput, MeanInput


def pool(g: GraphBuilder) -> None:
    """Set `g.embd_pooled` [n_embd, n_seqs] from `g.embd` as the context asks; nothing for pooling "none"."""
    kind = g.cparams.pooling
    if not g.cparams.embeddings or kind == "none" or g.embd is None:
        return
    if kind == "mean":
        mean = MeanInput(g.ctx, g.ubatch)
        g.add_input(mean)
        rows = ops.cont(g.ctx, ops.transpose(g.ctx, g.embd))
        pooled = ops.mul_mat(g.ctx, rows, mean.tensor)
    else:
        cls = ClsInput(g.ctx, g.ubatch, last=kind == "last")
        g.add_input(cls)
        pooled = ops.get_rows(g.ctx, g.embd, cls.tensor)
    g.embd_pooled = g.expand(g.name(pooled, "result_embd_pooled"))
