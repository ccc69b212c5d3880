"""The scripts that every architecture is put through: splits, settings, sequences, shifts, seq ops, state.

A case says which memories it makes sense for; the ones it skips are reported, not hidden. Knows no
architecture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from tests.oracle.libllama import OracleError
from tests.oracle.tiny_recipes import ENCODE_ONLY

from .pair import Comparison, Models, Pair, Setup

N_PROMPT = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A script over a pair of contexts.

    n_seq: sequences it uses. needs: "shift" or "attention"; a memory without is skipped.
    """

    script: Callable[[Pair], None]
    setup: Setup = dataclasses.field(default_factory=Setup)
    n_seq: int = 1
    needs: str = ""


def tokens(pair: Pair, n: int, seed: int = 0) -> list[int]:
    """n token ids, the same for the same seed."""
    return [int(t) for t in np.random.default_rng([7, seed]).integers(0, pair.n_vocab, n)]


def begin(pair: Pair, n: int = N_PROMPT) -> list[int]:
    """Encodes something, in one ubatch, where the model has an encoder; a prompt."""
    if pair.has_encoder:
        pair.encode(tokens(pair, min(24, pair.setup.n_ubatch), seed=9))
    return tokens(pair, n)


def prompt(pair: Pair) -> None:
    pair.decode(begin(pair))


def splits(pair: Pair) -> None:
    ids = begin(pair)
    for a, b in ((0, 1), (1, 8), (8, 29), (29, N_PROMPT)):
        pair.decode(ids[a:b])


def greedy(pair: Pair) -> None:
    ids = begin(pair)
    pair.decode(ids[:-1], logits="none")
    pair.greedy(12, ids[-1])


def chosen_rows(pair: Pair) -> None:
    pair.decode(begin(pair), logits=[0, 3, 17, N_PROMPT - 1])
    pair.decode(tokens(pair, 5, seed=1), logits="last")


