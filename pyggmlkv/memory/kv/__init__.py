"""The KV cache: tensors, steps, K-shift and defrag of attention memory."""

from pyggmlkv.memory.kv.cache import KVCache

__all__ = ["KVCache"]
