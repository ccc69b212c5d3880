"""From token embeddings to one row a sequence.  Upstream: llm_graph_context::build_pooling."""

from __future__ import annotations

from pyggmlkv.binding import ops
from pyggmlkv.errors import ParameterError
from pyggmlkv.graph.builder import GraphBuilder
from pyggmlkv.graph.encoder_inputs import ClsInput, MeanInput


def pool(g: GraphBuilder) -> None:
    """Set `g.embd_pooled` [n_embd, n_seqs] from `g.embd` as the context asks; nothing for pooling "none".

    Every token of the ubatch must be an output.

    Raises:
        ParameterError: pooling "rank", which needs a classification head that no architecture here has.
    """
    kind = g.cparams.pooling
    if not g.cparams.embeddings or g.embd is None:
        return
    if kind == "none":
        g.expand(g.name(g.embd, "result_embd_pooled"))
        return
    if kind == "rank":
        raise ParameterError(
            f"pooling='rank': a {g.hparams.arch} model has no classification head; use none, mean, cls or last",
            parameter="pooling",
        )
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
