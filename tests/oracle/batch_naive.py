"""A batch and its three splits over plain lists, token by token: the oracle for pyggmlkv.batch.

Slow on purpose; imports nothing of the package and no NumPy. Behaves as llama_batch_allocr of the pinned
llama.cpp, with the refusals that pyggmlkv adds (`strict`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


class Refused(Exception):
    """The batch is not acceptable."""


@dataclass
class Token:
    ids: list[int]
    pos: int
    is_output: bool


@dataclass
class Chunk:
    """A ubatch: which tokens, in which order."""

    index: list[int]
    n_seqs: int
    equal_seqs: bool


@dataclass
class NaiveBatch:
    tokens: list[Token]
    used: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.used = [False] * len(self.tokens)

    def sets(self) -> list[frozenset[int]]:
        return [frozenset(token.ids) for token in self.tokens]

    def unused(self) -> list[int]:
        return [i for i, is_used in enumerate(self.used) if not is_used]

    def take(self, index: list[int]) -> None:
        for i in index:
            assert not self.used[i], f"token {i} handed out twice"
            self.used[i] = True

    # -- splits

    def split_simple(self, n_ubatch: int) -> Chunk | None:
        index = self.unused()[:n_ubatch]
        if not index:
            return None
        self.take(index)
        return Chunk(index, len(index), False)

    def split_equal(self, n_ubatch: int, sequential: bool, n_keep_tail: int = 0) -> Chunk | None:
        sets = self.sets()
        joined: list[frozenset[int]] = []
        last_id = None
        for i in self.unused():
            first_id = self.tokens[i].ids[0]
            if any(sets[i] & other for other in joined):
                continue
            if sequential and joined and first_id != last_id + 1:
                continue
            joined.append(sets[i])
            last_id = first_id
            if len(joined) > n_ubatch:
                break
        if not joined:
            return None
        queues = [[i for i in self.unused() if sets[i] == one] for one in joined]
        taken: list[list[int]] = [[] for _ in queues]
        while all(queues):
            for queue, mine in zip(queues, taken, strict=True):
                mine.append(queue.pop(0))
            if (len(taken[0]) + 1) * len(queues) > n_ubatch:
                break
        if n_keep_tail:
            taken = keep_tail(taken, queues, n_ubatch, n_keep_tail)
        index = [i for mine in taken for i in mine]
        self.take(index)
        return Chunk(index, len(taken), True)

    def split_seq(self, n_ubatch: int) -> Chunk | None:
        sets, unused = self.sets(), self.unused()
        if not unused:
            return None
        index = [unused[0]]
        for i in unused[1:]:
            if len(index) >= n_ubatch:
                break
            if sets[i] <= sets[index[-1]]:
                index.append(i)
        self.take(index)
        return Chunk(index, 1, True)


def keep_tail(
    taken: list[list[int]], queues: list[list[int]], n_ubatch: int, n_keep_tail: int
) -> list[list[int]]:
    kept = []
    for mine, rest in zip(taken, queues, strict=True):
        if rest and len(rest) < n_keep_tail:
            break
        kept.append(mine)
    if kept:
        return kept
    whole = taken[0] + queues[0]
    return [whole if len(whole) <= n_ubatch else whole[: len(whole) - n_keep_tail]]


def prepare(
    ids: list[list[int]],
    pos: list[int] | None,
    outputs: list[bool],
    held: dict[int, tuple[int, int]],
    n_seq_max: int,
    strict: bool = True,
) -> NaiveBatch:
    """`held` maps a sequence to its first and last stored position."""
    for mine in ids:
        if not mine or any(not 0 <= s < n_seq_max for s in mine):
            raise Refused("ids")
        if strict and len(set(mine)) != len(mine):
            raise Refused("ids twice")
    if pos is None:
        following = {s: held[s][1] + 1 if s in held else 0 for s in range(n_seq_max)}
        pos = []
        for mine in ids:
            here = following[mine[0]]
            pos.append(here)
            following.update(dict.fromkeys(mine, here + 1))
    if any(p < (0 if strict else -1) for p in pos):
        raise Refused("negative")
    for s in range(n_seq_max):
        track = [p for p, mine in zip(pos, ids, strict=True) if s in mine]
        if not track:
            continue
        if s in held and min(track) != held[s][1] + 1:
            raise Refused("does not continue")
        if set(track) != set(range(min(track), max(track) + 1)):
            raise Refused("gap")
        if track != sorted(track):
            raise Refused("backwards")
        if strict and len(set(track)) != len(track):
            raise Refused("twice")
    for mine in ids:
        if any(held.get(s) != held.get(mine[0]) for s in mine):
            raise Refused("diverged")
    return NaiveBatch([Token(list(i), p, o) for i, p, o in zip(ids, pos, outputs, strict=True)])
