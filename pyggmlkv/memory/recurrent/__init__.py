"""Recurrent memory: bookkeeping of state cells (pure), and the tensors of their states.

The memory itself is in `recurrent.memory`; importing this package imports no C library.
"""
