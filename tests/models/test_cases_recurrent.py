"""Recurrent and hybrid models: mixed batches (13), refused cuts (16), states that start anew (17), graphs kept (32)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pyggmlkv
from pyggmlkv import Batch
from pyggmlkv.errors import BatchError, GGUFKeyError, SequenceError
from pyggmlkv.memory.hybrid import HybridMemory
from pyggmlkv.memory.recurrent.memory import RecurrentMemory
from pyggmlkv.types import FlashAttn
from tests.oracle.libllama import Library
from tests.oracle.tiny_models import TinyModel
from tests.oracle.tiny_recipes import Value
from tests.side_by_side import Models, Pair, Setup

TinyModels = Callable[[str | TinyModel], Path]
Floats = npt.NDArray[np.float32]
ARCHS = ["mamba", "mamba2", "jamba", "lfm2"]
SETTINGS: dict[str, Any] = {
    "n_ctx": 256,
    "n_threads": 1,
    "flash_attn": "off",
    "type_k": "f32",
    "type_v": "f32",
}
TOKENS = [int(t) for t in np.random.default_rng(6).integers(0, 128, 40)]
CLOSE = 1e-4
"""Logits of two runs that split a text differently: f32 sums in another order."""


@pytest.fixture(scope="module", params=ARCHS)
def models(request: pytest.FixtureRequest, reference: Library, tiny_model: TinyModels) -> Iterator[Models]:
    with Models(reference, tiny_model(request.param)) as opened:
        yield opened


@pytest.fixture(scope="module")
def jamba(tiny_model: TinyModels) -> Iterator[pyggmlkv.Model]:
    with pyggmlkv.Model.load(tiny_model("jamba")) as opened:
        yield opened


def memory(ctx: pyggmlkv.Context) -> RecurrentMemory | HybridMemory:
    assert isinstance(ctx.memory, RecurrentMemory | HybridMemory)
    return ctx.memory


def logits(model: pyggmlkv.Model, *texts: list[int]) -> Floats:
    """Logits of the last token of a fresh run over `texts`, a batch each."""
    with pyggmlkv.Context(model, **SETTINGS) as ctx:
        for text in texts:
            ctx.decode(Batch(text))
        return ctx.logits.copy()


# Case 13

LENGTHS = {0: 7, 1: 3, 2: 5}


def mixed(seed: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, positions and sequences of 7, 3 and 5 tokens in any interleaving, ordered inside a sequence."""
    order = np.repeat(list(LENGTHS), list(LENGTHS.values()))
    np.random.default_rng(seed).shuffle(order)
    seen = dict.fromkeys(LENGTHS, 0)
    tokens, pos = [], []
    for s in order.tolist():
        tokens.append(TOKENS[10 * s + seen[s]])
        pos.append(seen[s])
        seen[s] += 1
    return tokens, pos, order.tolist()


@pytest.mark.parametrize("n_ubatch", [1, 2, 4, 512])
def test_mixed_batches_are_equal_to_the_reference_and_to_solo_runs(models: Models, n_ubatch: int) -> None:
    solo = {}
    for s, n in LENGTHS.items():
        with pyggmlkv.Context(models.ours, **SETTINGS) as ctx:
            ctx.decode(Batch(TOKENS[10 * s : 10 * s + n], logits="all"))
            solo[s] = ctx.logits.copy()
    setup = Setup(n_ubatch=n_ubatch, n_seq_max=3, kv_unified=True, type_k="f32", type_v="f32")
    for seed in range(3):
        tokens, pos, order = mixed(seed)
        asked = sorted(np.random.default_rng(seed).choice(15, 6, replace=False).tolist())
        with Pair(models, setup) as pair:
            pair.decode(tokens, pos=pos, seq_id=order, logits=asked)
            pair.compare_positions(3)
            assert pair.comparison.bits_equal, pair.comparison.first_difference
            for row, i in enumerate(asked):
                np.testing.assert_allclose(pair.ours.logits[row], solo[order[i]][pos[i]], atol=CLOSE)


def test_disorder_inside_a_sequence_is_refused_and_changes_nothing(models: Models) -> None:
    with pyggmlkv.Context(models.ours, n_seq_max=2, kv_unified=True, **SETTINGS) as ctx:
        ctx.decode(Batch(TOKENS[:4]))
        before = ctx.state_get()
        with pytest.raises(BatchError):
            ctx.decode(Batch([1, 2, 3], pos=[5, 4, 6], seq_id=0))
        with pytest.raises(BatchError):
            ctx.decode(Batch([1, 2], pos=[4, 6], seq_id=0))
        assert ctx.state_get() == before


# Case 16


