"""Decoding token by token: text comes out as soon as its bytes make whole characters, never half of one."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Takes ids one at a time and gives the text that is complete; a character split over tokens waits for its rest."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is still in parts."""
        return self._decoder.decode(self._piece(token))

    def finish(self) -> str:
        """What is left over: a replacement character when the last one never became whole."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
