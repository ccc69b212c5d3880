"""Cells, slots and sequence operations one cell at a time, with sets and loops: the fast ones must equal it.

Written from the rules, imports nothing of pyggmlkv. A cell is None or a dict with pos, shift, seqs, xy.
"""

from __future__ import annotations

from tests.oracle.mask_naive import is_masked

OPEN = 1 << 40


class NaiveStreams:
    def __init__(self, size, n_seq_max, n_stream=1, swa=("none", 0), div_turn=-1):
        self.size, self.n_seq_max, self.n_stream = size, n_seq_max, n_stream
        self.swa, self.div_turn = swa, div_turn
        self.cells = [[None] * size for _ in range(n_stream)]
        self.heads = [0] * n_stream
        self.copies = []

    def stream(self, seq):
        return seq if self.n_stream > 1 else 0

    def positions(self, seq):
        return [c["pos"] for c in self.cells[self.stream(seq)] if c and seq in c["seqs"]]

    def pos_min(self, seq):
        return min(self.positions(seq), default=None)

    def pos_max(self, seq):
        return max(self.positions(seq), default=None)

    def used(self, stream):
        return sum(c is not None for c in self.cells[stream])

    def used_max_p1(self, stream):
        return max((i + 1 for i, c in enumerate(self.cells[stream]) if c), default=0)

    # sequence operations

    def _each(self, stream, p0, p1):
        lo, hi = (0 if p0 is None else p0), (OPEN if p1 is None else p1)
        for i, cell in enumerate(self.cells[stream]):
            if cell and lo <= cell["pos"] < hi:
                yield i, cell

    def seq_rm(self, seq, p0=None, p1=None):
        for stream in range(self.n_stream) if seq is None else [self.stream(seq)]:
            freed = []
            for i, cell in self._each(stream, p0, p1):
                if seq is not None and seq not in cell["seqs"]:
                    continue
                cell["seqs"] = set() if seq is None else cell["seqs"] - {seq}
                if not cell["seqs"]:
                    self.cells[stream][i] = None
                    freed.append(i)
            if freed and freed[0] < self.heads[stream]:
                self.heads[stream] = freed[0]

    def seq_cp(self, src, dst, p0=None, p1=None):
        s0, s1 = self.stream(src), self.stream(dst)
        if src == dst:
            return
        if s0 == s1:
            for _, cell in self._each(s0, p0, p1):
                if src in cell["seqs"]:
                    cell["seqs"] = cell["seqs"] | {dst}
            return
        self.copies.append((s0, s1))
        self.cells[s1] = [dict(c, seqs={dst}) if c and src in c["seqs"] else None for c in self.cells[s0]]
        self.heads[s1] = self.heads[s0]

    def seq_keep(self, seq):
        stream, freed = self.stream(seq), []
        for i, cell in enumerate(self.cells[stream]):
            if cell and seq in cell["seqs"]:
                cell["seqs"] = {seq}
            elif cell:
                self.cells[stream][i] = None
                freed.append(i)
        if freed and freed[0] < self.heads[stream]:
            self.heads[stream] = freed[0]

    def seq_add(self, seq, p0, p1, delta):
        stream, freed = self.stream(seq), []
        if delta == 0 or (0 if p0 is None else p0) == (OPEN if p1 is None else p1):
            return
        for i, cell in self._each(stream, p0, p1):
            if seq in cell["seqs"]:
                cell["pos"] += delta
                cell["shift"] += delta
                if cell["pos"] < 0:
                    self.cells[stream][i] = None
                    freed.append(i)
        self.heads[stream] = freed[0] if freed else 0

    def seq_div(self, seq, p0, p1, d):
        if d == 1:
            return
        for _, cell in self._each(self.stream(seq), p0, p1):
            if seq in cell["seqs"]:
                old = cell["pos"]
                cell["pos"] = old // d
                cell["shift"] += self.div_turn * (cell["pos"] - old)

    def reset_shift(self):
        for cells in self.cells:
            for cell in cells:
                if cell:
                    cell["shift"] = 0

    # slots; tokens are (pos, ids) or (pos, ids, (x, y)), one list per stream in the order of `seqs`

    def can_use(self, stream, i):
        cell = self.cells[stream][i]
        if cell is None:
            return True
        if len(cell["seqs"]) != 1:
            return False
        (seq,) = cell["seqs"]
        return is_masked(*self.swa, cell["pos"], self.pos_max(seq) + 1)

    def find_slot(self, stream, n, cont=False):
        """Cells one after the other from the head, round once; with `cont` only neighbours count."""
        head = self.heads[stream]
        if head > self.used(stream) + 2 * n:
            head = 0
        if n > self.size:
            return None
        found, n_tested, need = [], 0, n if cont else 1
        while True:
            if head + need > self.size:
                n_tested += self.size - head
                head = 0
                continue
            for _ in range(need):
                usable = self.can_use(stream, head)
                head += 1
                n_tested += 1
                if usable:
                    found.append(head - 1)
                elif cont:
                    break
            if len(found) == n:
                return found
            if cont:
                found = []
            if n_tested >= self.size:
                return None

    def apply(self, stream, idxs, tokens):
        lost = {}
        for i, (pos, ids, *xy) in zip(idxs, tokens, strict=True):
            old = self.cells[stream][i]
            if old:
                (seq,) = old["seqs"]
                lost[seq] = max(lost.get(seq, -1), old["pos"])
            self.cells[stream][i] = {
                "pos": pos,
                "shift": 0,
                "seqs": set(ids),
                "xy": xy[0] if xy else (0, 0),
            }
        for seq, pos in lost.items():
            self.seq_rm(seq, None, pos + 1)
        self.heads[stream] = idxs[-1] + 1

    def snapshot(self, stream):
        return [
            (c["pos"], c["shift"], tuple(sorted(c["seqs"])), c["xy"]) if c else None
            for c in self.cells[stream]
        ]
