"""SentencePiece-style vocabularies (`tokenizer.ggml.model` = `llama`): pairs are merged by the score of what they make.

Knows tokens and scores; special tokens are cut out before it is called. Needs no library.
Upstream: llama-vocab.cpp, llm_tokenizer_spm_session.
"""

from __future__ import annotations

from heapq import heappop, heappush

from pyggmlkv.errors import GGUFKeyError
from pyggmlkv.text.vocab import Metadata, TokenKind, Vocab, VocabDefaults

SPACE = "\u2581"


class SPM:
    """Text fragments to ids and single ids to bytes, for score-driven vocabularies with byte fallback."""

    clean_spaces = False

    def __init__(self, metadata: Metadata) -> None:
        defaults = VocabDefaults(bos=1, eos=2, unk=0, add_bos=True, add_space_prefix=True)
        self.vocab = Vocab(metadata, defaults)
        scores = metadata.get("tokenizer.ggml.scores")
        values = [0.0] * len(self.vocab) if scores is None else [float(s) for s in scores]  # type: ignore[attr-defined]
        if len(values) < len(self.vocab):
            raise GGUFKeyError(
                f"tokenizer.ggml.scores has {len(values)} entries for {len(self.vocab)} tokens",
                given=len(values),
            )
        self._score = dict(zip(self.vocab.tokens, values, strict=False))
        self._byte_ids = [self._byte_id(b) for b in range(256)]

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Ids of one fragment; a space is put before it when the vocabulary asks for one and a special token precedes."""
        if self.vocab.add_space_prefix and after_special:
            text = " " + text
        ids: list[int] = []
        for symbol in self._merge(text.replace(" ", SPACE)):
            token = self.vocab.ids.get(symbol)
            if token is not None:
                ids.append(token)
            else:
                ids += [i for b in symbol.encode() if (i := self._byte_ids[b]) is not None]
        return ids

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for."""
        text = self.vocab.tokens[token]
        kind = self.vocab.kinds[token]
        if kind == TokenKind.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind == TokenKind.NORMAL:
            return text.replace(SPACE, " ").encode()
        return b"" if kind == TokenKind.UNUSED else text.encode()

    def _byte_id(self, byte: int) -> int | None:
        found = self.vocab.ids.get(f"<0x{byte:02X}>")
        return found if found is not None else self.vocab.ids.get(chr(byte))

    def _merge(self, text: str) -> list[str]:
        """Merges neighbours, best score first and leftmost on a tie, until no pair makes a token."""
        symbols = list(text)
        following = [*range(1, len(symbols)), -1]
        preceding = list(range(-1, len(symbols) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                pair = symbols[left] + symbols[right]
                score = self._score.get(pair)
                if score is not None:
                    heappush(queue, (-score, left, right, pair))

        for i in range(1, len(symbols)):
            offer(i - 1, i)
        while queue:
            _, left, right, pair = heappop(queue)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != pair:
                continue
            symbols[left], symbols[right] = pair, ""
            following[left] = following[right]
            if following[right] >= 0:
                preceding[following[right]] = left
            offer(preceding[left], left)
            offer(left, following[left])
        return [s for s in symbols if s]
