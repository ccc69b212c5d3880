"""Case 07 without a cache: a full layer and a sliding one have a mask each, in the same graph."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pyggmlkv.backend.runner import Runner, Threads
from pyggmlkv.batch import Batch
from pyggmlkv.batch.allocator import BatchAllocator
from pyggmlkv.batch.prepare import BatchLimits
from pyggmlkv.binding import ComputeGraph, TensorArena, ops
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.graph.encoder_inputs import NoCacheInput
from pyggmlkv.model import Model
from tests.oracle.mask_naive import mask_entry
from tests.oracle.tiny_models import TinyModel

N, WINDOW = 12, 4


@pytest.fixture(scope="module")
def hparams(tiny_model: object) -> HParams:
    keys = {"block_count": 2, "attention.sliding_window": WINDOW}
    with Model.load(tiny_model(TinyModel("gemma2", keys=keys))) as model:  # type: ignore[operator]
        return model.hparams


@pytest.mark.parametrize("flash_attn", [True, False], ids=["f16", "f32"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not-causal"])
@pytest.mark.parametrize("swa_type", ["standard", "symmetric"])
def test_each_kind_of_layer_has_its_own_mask(
    hparams: HParams, swa_type: str, causal: bool, flash_attn: bool
) -> None:
    hparams = dataclasses.replace(hparams, swa_type=swa_type)
    allocator = BatchAllocator(1)
    seq_id = [0] * 7 + [1] * 5
    allocator.init(Batch([1] * N, seq_id=seq_id), BatchLimits(n_vocab=8, n_embd=8, n_seq_max=2))
    ubatch = allocator.split_simple(N)
    assert ubatch is not None
    with Runner(threads=Threads(1, 1)) as runner, TensorArena(16, graph_nodes=16) as ctx:
        inp = NoCacheInput(ctx, N, hparams, flash_attn=flash_attn, causal=causal)
        graph = ComputeGraph(ctx, 16)
        copies = [ops.cast(ctx, inp.mask(swa), "f32") for swa in (False, True)]
        for copy in copies:
            copy.set_output()
            graph.build_forward_expand(copy)
        runner.alloc(graph)
        inp.fill(ubatch, None)
        runner.compute(graph)
        full, sliding = (copy.to_numpy().reshape(N, N) for copy in copies)
    pos = [*range(7), *range(5)]
    for found, swa in ((full, ("none", 0)), (sliding, (swa_type, WINDOW))):
        wanted = [
            [
                mask_entry((pos[j], {seq_id[j]}, None), (pos[i], seq_id[i], None), causal, swa)
                for j in range(N)
            ]
            for i in range(N)
        ]
        np.testing.assert_array_equal(found, np.array(wanted, np.float32))
    assert (full != sliding).any()


def test_layers_ask_for_the_mask_of_their_kind(hparams: HParams) -> None:
    assert [hparams.is_swa(il) for il in range(2)] == [True, False]
