"""A context decodes batches: split -> plan / apply -> build -> run, and state may be saved between any two steps.

It ties a model, a memory and a runner together and owns the last two; each stage is somewhere else.
Upstream: llama_context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self, Unpack

import numpy as np

from pyggmlkv.backend.runner import Runner, Threads, default_threads
from pyggmlkv.batch.allocator import BatchAllocator
from pyggmlkv.batch.batch import Batch
from pyggmlkv.batch.prepare import BatchLimits
from pyggmlkv.batch.ubatch import UBatch
from pyggmlkv.binding import Tensor
from pyggmlkv.cparams import ContextKeywords, ContextParams, CParams, check, settle, signature
from pyggmlkv.errors import BatchError, ClosedError
from pyggmlkv.graph.builder import GraphParams
from pyggmlkv.graph.cross import Cross
from pyggmlkv.graph.reuse import BuiltGraph, GraphCache
from pyggmlkv.memory.create import MemoryObject, create_memory
from pyggmlkv.memory.protocol import Step
from pyggmlkv.memory.site import Site
from pyggmlkv.model import Model
from pyggmlkv.outputs import Rows, sequence_rows
from pyggmlkv.state.files import PathLike, load_file, save_file
from pyggmlkv.state.layouts import LayoutName
from pyggmlkv.state.live import Live
from pyggmlkv.state.reader import load_bytes
from pyggmlkv.state.sidecar import Fingerprint, fingerprint, model_hash
from pyggmlkv.state.writer import save_bytes
from pyggmlkv.types import F32, MAX_SEQ


class Context:
    """Decodes with `model`. Keyword arguments are the fields of `ContextParams`; `params` gives them all at once.

    `n_ctx` counts cells and is rounded up to a multiple of 256 from 256 on.

    Raises:
        ParameterError: names the setting that is out of range.
        CacheError: element types or sizes that no cache can have.
        DeviceMemoryError: no room.
    """

    __signature__ = signature()

    def __init__(
        self,
        model: Model,
        n_ctx: int | None = None,
        *,
        params: ContextParams | None = None,
        **asked: Unpack[ContextKeywords],
    ) -> None:
        model.check_open()
        asked_params = dataclasses.replace(params or ContextParams(), **asked)
        if n_ctx is not None:
            asked_params = dataclasses.replace(asked_params, n_ctx=n_ctx)
        check(asked_params)
        self.model = model
        self.params = asked_params
        hp = model.hparams
        self.cparams: CParams = settle(asked_params, hp)
        n = asked_params.n_threads or default_threads()
        threads = Threads(n, asked_params.n_threads_batch or n)
        max_nodes = max(1024, 8 * len(model.tensors))
        self._runner = Runner(model.placement.devices, threads, max_nodes, asked_params.op_offload)
        self._closed = False
        self._memory: MemoryObject | None = None
        self._graphs: GraphCache | None = None
        self._cross: Cross | None = None
        try:
            self._graphs = GraphCache(self._runner, model.build, max_nodes, reuse=asked_params.graph_reuse)
            self._resolve_flash_attn(asked_params)
            self._memory = self._create_memory()
            self._reserve()
        except BaseException:
            self.close()
            raise
        self._allocator = BatchAllocator(hp.n_pos_per_embd)
        self._limits = BatchLimits(
            n_vocab=hp.n_vocab,
            n_embd=hp.n_embd_inp,
            n_seq_max=MAX_SEQ if self.cparams.kv_unified else self.cparams.n_seq_max,
            n_batch=self.cparams.n_batch,
            output_all=self.cparams.embeddings,
        )
        self._logits: F32 = np.zeros((0, hp.n_vocab), np.float32)
        self._embeddings: F32 = np.zeros((0, hp.n_embd_out), np.float32)
        self._embeddings_seq: dict[int, F32] = {}

    # decode: the sentence, top to bottom

    def decode(self, batch: Batch) -> None:
        """Run `batch` through the model; `logits` and `embeddings` hold its outputs afterwards.

        Raises:
            BatchError, NoSlotError: refused; memory is as it was.
            KeyboardInterrupt, ComputeError: finished ubatches stay in memory, the interrupted one does not.
        """
        memory, graphs = self._opened()
        if memory is None:
            return self.encode(batch)
        self._check_decode(batch)
        self._allocator.init(batch, self._limits, memory)
        plan = memory.plan(self._allocator, self.cparams.n_ubatch, self.cparams.embeddings)
        if memory.update():  # cells may have moved
            plan = memory.plan(self._allocator, self.cparams.n_ubatch, self.cparams.embeddings)
        logits, embd, pooled = Rows(), Rows(), dict[int, F32]()
        for step in plan:
            step.apply()
            computed = False
            try:
                params = self._graph_params(step.ubatch, step, step.ubatch.n_outputs)
                built = graphs.get(params)
                built.fill(params)
                computed = True
                self._runner.compute(built.graph, batched=step.ubatch.n_tokens > 1, check_ids=False)
            except BaseException:
                step.undo(computed)
                raise
            step.commit()
            self._take(built, step.ubatch, (logits, embd, pooled))
        order = self._allocator.output_rows
        in_order = None if (order == np.arange(len(order))).all() else order
        self._logits = logits.gathered(in_order, self.model.hparams.n_vocab)
        self._embeddings = embd.gathered(in_order, self.model.hparams.n_embd_out)
        self._embeddings_seq = pooled

    def encode(self, batch: Batch) -> None:
        """Run `batch` through the encoder, or through a model without memory, in one step.

        `embeddings` holds the result; an encoder-decoder model's next `decode` attends to it.

        Raises:
            BatchError: refused, or longer than `n_ubatch` tokens: tokens attend to each other both ways.
        """
        _, graphs = self._opened()
        if self._memory is not None and not self.model.has_encoder:
            raise BatchError(f"encode: {self.model.arch} has no encoder; decode the batch instead")
        limits = dataclasses.replace(self._limits, output_all=True, n_batch=self.cparams.n_ubatch)
        self._allocator.init(batch, limits, None)
        ubatch = self._allocator.split_simple(self._allocator.n_tokens)
        assert ubatch is not None
        cparams = dataclasses.replace(self.cparams, causal_attn=False)
        params = self._graph_params(ubatch, None, ubatch.n_tokens)
        params = dataclasses.replace(params, cparams=cparams, gtype="encoder", cross=None)
        built = graphs.get(params)
        built.fill(params)
        self._runner.compute(built.graph, batched=ubatch.n_tokens > 1)
        embd = built.embd_pooled if built.embd_pooled is not None else built.embd
        rows = np.zeros((0, self.model.hparams.n_embd_out), np.float32) if embd is None else embd.to_numpy()
        self._embeddings = rows.reshape(-1, rows.shape[-1])
        self._embeddings_seq = (
            {} if built.embd_pooled is None else sequence_rows(built.embd_pooled, ubatch.seq_id_unq)
        )
        logits = Rows()
        if built.logits is not None:
            logits.take(built.logits)
        self._logits = logits.gathered(None, self.model.hparams.n_vocab)
        if self.model.has_encoder and self._memory is not None:
            self._cross = Cross(
                self._embeddings.shape[1], len(self._embeddings), self._embeddings, ubatch.seq_mask
            )

    def _check_decode(self, batch: Batch) -> None:
        if self.model.has_encoder and self._cross is None:
            raise BatchError(
                f"{self.model.arch} attends to an encoded text: call encode(batch) before decode"
            )
        if not self.cparams.causal_attn and len(batch) > self.cparams.n_ubatch:
            raise BatchError(
                f"{len(batch)} tokens with non-causal attention, at most n_ubatch={self.cparams.n_ubatch}: they attend "
                "to each other both ways and cannot be split",
                n_tokens=len(batch),
            )

    def _take(self, built: BuiltGraph, ubatch: UBatch, into: tuple[Rows, Rows, dict[int, F32]]) -> None:
        logits, embd, pooled = into
        if ubatch.n_outputs == 0:
            return
        if built.logits is not None:
            logits.take(built.logits)
        if self.cparams.embeddings:
            if built.embd_pooled is not None:
                pooled.update(sequence_rows(built.embd_pooled, ubatch.seq_id_unq))
            elif built.embd is not None:
                embd.take(built.embd)

    def _graph_params(self, ubatch: UBatch, step: Step | None, n_outputs: int) -> GraphParams:
        return GraphParams(
            hparams=self.model.hparams,
            cparams=self.cparams,
            ubatch=ubatch,
            step=step,
            n_outputs=n_outputs,
            cross=self._cross_or_worst(),
            place=self._place if self.model.placement.devices else None,
            place_on_cpu=lambda t: self._runner.place(t, self.model.placement.cpu),
        )

    def _cross_or_worst(self) -> Cross | None:
        if not self.model.has_encoder:
            return None
        hp = self.model.hparams
        return self._cross or Cross(hp.n_embd_inp, hp.n_ctx_train)

    def _place(self, tensor: Tensor, name: str, il: int, n_tokens: int) -> None:
        """Keep small norms on their layer's device.  Upstream: llama_context::graph_get_cb."""
        placement = self.model.placement
        full_offload = placement.n_gpu_layers > self.model.hparams.n_layer_all
        if il >= 0 and name == "norm" and (n_tokens < 32 or full_offload):
            self._runner.place(tensor, placement.layer_devices[il])

    # results

    @property
    def logits(self) -> F32:
        """Logits of the last batch (n_outputs, n_vocab) f32, rows in the order the outputs were asked for."""
        self._opened()
        return self._logits

    @property
    def embeddings(self) -> F32:
        """Embeddings of the last batch (n_outputs, n_embd) f32, or one row a sequence (n_seq, n_embd) if pooled."""
        self._opened()
        if self._embeddings_seq:
            return np.stack([self._embeddings_seq[s] for s in sorted(self._embeddings_seq)])
        return self._embeddings

    @property
    def memory(self) -> MemoryObject | None:
        """The memory; None for a model without one."""
        self.check_open()
        return self._memory

    @property
    def n_ctx(self) -> int:
        return self.cparams.n_ctx

    @property
    def n_ctx_seq(self) -> int:
        """Cells that one sequence may use."""
        return self.cparams.n_ctx_seq

    @property
    def n_graphs_built(self) -> int:
        """Steps that built a graph; see `n_graphs_reused`."""
        return 0 if self._graphs is None else self._graphs.n_built

    @property
    def n_graphs_reused(self) -> int:
        """Steps that only filled inputs."""
        return 0 if self._graphs is None else self._graphs.n_reused

    def memory_breakdown(self) -> dict[str, dict[str, int]]:
        """Bytes by buffer type: weights, memory and compute buffers."""
        memory, _ = self._opened()
        return {
            "model": self.model.memory_breakdown(),
            "memory": {} if memory is None else memory.memory_breakdown(),
            "compute": self._runner.buffer_sizes(),
        }

    # state

    def state_get(self, seq_id: int | None = None, partial: bool = False) -> bytes:
        """The whole state, or one sequence's, byte for byte as llama.cpp saves it to memory.

        `partial`: of a sequence, only what a sliding window or a recurrent part holds.
        """
        return save_bytes(self._live(), seq_id, partial)

    def state_set(
        self, data: bytes, seq_id: int | None = None, partial: bool = False, *, layout: LayoutName = "current"
    ) -> None:
        """Replace the whole memory by a saved state, or one sequence by a saved one, whatever id that had.

        Raises:
            StateError, NoSlotError, SequenceError: refused; memory is as it was.
        """
        load_bytes(self._live(), data, seq_id, partial, layout)

    def state_save(
        self, path: PathLike, tokens: Sequence[int] = (), seq_id: int | None = None, *, sidecar: bool = False
    ) -> None:
        """Write a state file of llama.cpp's (GGSN, or GGSQ for one sequence), all of it or nothing.

        `sidecar`: a second file says what it was made with; `state_load` checks it.
        """
        save_file(self._live(), path, tokens, seq_id, self._fingerprint() if sidecar else None)

    def state_load(
        self, path: PathLike, seq_id: int | None = None, *, layout: LayoutName = "current"
    ) -> list[int]:
        """Read such a file as `state_set` does, and return its tokens."""
        return load_file(self._live(), path, seq_id, layout, self._fingerprint)

    def _live(self) -> Live:
        memory, _ = self._opened()
        return Live(self.model.arch, memory, self.model.hparams.n_layer)

    def _fingerprint(self) -> Fingerprint:
        factors = [t.name for t in self.model.rope_factors(self.cparams).values()]
        return fingerprint(self._live(), model_hash(self.model.metadata, self.model.tensors), factors)

    # construction

    def _create_memory(self) -> MemoryObject | None:
        cp, model, runner = self.cparams, self.model, self._runner
        site = Site(
            runner=runner,
            buffer_type_of=model.buffer_type_of if cp.offload_kqv else lambda il: runner.cpu_buffer_type,
            rope_factors=model.rope_factors(cp),
        )
        return create_memory(model.impl.MEMORY, model.hparams, cp, site)

    def _reserve_graph(self, n_tokens: int, n_outputs: int) -> BuiltGraph:
        memory, graphs = self._memory, self._graphs
        assert graphs is not None
        n_seqs = self.cparams.n_seq_max
        allocator = BatchAllocator(self.model.hparams.n_pos_per_embd)
        ubatch = allocator.ubatch_reserve(-(-n_tokens // n_seqs), n_seqs)
        step = None if memory is None else memory.plan_full(ubatch)
        if self.cparams.embeddings:  # then every token is one
            n_outputs = ubatch.n_tokens
        return graphs.build(self._graph_params(ubatch, step, n_outputs))

    def _reserve(self) -> None:
        """Size compute buffers for the largest prompt step and for one token, so that no later step allocates."""
        n_seqs = self.cparams.n_seq_max
        n_tokens = min(self.cparams.n_ctx, self.cparams.n_ubatch)
        for n, n_outputs in ((n_tokens, n_tokens), (n_seqs, n_seqs), (n_tokens, n_tokens)):
            self._runner.reserve(self._reserve_graph(n, n_outputs).graph)

    def _resolve_flash_attn(self, asked: ContextParams) -> None:
        """`auto`: on where every layer's attention would run on that layer's device.  Upstream: resolve_fused_ops."""
        if asked.flash_attn != "auto" or not self.model.placement.devices:
            return
        self._memory = self._create_memory()
        n_seqs = self.cparams.n_seq_max
        built = self._reserve_graph(n_seqs, n_seqs)
        self._runner.split(built.graph)
        layers = self.model.placement.layer_devices
        runs_there = all(
            self._runner.device_of(t) == layers[il] for name, t, il in built.fused if name == "flash_attn"
        )
        if self._memory is not None:
            self._memory.close()
        self._memory = None
        self.cparams = dataclasses.replace(self.cparams, flash_attn=runs_there)

    # lifetime

    def check_open(self) -> None:
        """Raise ClosedError if this context or its model is closed."""
        if self._closed:
            raise ClosedError("the context is closed")
        self.model.check_open()

    def _opened(self) -> tuple[MemoryObject | None, GraphCache]:
        self.check_open()
        assert self._graphs is not None
        return self._memory, self._graphs

    def __repr__(self) -> str:
        if self._closed:
            return "<Context closed>"
        cp = self.cparams
        return (
            f"<Context {self.model.arch}: n_ctx {cp.n_ctx}, n_seq_max {cp.n_seq_max}, n_ubatch {cp.n_ubatch}>"
        )

    def close(self) -> None:
        """Release memory, graphs and backends; idempotent. The model stays.

        Raises:
            BindingError: another thread decodes; nothing was closed.
        """
        if self._closed:
            return
        if self._graphs is not None:
            self._graphs.close()
        self._closed = True
        if self._memory is not None:
            self._memory.close()
        self._runner.close()

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
