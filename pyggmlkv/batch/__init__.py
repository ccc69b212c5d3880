"""Tokens in: a batch is checked, completed and split into ubatches. Pure NumPy; knows no model and no cells.

Upstream: llama-batch.h.
"""

from __future__ import annotations

from pyggmlkv.batch.allocator import BatchAllocator
from pyggmlkv.batch.batch import Batch
from pyggmlkv.batch.positions import SeqPositions
from pyggmlkv.batch.prepare import BatchLimits
from pyggmlkv.batch.sequences import MAX_SEQ
from pyggmlkv.batch.ubatch import UBatch

__all__ = ["MAX_SEQ", "Batch", "BatchAllocator", "BatchLimits", "SeqPositions", "UBatch"]
