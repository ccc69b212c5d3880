"""Names of the containers and of the layouts that llama.cpp has written over time.

Containers are the four things that llama.h saves: a context or a sequence, to memory or to a file. Numbers here are
part of the byte format and stand in llama.h as macros.  Upstream: llama.h, llama-context.cpp.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

Container: TypeAlias = Literal["context", "context_file", "sequence", "sequence_file"]
LayoutName: TypeAlias = Literal["current", "2025-06", "2025-05"]

SESSION_MAGIC, SESSION_VERSION = 0x6767736E, 9
"""`ggsn`, a whole context in a file.  Upstream: LLAMA_SESSION_MAGIC."""
SEQ_FILE_MAGIC, SEQ_FILE_VERSION = 0x67677371, 2
"""`ggsq`, a sequence in a file.  Upstream: LLAMA_STATE_SEQ_MAGIC."""
SEQ_MAGIC = 0xAF143CD8
"""Leads a sequence saved to memory, its id follows.  Upstream: llama-context.cpp, io_magic."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What distinguishes one age of the format.

    `streams`: the memory says how many streams it has, and an empty one ends after its cell count. `outputs`: whole
    contexts carry output ids, logits and embeddings. `seq_header`: a sequence saved to memory starts with magic and
    id. `seq_ids`: cells of a single sequence in an attention memory name their id.
    """

    name: LayoutName
    streams: bool
    outputs: bool
    seq_header: bool
    seq_ids: bool


CURRENT = Layout("current", streams=True, outputs=False, seq_header=True, seq_ids=True)
LAYOUTS: tuple[Layout, ...] = (
    CURRENT,
    Layout("2025-06", streams=False, outputs=True, seq_header=False, seq_ids=True),
    Layout("2025-05", streams=False, outputs=True, seq_header=False, seq_ids=False),
)


def layout_of(name: LayoutName) -> Layout:
    """The layout of that name."""
    return next(layout for layout in LAYOUTS if layout.name == name)
