"""Streams tokens from a context: decode the prompt, pick, decode, pick; makes room by shifting when the cache is full.

Knows a context's decode, logits and memory; no text. Upstream: the main loop of llama-cli and the server's slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from pyggmlkv.batch import Batch
from pyggmlkv.errors import BatchError, ShiftError, UsageError
from pyggmlkv.sampling import Sampler
from pyggmlkv.types import F32

SEQ_ID = 0


class Memory(Protocol):
    """What generation asks of memory."""

    @property
    def can_shift(self) -> bool: ...
    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool: ...
    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> None: ...
    def seq_pos_max(self, seq_id: int) -> int | None: ...


class BatchSize(Protocol):
    """What generation asks of a context's settled parameters."""

    @property
    def n_batch(self) -> int: ...


class DecodingContext(Protocol):
    """What generation asks of a context."""

    @property
    def n_ctx_seq(self) -> int: ...
    @property
    def cparams(self) -> BatchSize: ...
    @property
    def logits(self) -> F32: ...
    @property
    def memory(self) -> Memory | None: ...
    def decode(self, batch: Batch) -> None: ...


@dataclass(frozen=True, slots=True)
class ContextShift:
    """How room is made: positions `n_keep` to `n_keep + n_discard` are dropped and the rest moves down.

    `n_discard` None drops half of what is not kept. `on_shift(when, shift_number)` is called with `before`, then
    `after`, around each shift.
    """

    n_keep: int = 0
    n_discard: int | None = None
    on_shift: Callable[[Literal["before", "after"], int], None] | None = None


@dataclass(slots=True)
class Timings:
    """Seconds and counts of the two phases: the prompt, and one token after the other."""

    n_prompt: int = 0
    prompt_seconds: float = 0.0
    n_decode: int = 0
    decode_seconds: float = 0.0

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens per second."""
        return self.n_prompt / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_per_second(self) -> float:
        """Generated tokens per second."""
        return self.n_decode / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class Generation:
    """An iterator of tokens that knows how far it is.

    `stop_reason`: None while running, then `length`, `stop` (a stop token; it is not given out) or `context` (full).
    """

    ctx: DecodingContext
    n_predict: int | None
    sampler: Callable[[F32], int]
    shift: ContextShift | None
    stop: frozenset[int]
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    n_shifts: int = 0
    stop_reason: Literal["length", "stop", "context"] | None = None

    def __post_init__(self) -> None:
        self._past = _positions_used(self.ctx.memory)
        self._steps = self._run()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self._steps)

    def _run(self) -> Iterator[int]:
        self._decode_prompt()
        while self.n_predict is None or len(self.tokens) < self.n_predict:
            token = self.sampler(self.ctx.logits[-1])
            if token in self.stop:
                self.stop_reason = "stop"
                return
            self.tokens.append(token)
            yield token
            if len(self.tokens) == self.n_predict:
                break
            if self._past >= self.ctx.n_ctx_seq and not self._make_room():
                self.stop_reason = "context"
                return
            start = time.perf_counter()
            self.ctx.decode(Batch([token], seq_id=SEQ_ID))
            self._past += 1
            self.timings.n_decode += 1
            self.timings.decode_seconds += time.perf_counter() - start
        self.stop_reason = "length"

    def _decode_prompt(self) -> None:
        room = self.ctx.n_ctx_seq - self._past
        if len(self.prompt) > room:
            raise BatchError(
                f"the prompt has {len(self.prompt)} tokens, the context has room for {room}: "
                "ask for a larger n_ctx or shorten the prompt",
                n_tokens=len(self.prompt),
                room=room,
            )
        start = time.perf_counter()
        n_batch = self.ctx.cparams.n_batch
        for first in range(0, len(self.prompt), n_batch):
            self.ctx.decode(Batch(self.prompt[first : first + n_batch], seq_id=SEQ_ID))
        self._past += len(self.prompt)
        self.timings.n_prompt = len(self.prompt)
        self.timings.prompt_seconds = time.perf_counter() - start

    def _make_room(self) -> bool:
        """Drops a block after the kept prefix and moves the rest down; False without a context shift."""
        shift, memory = self.shift, self.ctx.memory
        if shift is None or memory is None:
            return False
        n_left = self._past - shift.n_keep
        n_discard = max(1, n_left // 2) if shift.n_discard is None else min(shift.n_discard, n_left)
        end = shift.n_keep + n_discard
        if shift.on_shift:
            shift.on_shift("before", self.n_shifts + 1)
        if not memory.seq_rm(SEQ_ID, shift.n_keep, end):
            raise ShiftError(
                f"memory refused to drop positions {shift.n_keep} to {end}", p0=shift.n_keep, p1=end
            )
        memory.seq_add(SEQ_ID, end, self._past, -n_discard)
        self._past -= n_discard
        self.n_shifts += 1
        if shift.on_shift:
            shift.on_shift("after", self.n_shifts)
        return True


def generate(
    ctx: DecodingContext,
    prompt_tokens: Sequence[int],
    n_predict: int | None = None,
    sampler: Callable[[F32], int] | None = None,
    context_shift: bool | ContextShift = False,
    stop: Collection[int] = (),
) -> Generation:
    """Continues `prompt_tokens` in sequence 0 of `ctx`; iterate to get token ids as they come.

    `n_predict` None goes on until a stop token or a full context. `sampler` takes logits (n_vocab,) and gives a token;
    None is greedy. `context_shift` True keeps nothing and drops half each time the context is full.
    Raises: BatchError for an empty prompt or one that does not fit, ShiftError when this memory cannot shift.
    """
    prompt = [int(t) for t in np.asarray(prompt_tokens, dtype=np.int64)]
    if not prompt:
        raise BatchError("the prompt has no tokens: give at least one, such as the begin token")
    if n_predict is not None and n_predict < 0:
        raise UsageError(f"n_predict is {n_predict}, expected 0 or more, or None", n_predict=n_predict)
    shift = ContextShift() if context_shift is True else context_shift or None
    if shift is not None:
        _check_shift(ctx, shift)
    return Generation(ctx, n_predict, sampler or Sampler(), shift, frozenset(stop), prompt)


def _check_shift(ctx: DecodingContext, shift: ContextShift) -> None:
    if ctx.memory is None or not ctx.memory.can_shift:
        raise ShiftError("the positions of this model's memory cannot be shifted: use a larger n_ctx instead")
    if not 0 <= shift.n_keep < ctx.n_ctx_seq - 1:
        raise UsageError(
            f"n_keep is {shift.n_keep}, expected 0 to {ctx.n_ctx_seq - 2}: something must be left to drop",
            n_keep=shift.n_keep,
        )
    if shift.n_discard is not None and shift.n_discard < 1:
        raise UsageError(
            f"n_discard is {shift.n_discard}, expected 1 or more, or None", n_discard=shift.n_discard
        )


def _positions_used(memory: Memory | None) -> int:
    if memory is None:
        return 0
    last = memory.seq_pos_max(SEQ_ID)
    return 0 if last is None else last + 1
