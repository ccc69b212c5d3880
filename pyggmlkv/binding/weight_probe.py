"""One question to a device, without allocating: could it run this op if that operand lay in such memory?

Upstream: llama-model-loader.cpp, the end of weight_buft_supported.
"""

from __future__ import annotations

from pyggmlkv._ggml import ffi
from pyggmlkv.binding.buffer import BufferType
from pyggmlkv.binding.device import Device
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import BindingError


def supports_op_with(device: Device, op: Tensor, weight: Tensor, buffer_type: BufferType) -> bool:
    """True if `device` can run the op that makes `op` with its operand `weight` in memory of `buffer_type`.

    Raises: BindingError if `weight` has memory already.
    """
    pointer = weight._pointer
    if pointer.buffer != ffi.NULL or pointer.data != ffi.NULL:
        raise BindingError(f"{weight!r} has memory already; ask with a tensor that has none")
    with buffer_type.alloc(0) as empty:
        pointer.buffer = empty._pointer
        try:
            return device.supports_op(op)
        finally:
            pointer.buffer = ffi.NULL
