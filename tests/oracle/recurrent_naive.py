"""State cells of recurrent memory as plain Python sets and lists: the rules of the reference, cell by cell.

An oracle for `RecurrentCells`; slow, and without its refusals. `data` stands in for the state tensors: each
row holds the tokens that its state has seen, so that a wrong copy shows.
"""

from __future__ import annotations

import dataclasses

END = 2**31 - 1


@dataclasses.dataclass
class NaiveCell:
    pos: int = -1
    src: int = -1
    src0: int = -1
    tail: int = -1
    seqs: set[int] = dataclasses.field(default_factory=set)


class NaiveRecurrent:
    """One cell per sequence, `size` of them; ids are below `size`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cells = [NaiveCell() for _ in range(size)]
        self.data: list[tuple[int, ...]] = [()] * size
        self.head = self.used = self.n = 0
        self.rs_z = -1

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        p0, p1 = max(p0, 0), END if p1 < 0 else p1
        tail = self.cells[seq].tail
        if tail >= 0:
            pos = self.cells[tail].pos
            if 0 < p0 <= pos < p1:
                return False
            if p0 <= pos < p1:
                self.cells[seq].tail = -1
        new_head = self.size
        for i, cell in enumerate(self.cells):
            if not p0 <= cell.pos < p1 or seq not in cell.seqs:
                continue
            cell.seqs.remove(seq)
            if not cell.seqs:
                self.used -= 1
                cell.pos = cell.src = -1
                new_head = min(new_head, i)
        self.head = min(self.head, new_head)
        return True

    def drop(self, seq: int) -> None:
        tail = self.cells[seq].tail
        if tail < 0:
            return
        cell = self.cells[tail]
        cell.seqs.remove(seq)
        self.cells[seq].tail = -1
        if not cell.seqs:
            cell.pos = cell.src = -1
            self.used -= 1

    def seq_cp(self, src: int, dst: int) -> None:
        if src == dst:
            return
        self.drop(dst)
        tail = self.cells[src].tail
        if tail >= 0:
            self.cells[tail].seqs.add(dst)
            self.cells[dst].tail = tail

    def seq_keep(self, seq: int) -> None:
        new_head = self.size
        for i, cell in enumerate(self.cells):
            if i != seq:
                cell.tail = -1
            if seq in cell.seqs:
                cell.seqs = {seq}
                continue
            self.used -= cell.pos >= 0
            cell.pos = cell.src = -1
            cell.seqs = set()
            new_head = min(new_head, i)
        self.head = min(self.head, new_head)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        tail = self.cells[seq].tail
        if tail >= 0 and p0 <= self.cells[tail].pos < p1:
            self.cells[tail].pos += delta

    def next_empty(self, start: int) -> int:
        for k in range(self.size):
            if not self.cells[(start + k) % self.size].seqs:
                return (start + k) % self.size
        return -1

    def find_slot(self, sets: list[list[int]], positions: list[list[int]]) -> list[int]:
        """Places `sets` (ids, the first one leads); returns the row each cell is read from."""
        if self.head > self.used + 2 * len(sets):
            self.head = 0
        for ids in sets:
            for seq in ids[1:]:
                self.drop(seq)
        empty = self.next_empty(self.head)
        tails = []
        for s, (lead, *_) in enumerate(sets):
            meta = self.cells[lead]
            if meta.tail < 0 or self.cells[meta.tail].seqs != {lead}:
                target = self.cells[empty]
                assert not target.seqs
                if meta.tail >= 0:
                    old = self.cells[meta.tail]
                    target.pos, target.src = old.pos, old.src
                    old.seqs.remove(lead)
                target.seqs.add(lead)
                meta.tail = empty
                if s + 1 < len(sets):
                    empty = self.next_empty(empty + 1)
            tails.append(meta.tail)
        lo, hi = min(tails), max(tails)
        for s, (lead, *_) in enumerate(sets):
            dst, src = lo + s, self.cells[lead].tail
            if dst == src:
                continue
            a, b = self.cells[dst], self.cells[src]
            a.pos, b.pos = b.pos, a.pos
            a.src, b.src = b.src, a.src
            a.seqs, b.seqs = b.seqs, a.seqs
            for cell in self.cells:
                cell.tail = {src: dst, dst: src}.get(cell.tail, cell.tail)
        for s, ids in enumerate(sets):
            cell = self.cells[lo + s]
            cell.pos, cell.seqs = positions[s][-1], set(ids)
            for seq in ids:
                self.cells[seq].tail = lo + s
        sources = {cell.src for cell in self.cells}
        self.rs_z = next((i for i in range(lo, hi + 1) if i not in sources), -1)
        for i in range(lo, hi + 1):
            cell = self.cells[i]
            cell.src0 = cell.src if cell.src >= 0 else self.rs_z
            cell.src = i
        self.head, self.n = lo, hi - lo + 1
        self.used = sum(bool(cell.seqs) for cell in self.cells)
        return [self.cells[i].src0 for i in range(lo, hi + 1)]

    def run(self, n_seqs: int, s_copy: list[int], tokens: list[list[int]]) -> list[tuple[int, ...]]:
        """What the graph does with the state rows; returns each sequence's state after its tokens."""
        return run_graph(self.data, self.head, self.rs_z, n_seqs, s_copy, tokens)


def run_graph(
    data: list[tuple[int, ...]], head: int, rs_z: int, n_seqs: int, s_copy: list[int], tokens: list[list[int]]
) -> list[tuple[int, ...]]:
    """Zero one row, read all, write the first `n_seqs` back with their tokens added, the rest as they are."""
    if rs_z >= 0:
        data[rs_z] = ()
    rows = [data[i] for i in s_copy]
    for k, row in enumerate(rows):
        data[head + k] = row + tuple(tokens[k]) if k < n_seqs else row
    return data[head : head + n_seqs]