def test_refused_cuts_change_neither_part(jamba: pyggmlkv.Model) -> None:
    settings = {**SETTINGS, "n_seq_max": 3, "kv_unified": True}
    with pyggmlkv.Context(jamba, **settings) as ctx, pyggmlkv.Context(jamba, **settings) as never_asked:
        for each in (ctx, never_asked):
            each.decode(Batch(TOKENS[:16]))
            each.decode(Batch(TOKENS[20:25], seq_id=1))
        before = ctx.state_get()
        for p0, p1 in ((10, None), (15, None), (0, 8), (3, 5)):
            assert memory(ctx).seq_rm(0, p0, p1) is False
            assert ctx.state_get() == before, f"[{p0}, {p1})"
        assert memory(ctx).seq_rm(0, 16, None) is True
        assert memory(ctx).seq_rm(2) is True
        assert ctx.state_get() == before
        with pytest.raises(SequenceError):
            memory(ctx).seq_rm(3)
        assert ctx.state_get() == before
        ctx.decode(Batch([5]))
        never_asked.decode(Batch([5]))
        np.testing.assert_array_equal(ctx.logits, never_asked.logits)
        assert memory(ctx).seq_rm(0) is True
        assert memory(ctx).seq_pos_max(0) is None
        assert memory(ctx).seq_pos_max(1) == 4
        assert memory(ctx).seq_rm(None) is True
        assert memory(ctx).seq_pos_max(1) is None


def test_partial_copy_of_a_hybrid_sequence_is_refused_and_changes_nothing(jamba: pyggmlkv.Model) -> None:
    for unified in (True, False):
        with pyggmlkv.Context(jamba, n_seq_max=2, kv_unified=unified, **SETTINGS) as ctx:
            ctx.decode(Batch(TOKENS[:16]))
            before = ctx.state_get()
            with pytest.raises(SequenceError):
                memory(ctx).seq_cp(0, 1, 0, 8)
            assert ctx.state_get() == before
            memory(ctx).seq_cp(0, 1)
            ctx.decode(Batch([5], seq_id=1))
            np.testing.assert_array_equal(ctx.logits, logits(jamba, TOKENS[:16], [5]))


