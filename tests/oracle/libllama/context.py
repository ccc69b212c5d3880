"""A context of the reference: batches in, logits and embeddings out, state, graph nodes by name.

Batches are described as the public `Batch` is, so that one script can drive both sides.
Upstream: llama.h, llama_decode, llama_state_*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .library import OracleError
from .memory import RefMemory, tensor_bytes
from .model import RefModel
from .params import ContextParams, to_struct

Floats = npt.NDArray[np.float32]
SequenceIds = int | Sequence[int] | Sequence[Sequence[int]]
Outputs = str | Sequence[int] | npt.NDArray[np.bool_]


class DecodeError(OracleError):
    """`llama_decode` or `llama_encode` did not return 0; `code` is what it returned."""

    def __init__(self, verb: str, code: int, log: str) -> None:
        super().__init__(f"llama_{verb} returned {code}: {log.strip()[-1000:]}")
        self.code = code


@dataclasses.dataclass(frozen=True, slots=True)
class Perf:
    """Milliseconds and counts since the last reset."""

    prompt_ms: float
    eval_ms: float
    n_prompt: int
    n_eval: int
    n_reused: int


class RefContext:
    """`llama_context`."""

    def __init__(self, model: RefModel, params: ContextParams) -> None:
        self.model, self.library, self.params = model, model.library, params
        struct = to_struct(self.library, params)
        self.nodes: dict[str, npt.NDArray[Any]] = {}
        self._capture = self.library.ffi.new_handle(self._on_eval)
        if params.capture is not None:
            struct.cb_eval = self.library.lib.oracle_on_eval
            struct.cb_eval_user_data = self._capture
        with self.library.captured_log() as log:
            self.ptr = self.library.lib.llama_init_from_model(model.ptr, struct)
        if not self.ptr:
            raise OracleError(f"the reference could not make a context:\n{''.join(log)[-2000:]}")
        self.memory = RefMemory(self.library, self.ptr)
        self.n_outputs = 0

    @property
    def n_ctx(self) -> int:
        return int(self.library.lib.llama_n_ctx(self.ptr))

    @property
    def n_ctx_seq(self) -> int:
        return int(self.library.lib.llama_n_ctx_seq(self.ptr))

    def decode(
        self,
        tokens: Sequence[int] | None = None,
        pos: npt.ArrayLike | None = None,
        seq_id: SequenceIds = 0,
        logits: Outputs = "last",
        embd: Floats | None = None,
    ) -> None:
        """One `llama_decode`. Raises: DecodeError."""
        self._run("decode", tokens, pos, seq_id, logits, embd)

    def encode(
        self,
        tokens: Sequence[int] | None = None,
        pos: npt.ArrayLike | None = None,
        seq_id: SequenceIds = 0,
        logits: Outputs = "all",
        embd: Floats | None = None,
    ) -> None:
        """One `llama_encode`. Raises: DecodeError."""
        self._run("encode", tokens, pos, seq_id, logits, embd)

    def _run(self, verb: str, tokens: Any, pos: Any, seq_id: Any, logits: Any, embd: Any) -> None:
        ffi, lib = self.library.ffi, self.library.lib
        n = len(tokens) if tokens is not None else len(embd)
        limit = "n_ubatch" if verb == "encode" else "n_batch"
        room = int(getattr(lib, f"llama_{limit}")(self.ptr))
        if not 0 < n <= room:
            raise OracleError(f"the reference would abort: {n} tokens, {limit} is {room}")
        wanted = outputs(logits, n)
        keep: list[Any] = [wanted]
        batch = ffi.new("llama_batch *")
        batch.n_tokens = n

        def attach(name: str, kind: str, array: npt.NDArray[Any]) -> None:
            keep.append(array)
            setattr(batch, name, ffi.cast(kind, array.ctypes.data))

        if tokens is not None:
            attach("token", "llama_token *", np.ascontiguousarray(tokens, np.int32))
        else:
            attach("embd", "float *", np.ascontiguousarray(embd, np.float32))
        if pos is not None:
            attach("pos", "llama_pos *", np.ascontiguousarray(pos, np.int32).reshape(-1))
        attach("logits", "int8_t *", wanted)
        sets = sequence_sets(seq_id, n)
        attach("n_seq_id", "int32_t *", np.array([len(s) for s in sets], np.int32))
        rows = [ffi.new("llama_seq_id[]", s or [0]) for s in sets]
        table = ffi.new("llama_seq_id *[]", [*rows, ffi.NULL])
        batch.seq_id = table
        self.nodes.clear()
        with self.library.captured_log() as log:
            code = int(getattr(lib, f"llama_{verb}")(self.ptr, batch[0]))
        self.log = log
        if code != 0:
            raise DecodeError(verb, code, "".join(log))
        lib.llama_synchronize(self.ptr)
        self.n_outputs = int(np.count_nonzero(wanted))

    @property
    def logits(self) -> Floats:
        """(n_outputs, n_vocab), in the order of the batch; a copy."""
        return self._floats(self.library.lib.llama_get_logits(self.ptr), (self.n_outputs, self.model.n_vocab))

    @property
    def embeddings(self) -> Floats:
        """(n_outputs, n_embd) without pooling; a copy."""
        ptr = self.library.lib.llama_get_embeddings(self.ptr)
        return self._floats(ptr, (self.n_outputs, self.model.n_embd_out))

    def embeddings_seq(self, seq_id: int) -> Floats:
        """(n_embd,) pooled for one sequence; a copy."""
        n = self.model.n_embd_out
        lib = self.library.lib
        if lib.llama_pooling_type(self.ptr) == lib.LLAMA_POOLING_TYPE_RANK:
            n = lib.llama_model_n_cls_out(self.model.ptr)
        return self._floats(lib.llama_get_embeddings_seq(self.ptr, seq_id), (n,))

    def _floats(self, ptr: Any, shape: tuple[int, ...]) -> Floats:
        if not ptr:
            raise OracleError("the reference has no such output (nothing decoded, or not asked for)")
        data = self.library.ffi.buffer(ptr, 4 * int(np.prod(shape)))
        return np.frombuffer(data, np.float32).reshape(shape).copy()

    def state_get(self, seq_id: int | None = None, *, partial: bool = False) -> bytes:
        """The whole state, or one sequence's. partial: only what a window or recurrent part holds."""
        ffi, lib = self.library.ffi, self.library.lib
        if seq_id is None:
            size = lib.llama_state_get_size(self.ptr)
            out = ffi.new("uint8_t[]", size)
            n = lib.llama_state_get_data(self.ptr, out, size)
        else:
            flags = self._flags(partial)
            size = lib.llama_state_seq_get_size_ext(self.ptr, seq_id, flags)
            out = ffi.new("uint8_t[]", max(size, 1))
            n = lib.llama_state_seq_get_data_ext(self.ptr, out, size, seq_id, flags)
        if n != size:
            raise OracleError(f"the reference wrote {n} of {size} bytes of state")
        return bytes(ffi.buffer(out, n))

    def state_set(self, data: bytes, seq_id: int | None = None, *, partial: bool = False) -> int:
        """Bytes read, 0 when refused."""
        ffi, lib = self.library.ffi, self.library.lib
        source = ffi.from_buffer("uint8_t[]", data)
        with self.library.captured_log() as self.log:
            if seq_id is None:
                return int(lib.llama_state_set_data(self.ptr, source, len(data)))
            return int(
                lib.llama_state_seq_set_data_ext(self.ptr, source, len(data), seq_id, self._flags(partial))
            )

    def _flags(self, partial: bool) -> int:
        lib = self.library.lib
        return int(lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else lib.LLAMA_STATE_SEQ_FLAGS_NONE)

    def state_save(self, path: Path | str, tokens: Sequence[int] = (), seq_id: int | None = None) -> None:
        """Writes a GGSN file, or a GGSQ file of one sequence. Raises: OracleError."""
        lib, name = self.library.lib, str(path).encode()
        ids = self.library.ffi.new("llama_token[]", list(tokens))
        if seq_id is None:
            done = lib.llama_state_save_file(self.ptr, name, ids, len(tokens))
        else:
            done = lib.llama_state_seq_save_file(self.ptr, name, seq_id, ids, len(tokens))
        if not done:
            raise OracleError(f"the reference did not save {path}")

    def state_load(self, path: Path | str, seq_id: int | None = None, capacity: int = 1 << 16) -> list[int]:
        """Reads such a file and returns its tokens. Raises: OracleError."""
        ffi, lib, name = self.library.ffi, self.library.lib, str(path).encode()
        ids, count = ffi.new("llama_token[]", capacity), ffi.new("size_t *")
        with self.library.captured_log() as log:
            if seq_id is None:
                done = lib.llama_state_load_file(self.ptr, name, ids, capacity, count)
            else:
                done = lib.llama_state_seq_load_file(self.ptr, name, seq_id, ids, capacity, count)
        if not done:
            raise OracleError(f"the reference did not load {path}: {''.join(log)[-1000:]}")
        return [int(ids[i]) for i in range(count[0])]

    def set_n_threads(self, n_threads: int, n_threads_batch: int) -> None:
        self.library.lib.llama_set_n_threads(self.ptr, n_threads, n_threads_batch)

    def set_causal_attn(self, causal: bool) -> None:
        self.library.lib.llama_set_causal_attn(self.ptr, causal)

    @property
    def perf(self) -> Perf:
        data = self.library.lib.llama_perf_context(self.ptr)
        return Perf(data.t_p_eval_ms, data.t_eval_ms, data.n_p_eval, data.n_eval, data.n_reused)

    def perf_reset(self) -> None:
        self.library.lib.llama_perf_context_reset(self.ptr)

    def _on_eval(self, tensor: Any, ask: bool) -> bool:
        wanted = self.params.capture
        if wanted is None:
            return False
        lib, label = self.library.lib, self._label
        # only leaves: a computed source may have been overwritten in place; repacked weights cannot be read
        leaves = [s for s in tensor.src if s and s.op == lib.GGML_OP_NONE]
        named = {label(s): s for s in leaves if not label(s).endswith((".weight", ".bias"))}
        named[label(tensor)] = tensor
        chosen = {name: t for name, t in named.items() if wanted(name)}
        if not ask:
            self.nodes.update({n: self._node(t) for n, t in chosen.items() if lib.ggml_is_contiguous(t)})
        return bool(chosen) or not ask

    def _label(self, tensor: Any) -> str:
        return str(self.library.ffi.string(tensor.name).decode())

    def _node(self, tensor: Any) -> npt.NDArray[Any]:
        kinds = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}
        kind = kinds.get(self.library.type_name(tensor.type), np.uint8)
        data = np.frombuffer(tensor_bytes(self.library, tensor), kind)
        return data if kind is np.uint8 else data.reshape(tuple(reversed(list(tensor.ne))))

    def close(self) -> None:
        """Frees the context."""
        if self.ptr:
            self.library.lib.llama_free(self.ptr)
            self.ptr = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def outputs(logits: Outputs, n: int) -> npt.NDArray[np.int8]:
    """(n,) int8 flags from "last", "all", "none", a mask or a list of indices."""
    flags = np.zeros(n, np.int8)
    if isinstance(logits, str):
        flags[{"all": slice(None), "last": slice(max(n - 1, 0), None), "none": slice(0)}[logits]] = 1
    else:
        flags[np.asarray(logits, None if len(logits) else np.intp)] = 1
    return flags


def sequence_sets(seq_id: SequenceIds, n: int) -> list[list[int]]:
    """The sequence ids of each of n tokens."""
    if isinstance(seq_id, int | np.integer):
        return [[int(seq_id)]] * n
    return [[int(s)] if isinstance(s, int | np.integer) else [int(x) for x in s] for s in seq_id]
