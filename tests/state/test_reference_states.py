"""States that the reference saves are read with a spec, explain themselves, and are rewritten byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggmlkv.errors import StateError
from pyggmlkv.state.blocks import (
    CellMeta,
    KVBlock,
    KVStateLayer,
    KVStateSpec,
    PartSpec,
    RecurrentBlock,
    RecurrentStateSpec,
    SavedState,
    StateSpec,
    TensorSpec,
)
from pyggmlkv.state.explain import explain
from pyggmlkv.state.format import read_state, write_state
from tests.oracle.libllama import ContextParams, Library, RefContext, RefModel

N_SEQ = 3
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-transposed": ("llama", {"flash_attn": False}),
    "llama-unified": ("llama", {"kv_unified": True}),
    "llama-q8": ("llama", {"type_k": "q8_0", "type_v": "q4_0", "flash_attn": True}),
    "gemma2-iswa": ("gemma2", {}),
    "gemma2-iswa-unified-transposed": ("gemma2", {"kv_unified": True, "flash_attn": False}),
    "deepseek2-mla": ("deepseek2", {}),
    "qwen2vl-mrope": ("qwen2vl", {"kv_unified": True}),
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {}),
    "jamba-hybrid": ("jamba", {}),
    "lfm2-hybrid": ("lfm2", {"kv_unified": True}),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def context(
    request: pytest.FixtureRequest, reference: Library, tiny_model: Callable[[str], Path]
) -> Iterator[RefContext]:
    recipe, settings = request.param
    with RefModel(reference, tiny_model(recipe)) as model:
        params = ContextParams(n_ctx=64 * N_SEQ, n_seq_max=N_SEQ, n_threads=1, n_threads_batch=1, **settings)
        with model.context(params) as ctx:
            for seq_id, n in ((0, 20), (1, 5)):
                pos: Any = np.arange(n)
                if model.has_mrope:
                    pos = np.stack([pos, pos + 1, pos + 2, 0 * pos])
                ctx.decode([(7 * i + seq_id) % 128 for i in range(n)], pos=pos, seq_id=seq_id)
            ctx.memory.seq_cp(0, 2)
            ctx.memory.update()
            yield ctx


def arch_of(data: bytes) -> str:
    n = int.from_bytes(data[:4], "little")
    return data[4 : 4 + n].decode()


def spec_of(ctx: RefContext) -> StateSpec:
    """What the reference's memory looks like, from the sizes of its tensors."""
    parts: list[PartSpec] = []
    infos = ctx.memory.parts
    for index, info in enumerate(infos):
        stored = [ctx.memory.storage(index, slot) for slot in range(info.n_layers)]
        in_partial = index == len(infos) - 1
        if info.kind == "recurrent":
            f32, n_rows = ctx.library.type_number("f32"), info.n_cells * (1 + info.n_rs_seq)
            layers: list[tuple[TensorSpec, TensorSpec] | None] = [None] * ctx.model.n_layer
            for il, r, s in stored:
                if not r:
                    continue
                layers[il] = (TensorSpec(f32, len(r) // n_rows), TensorSpec(f32, len(s) // n_rows))
            parts.append(RecurrentStateSpec(tuple(layers), info.n_cells, N_SEQ, info.kind, in_partial))
            continue
        type_k, type_v = (ctx.library.type_number(t) for t in (ctx.params.type_k, ctx.params.type_v))
        n_rows, kv = info.n_cells * info.n_stream, []
        for il, k, v in stored:
            row = len(v) // n_rows
            kv.append(
                KVStateLayer(
                    il,
                    TensorSpec(type_k, len(k) // n_rows),
                    TensorSpec(type_v, row, row // 2, 2) if v else None,
                )
            )
        parts.append(
            KVStateSpec(
                tuple(kv),
                info.n_cells,
                info.n_stream,
                N_SEQ,
                4 if ctx.model.has_mrope else 1,
                info.v_trans,
                info.kind,
                in_partial,
            )
        )
    return StateSpec(arch_of(ctx.state_get()), tuple(parts))


def cells_of(state: SavedState) -> list[list[CellMeta]]:
    """Cells of each part's streams."""
    out = []
    for part in state.parts:
        streams = [part] if isinstance(part, RecurrentBlock) else [s for s in part.streams if s is not None]
        out.append([s.cells for s in streams])
    return out


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("seq_id", [None, 0, 1, 2])
def test_a_saved_state_is_read_and_rewritten_byte_for_byte(
    context: RefContext, seq_id: int | None, partial: bool
) -> None:
    if seq_id is None and partial:
        return
    data = context.state_get(seq_id, partial=partial)
    container: Any = "context" if seq_id is None else "sequence"
    state = read_state(data, spec_of(context), container, partial=partial)
    assert b"".join(write_state(state, container)) == data
    assert state.seq_id == seq_id
    facts = explain(data)
    assert facts["container"] == container
    assert [p["kind"] for p in facts["parts"]] == [
        "recurrent" if isinstance(p, RecurrentBlock) else "kv" for p in state.parts
    ]


def test_saved_files_are_read_and_rewritten_byte_for_byte(context: RefContext, tmp_path: Path) -> None:
    for seq_id in (None, 1):
        context.state_save(tmp_path / "state", [5, 6, 7], seq_id)
        data = (tmp_path / "state").read_bytes()
        container: Any = "context_file" if seq_id is None else "sequence_file"
        state = read_state(data, spec_of(context), container)
        assert state.tokens is not None and state.tokens.tolist() == [5, 6, 7]
        assert b"".join(write_state(state, container)) == data
        assert explain(data)["tokens"] == [5, 6, 7]


def test_the_cells_read_are_the_cells_of_the_memory(context: RefContext) -> None:
    state = read_state(context.state_get(), spec_of(context), "context")
    for index, (part, streams) in enumerate(zip(state.parts, cells_of(state), strict=True)):
        want = []
        for s in range(context.memory.parts[index].n_stream or 1):
            cells = context.memory.cells(index, s)
            for i in np.flatnonzero(cells.seq.any(axis=1)).tolist():
                ext = [int(cells.x[i]), int(cells.y[i])] if isinstance(part, KVBlock) else None
                want.append((int(cells.pos[i]), cells.sequences(i), ext))
        got = []
        for meta in streams:
            for i in range(len(meta)):
                ids = meta.seq_flat[meta.seq_offset[i] : meta.seq_offset[i + 1]].tolist()
                got.append((int(meta.pos[i]), ids, None if meta.ext is None else meta.ext[i].tolist()))
        has_ext = any(e for _, _, e in got)
        assert got == [(p, ids, e if has_ext else None) for p, ids, e in want]


def test_the_reference_reads_back_what_is_rewritten(context: RefContext) -> None:
    data = context.state_get(1)
    state = read_state(data, spec_of(context), "sequence")
    rewritten = b"".join(write_state(state, "sequence"))
    assert context.state_set(rewritten, 1) == len(rewritten)
    assert context.state_get(1) == data


@pytest.mark.parametrize("percent", [1, 25, 50, 75, 99])
def test_case_15_a_cut_file_of_the_reference_is_refused(context: RefContext, percent: int) -> None:
    data = context.state_get(1)
    with pytest.raises(StateError):
        read_state(data[: len(data) * percent // 100], spec_of(context), "sequence")