def test_a_failure_of_the_attention_part_leaves_the_states_alone(
    jamba: pyggmlkv.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> bool:
        raise RuntimeError("planted")

    with pyggmlkv.Context(jamba, n_seq_max=2, kv_unified=True, **SETTINGS) as ctx:
        ctx.decode(Batch(TOKENS[:16]))
        hybrid = memory(ctx)
        assert isinstance(hybrid, HybridMemory)
        before = ctx.state_get()
        calls: tuple[tuple[str, tuple[int | None, ...]], ...] = (
            ("seq_rm", (0, None, None)),
            ("seq_cp", (0, 1, None, None)),
            ("seq_keep", (1,)),
            ("seq_add", (0, None, None, 3)),
            ("seq_div", (0, None, None, 2)),
        )
        for verb, args in calls:
            with monkeypatch.context() as planted:
                planted.setattr(type(hybrid.attn), verb, fails)
                with pytest.raises(RuntimeError, match="planted"):
                    getattr(hybrid, verb)(*args)
            assert ctx.state_get() == before, verb


@pytest.mark.parametrize("arch", ["mamba2", "lfm2"])
def test_snapshots_allow_short_cuts_and_no_longer_ones(tiny_model: TinyModels, arch: str) -> None:
    with pyggmlkv.Model.load(tiny_model(arch)) as model:
        with pyggmlkv.Context(model, n_rs_seq=3, n_ubatch=8, **SETTINGS) as ctx:
            ctx.decode(Batch(TOKENS[:16]))
            assert memory(ctx).seq_rm(0, 12, None) is False
            part = ctx.memory.recr if isinstance(ctx.memory, HybridMemory) else ctx.memory
            assert isinstance(part, RecurrentMemory)
            assert [part.can_resume(0, p)[0] for p in (12, 13, 14, 15, 16, 17)] == [
                False,
                True,
                True,
                True,
                True,
                False,
            ]
            assert "stands after position 15; no state after 11 is kept" in part.can_resume(0, 12)[1]
            assert memory(ctx).seq_rm(0, 14, None) is True
            assert memory(ctx).seq_pos_max(0) == 13
            assert memory(ctx).can_resume(0, 14) == (True, "")
            ctx.decode(Batch(TOKENS[30:33]))
            found = ctx.logits.copy()
        np.testing.assert_allclose(found, logits(model, TOKENS[:14], TOKENS[30:33]), atol=CLOSE)


def test_architectures_without_snapshots_keep_none(jamba: pyggmlkv.Model) -> None:
    with pyggmlkv.Context(jamba, n_rs_seq=3, **SETTINGS) as ctx:
        assert ctx.cparams.n_rs_seq == 0


def test_moving_a_whole_hybrid_sequence_is_equal_to_the_reference(
    reference: Library, tiny_model: TinyModels
) -> None:
    with Models(reference, tiny_model("lfm2")) as models:
        for flash_attn in ("off", "on"):
            with Pair(models, Setup(flash_attn=flash_attn)) as pair:
                pair.decode(TOKENS[:20])
                pair.memory("seq_add", 0, 0, None, 7)
                pair.greedy(4, 3)
                pair.memory("seq_div", 0, 0, None, 2)
                pair.greedy(4, 3)
                pair.compare_positions(1)
                assert pair.comparison.bits_equal, pair.comparison.first_difference


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("l_cache", [3, 5])
def test_convolutions_to_both_sides_are_equal_to_the_reference(
    reference: Library, tiny_model: TinyModels, l_cache: int, flash_attn: FlashAttn
) -> None:
    keys: dict[str, Value] = {"attention.causal": False, "shortconv.l_cache": l_cache}
    with (
        Models(reference, tiny_model(TinyModel("lfm2", keys=keys))) as models,
        Pair(models, Setup(flash_attn=flash_attn)) as pair,
    ):
        pair.decode(TOKENS[:20])
        pair.decode(TOKENS[20:25])
        assert pair.comparison.bits_equal, pair.comparison.first_difference


def test_even_convolutions_to_both_sides_are_refused(tiny_model: TinyModels) -> None:
    keys: dict[str, Value] = {"attention.causal": False, "shortconv.l_cache": 4}
    with pytest.raises(GGUFKeyError, match="odd window"):
        pyggmlkv.Model.load(tiny_model(TinyModel("lfm2", keys=keys)))


# Case 17


@pytest.mark.parametrize("way", ["seq_rm", "clear", "clear-without-data", "all"])
def test_a_new_sequence_starts_from_nothing(models: Models, way: str) -> None:
    with pyggmlkv.Context(models.ours, **SETTINGS) as ctx:
        ctx.decode(Batch(TOKENS[:10]))
        if way.startswith("clear"):
            memory(ctx).clear(data=way == "clear")
        else:
            assert memory(ctx).seq_rm(0 if way == "seq_rm" else None)
        ctx.decode(Batch(TOKENS[20:28], logits="all"))
        found = ctx.logits.copy()
    with pyggmlkv.Context(models.ours, **SETTINGS) as fresh:
        fresh.decode(Batch(TOKENS[20:28], logits="all"))
        np.testing.assert_array_equal(found, fresh.logits)


def test_a_released_state_is_not_inherited_by_another_sequence(models: Models) -> None:
    with pyggmlkv.Context(models.ours, n_seq_max=2, kv_unified=True, **SETTINGS) as ctx:
        ctx.decode(Batch(TOKENS[:10]))
        assert memory(ctx).seq_rm(0)
        ctx.decode(Batch(TOKENS[20:28], seq_id=1))
        found = ctx.logits.copy()
    np.testing.assert_array_equal(found, logits(models.ours, TOKENS[20:28]))


def test_starting_again_at_0_without_removal_is_refused(models: Models) -> None:
    with pyggmlkv.Context(models.ours, **SETTINGS) as ctx:
        ctx.decode(Batch(TOKENS[:10]))
        before = ctx.state_get()
        with pytest.raises(BatchError):
            ctx.decode(Batch(TOKENS[20:24], pos=range(4)))
        assert ctx.state_get() == before


# Case 32


@pytest.mark.parametrize("order", [[0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 0, 0]], ids=["alternating", "pairs"])
def test_kept_graphs_read_the_state_of_the_step_s_own_sequence(models: Models, order: list[int]) -> None:
    runs: list[list[Floats]] = []
    for graph_reuse in (True, False):
        settings = {**SETTINGS, "n_seq_max": 2, "kv_unified": True}
        with pyggmlkv.Context(models.ours, graph_reuse=graph_reuse, **settings) as ctx:
            ctx.decode(Batch(TOKENS[:5]))
            ctx.decode(Batch(TOKENS[20:25], seq_id=1))
            rows = []
            for step, seq_id in enumerate(order):
                ctx.decode(Batch([TOKENS[30 + step]], seq_id=seq_id))
                rows.append(ctx.logits.copy())
            runs.append(rows)
            assert (ctx.n_graphs_reused > 0) == (graph_reuse and order[:2] == [0, 0])
    np.testing.assert_array_equal(runs[0], runs[1])
    for seq_id, text in ((0, TOKENS[:5]), (1, TOKENS[20:25])):
        steps = [[TOKENS[30 + i]] for i, s in enumerate(order) if s == seq_id]
        last = max(i for i, s in enumerate(order) if s == seq_id)
        np.testing.assert_allclose(runs[0][last], logits(models.ours, text, *steps), atol=CLOSE)
