"""A model in the reference: loaded from a file, or described so that a writer learns which tensors it has.

Knows nothing of contexts beyond making them. Upstream: llama.h, llama_model_*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .library import Library, OracleError
from .params import ContextParams

if TYPE_CHECKING:
    from .context import RefContext


class RefModel:
    """`llama_model`. Close its contexts first."""

    def __init__(
        self, library: Library, path: Path | str, *, use_mmap: bool = True, use_extra_bufts: bool = True
    ) -> None:
        self.library = library
        lib = library.lib
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = lib.LLAMA_LOAD_MODE_MMAP if use_mmap else lib.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = use_extra_bufts
        with library.captured_log() as log:
            self.ptr = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.ptr:
            raise OracleError(f"the reference could not load {path}:\n{''.join(log)[-2000:]}")
        self.vocab = lib.llama_model_get_vocab(self.ptr)

    def context(self, params: ContextParams | None = None) -> RefContext:
        """A context on this model."""
        from .context import RefContext

        return RefContext(self, params or ContextParams())

    def metadata(self, key: str) -> str | None:
        """A scalar metadata value as text, or None."""
        out = self.library.ffi.new("char[]", 1024)
        n = self.library.lib.llama_model_meta_val_str(self.ptr, key.encode(), out, 1024)
        return None if n < 0 else str(self.library.ffi.string(out).decode())

    @property
    def arch(self) -> str:
        return self.metadata("general.architecture") or ""

    @property
    def n_vocab(self) -> int:
        return int(self.library.lib.llama_vocab_n_tokens(self.vocab))

    @property
    def n_embd(self) -> int:
        return int(self.library.lib.llama_model_n_embd(self.ptr))

    @property
    def n_embd_out(self) -> int:
        return int(self.library.lib.llama_model_n_embd_out(self.ptr))

    @property
    def n_layer(self) -> int:
        return int(self.library.lib.llama_model_n_layer(self.ptr))

    @property
    def n_ctx_train(self) -> int:
        return int(self.library.lib.llama_model_n_ctx_train(self.ptr))

    @property
    def n_swa(self) -> int:
        return int(self.library.lib.llama_model_n_swa(self.ptr))

    @property
    def has_encoder(self) -> bool:
        return bool(self.library.lib.llama_model_has_encoder(self.ptr))

    @property
    def decoder_start_token(self) -> int:
        return int(self.library.lib.llama_model_decoder_start_token(self.ptr))

    @property
    def is_recurrent(self) -> bool:
        return bool(self.library.lib.llama_model_is_recurrent(self.ptr))

    @property
    def is_hybrid(self) -> bool:
        return bool(self.library.lib.llama_model_is_hybrid(self.ptr))

    @property
    def has_mrope(self) -> bool:
        """Whether a token has four positions."""
        lib = self.library.lib
        return lib.llama_model_rope_type(self.ptr) in (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The reference's own tokenizer."""
        ffi, data = self.library.ffi, text.encode()
        room = len(data) + 16
        out = ffi.new("llama_token[]", room)
        n = self.library.lib.llama_tokenize(
            self.vocab, data, len(data), out, room, add_special, parse_special
        )
        if n < 0:
            raise OracleError(f"the reference needs {-n} tokens of room, {room} were given")
        return [int(out[i]) for i in range(n)]

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        ffi, room = self.library.ffi, 64 * len(tokens) + 64
        out = ffi.new("char[]", room)
        ids = ffi.new("llama_token[]", list(tokens))
        n = self.library.lib.llama_detokenize(self.vocab, ids, len(tokens), out, room, False, True)
        return bytes(ffi.buffer(out, max(n, 0))).decode(errors="replace")

    def close(self) -> None:
        """Frees the model."""
        if self.ptr:
            self.library.lib.llama_model_free(self.ptr)
            self.ptr = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tensors_wanted(library: Library, metadata: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes (ggml order, no trailing 1s) of every tensor, optional ones too, that a model has.

    metadata: a GGUF file with the model's keys and without tensors.

    Upstream: llama.cpp, llama_model_init_from_user.
    """
    ffi, lib = library.ffi, library.lib
    found: dict[str, tuple[int, ...]] = {}

    def note(tensor: Any) -> None:
        ne = list(tensor.ne)
        while len(ne) > 1 and ne[-1] == 1:
            ne.pop()
        found[ffi.string(tensor.name).decode()] = tuple(ne)

    init = ffi.new("struct gguf_init_params *")
    init.no_alloc = True
    keys = lib.gguf_init_from_file(str(metadata).encode(), init[0])
    if not keys:
        raise OracleError(f"gguf could not read {metadata}")
    handle: Callable[..., Any] = ffi.new_handle(note)
    with library.captured_log() as log:
        model = lib.llama_model_init_from_user(
            keys, lib.oracle_on_tensor, handle, lib.llama_model_default_params()
        )
    lib.gguf_free(keys)
    if not model:
        raise OracleError(f"the reference refused the metadata in {metadata}:\n{''.join(log)[-2000:]}")
    lib.llama_model_free(model)
    return list(found.items())