def interleaved(pair: Pair) -> None:
    """Two sequences token by token in one batch, then each on its own, then both one token at a time."""
    ids = begin(pair, 30)
    pair.decode(ids, pos=[i // 2 for i in range(30)], seq_id=[i % 2 for i in range(30)])
    pair.decode(tokens(pair, 6, seed=2), seq_id=1)
    pair.decode(tokens(pair, 3, seed=3), seq_id=0)
    for step in range(4):
        pair.decode(tokens(pair, 2, seed=4 + step), seq_id=[0, 1])


def shared_prefix(pair: Pair) -> None:
    """A prompt copied to a second sequence, which then goes its own way."""
    pair.decode(begin(pair))
    pair.memory("seq_cp", 0, 1, None, None)
    pair.decode(tokens(pair, 4, seed=1) + tokens(pair, 4, seed=2), seq_id=[0] * 4 + [1] * 4)
    pair.memory("seq_rm", 0, None, None)
    pair.decode(tokens(pair, 3, seed=3), seq_id=1)
    pair.memory("seq_keep", 1)


def context_shift(pair: Pair) -> None:
    """A block of 10 tokens dropped in the middle, the rest moved up, then more tokens; twice."""
    pair.decode(begin(pair))
    for round_ in range(2):
        pair.memory("seq_rm", 0, 5, 15)
        pair.memory("seq_add", 0, 15, None, -10)
        pair.decode(tokens(pair, 8, seed=1 + round_))
        pair.greedy(3, 1)


def divide(pair: Pair) -> None:
    """Positions divided by two in a range (self-extend)."""
    pair.decode(begin(pair))
    pair.memory("seq_div", 0, 0, 16, 2)
    pair.memory("seq_add", 0, 16, None, -8)
    pair.decode(tokens(pair, 6, seed=1))


def removal(pair: Pair) -> None:
    """The end is taken back (where the memory can), and something else decoded there."""
    pair.decode(begin(pair))
    pair.memory("seq_rm", 0, N_PROMPT - 3, None)
    start = pair.reference.memory.seq_pos_max(0)
    pair.decode(tokens(pair, 5, seed=1), pos=range(0 if start is None else start + 1, (start or -1) + 6))


def refused(pair: Pair) -> None:
    """A gap in the positions is refused and changes nothing."""
    ids = begin(pair)
    pair.decode(ids)
    pair.decode(ids[:4], pos=range(100, 104))
    pair.decode(ids[:4])


def far_positions(pair: Pair) -> None:
    """A sequence that starts at position 8180: crosses a chunk of 8192 and YaRN's original context."""
    pair.decode(begin(pair, 24), pos=range(8180, 8204))
    pair.greedy(3, 1)


CASES: Mapping[str, Case] = {
    "prompt": Case(prompt),
    "prompt-fa": Case(prompt, Setup(flash_attn="on")),
    "prompt-ub7": Case(prompt, Setup(n_ubatch=7)),
    "splits": Case(splits, Setup(n_ubatch=16)),
    "splits-fa": Case(splits, Setup(n_ubatch=16, flash_attn="on")),
    "greedy": Case(greedy),
    "greedy-fa": Case(greedy, Setup(flash_attn="on")),
    "two-threads": Case(greedy, Setup(n_threads=2)),
    "rows": Case(chosen_rows, Setup(n_ubatch=16)),
    "f32": Case(splits, Setup(type_k="f32", type_v="f32")),
    "bf16": Case(splits, Setup(type_k="bf16", type_v="bf16")),
    "q8-k": Case(splits, Setup(type_k="q8_0"), needs="attention"),
    "q8-kv": Case(splits, Setup(type_k="q8_0", type_v="q8_0", flash_attn="on"), needs="attention"),
    "q4-kv": Case(splits, Setup(type_k="q4_0", type_v="q4_0", flash_attn="on"), needs="attention"),
    "q5-kv": Case(splits, Setup(type_k="q5_1", type_v="q4_1", flash_attn="on"), needs="attention"),
    "two-unified": Case(interleaved, Setup(n_seq_max=2, kv_unified=True), n_seq=2),
    "two-unified-fa": Case(interleaved, Setup(n_seq_max=2, kv_unified=True, flash_attn="on"), n_seq=2),
    "two-streams": Case(interleaved, Setup(n_ctx=512, n_seq_max=2), n_seq=2),
    "two-streams-fa": Case(interleaved, Setup(n_ctx=512, n_seq_max=2, flash_attn="on"), n_seq=2),
    "prefix-unified": Case(shared_prefix, Setup(n_seq_max=2, kv_unified=True), n_seq=2),
    "prefix-streams": Case(shared_prefix, Setup(n_ctx=512, n_seq_max=2), n_seq=2),
    "shift": Case(context_shift, needs="shift"),
    "shift-fa": Case(context_shift, Setup(flash_attn="on"), needs="shift"),
    "shift-q8": Case(context_shift, Setup(type_k="q8_0"), needs="shift"),
    "shift-q8-kv": Case(context_shift, Setup(type_k="q8_0", type_v="q8_0", flash_attn="on"), needs="shift"),
    "shift-swa-full": Case(context_shift, Setup(swa_full=True), needs="shift"),
    "divide": Case(divide, needs="shift"),
    "removal": Case(removal),
    "refused": Case(refused),
    "far": Case(far_positions),
    "far-fa": Case(far_positions, Setup(flash_attn="on")),
}

STREAMS_WITH_BIAS = "the reference aborts: T5's position bias does not broadcast over streams"
QUANTISED_V_WITH_BIAS = "the reference transposes the blocks of a quantised V as if they were elements"
MLA_QUANTISED_SHIFT = "the reference aborts: it cannot dequantise the rotary slice of a key alone"
REFERENCE_ABORTS: Mapping[tuple[str, str], str] = {  # architecture or kind of memory, and case
    ("t5", "two-streams"): STREAMS_WITH_BIAS,
    ("t5", "two-streams-fa"): STREAMS_WITH_BIAS,
    ("t5", "prefix-streams"): STREAMS_WITH_BIAS,
    **{("t5", case): QUANTISED_V_WITH_BIAS for case in ("q8-kv", "q4-kv", "q5-kv", "shift-q8-kv")},
    ("deepseek2", "shift-q8"): MLA_QUANTISED_SHIFT,
    ("deepseek2", "shift-q8-kv"): MLA_QUANTISED_SHIFT,
    ("hybrid-iswa", "divide"): "the reference aborts: it allocates the K-shift of a full part without layers",
}
RECURRENT_CUT = (
    "the reference drops the cells and keeps the state that has seen them; here the cut is refused"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A case's outcome. comparison: None where it makes no sense or cannot run, and then `note` says why."""

    memory: str
    comparison: Comparison | None
    note: str = ""


def run_case(models: Models, name: str) -> Result:
    """One case over one model."""
    case = CASES[name]
    if models.reference.arch in ENCODE_ONLY:
        return Result("", None, "decodes nothing")
    if reason := REFERENCE_ABORTS.get((models.reference.arch, name)):
        return Result("", None, reason)
    try:
        pair_opened = Pair(models, case.setup)
    except OracleError as error:
        return Result("", None, f"refused by the reference: {str(error).strip().splitlines()[-1]}")
    with pair_opened as pair:
        kind = pair.memory_kind
        if case.needs == "shift" and not pair.can_shift:
            return Result(kind, None, "this memory cannot be shifted")
        if reason := REFERENCE_ABORTS.get((kind, name)):
            return Result(kind, None, reason)
        if case.script is context_shift and "hybrid" in kind:
            return Result(kind, None, RECURRENT_CUT)
        if case.needs and kind in ("recurrent", "none"):
            return Result(kind, None, "this memory has no attention part")
        case.script(pair)
        pair.compare_positions(case.n_seq)
        pair.compare_state([None, *range(case.n_seq)])
        return Result(kind, pair.comparison)
