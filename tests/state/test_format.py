"""The byte format of saved states: every container, memory and layout read and rewritten; every damage refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

from pyggmlkv.errors import StateError
from pyggmlkv.state.blocks import (
    CellMeta,
    KVBlock,
    KVStateLayer,
    KVStateSpec,
    KVStream,
    RecurrentBlock,
    RecurrentStateSpec,
    SavedState,
    StateSpec,
    TensorData,
    TensorSpec,
)
from pyggmlkv.state.explain import explain
from pyggmlkv.state.format import read_state, state_nbytes, write_state
from tests.oracle import state_bytes as raw
from tests.oracle.state_bytes import Cell, Rows

F16, Q8_0, F32 = 1, 8, 0
GGSN, GGSQ, SEQ = 0x6767736E, 0x67677371, 0xAF143CD8
N_LAYER = 2


@dataclasses.dataclass(frozen=True)
class Sample:
    """A memory of one kind: what a reader expects, and its bytes whole and for sequence 1."""

    parts: tuple[KVStateSpec | RecurrentStateSpec, ...]
    whole: bytes
    single: bytes
    partial: bytes


def kv_sample(
    name: str = "kv", trans: bool = False, n_stream: int = 1, ext: bool = False, mla: bool = False
) -> Sample:
    k = Rows(Q8_0, 34)
    v = Rows(F16, 32, 16, 2) if trans else Rows(F16, 32)
    tensors = [k] * N_LAYER + ([] if mla else [v] * N_LAYER)
    k_spec = TensorSpec(Q8_0, 34, 32, 34)
    v_spec = None if mla else TensorSpec(F16, 32, 16, 2)
    layers = tuple(KVStateLayer(il, k_spec, v_spec) for il in range(N_LAYER))
    spec = KVStateSpec(layers, 16, n_stream, 4, 4 if ext else 1, trans, name)
    xy: Any = [(5, 6), (7, 8), (9, 10)] if ext else [None] * 3
    if n_stream == 1:
        whole: list[list[Cell]] = [[(0, [0, 1, 3], xy[0]), (1, [0], xy[1]), (5, [1], xy[2])]]
        single: list[list[Cell]] = [[(0, [1], xy[0]), (5, [1], xy[2])]]
    else:
        whole = [[(0, [0], xy[0])], [(0, [1], xy[1]), (5, [1], xy[2])], []]
        single = [[], [(0, [1], xy[1]), (5, [1], xy[2])], []]

    def make(streams):
        return raw.kv(streams, int(trans), N_LAYER, tensors)

    return Sample((spec,), make(whole), make(single), make(single))


def recurrent_sample() -> Sample:
    r, s = TensorSpec(F32, 12), TensorSpec(F32, 64)
    spec = RecurrentStateSpec(((r, s), None, (r, s)), 4, 4)
    tensors = [Rows(F32, 12)] * 2 + [Rows(F32, 64)] * 2
    whole = raw.recurrent([(9, [0, 2], None), (5, [1], None)], 3, tensors)
    single = raw.recurrent([(5, [], None)], 3, tensors)
    return Sample((spec,), whole, single, single)


def joined(first: Sample, second: Sample) -> Sample:
    """Two parts one after the other; the first is left out of partial states."""
    left = tuple(dataclasses.replace(p, in_partial=False) for p in first.parts)
    whole, single = first.whole + second.whole, first.single + second.single
    return Sample((*left, *second.parts), whole, single, second.partial)


SAMPLES = {
    "kv": kv_sample(),
    "kv-transposed": kv_sample(trans=True),
    "streams": kv_sample(n_stream=3),
    "m-rope": kv_sample(ext=True),
    "mla": kv_sample(mla=True),
    "recurrent": recurrent_sample(),
    "iswa": joined(kv_sample("base"), kv_sample("swa", trans=True)),
    "hybrid": joined(kv_sample("attn", n_stream=3), recurrent_sample()),
    "hybrid-iswa": joined(joined(kv_sample("base"), kv_sample("swa")), recurrent_sample()),
}
SAMPLE = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
FORMS = ["context", "context_file", "sequence", "sequence_file", "partial"]


def bytes_of(sample: Sample, form: str) -> tuple[bytes, Any]:
    """The data of one container and the arguments to read it with."""
    if form == "context":
        return raw.arch("llama") + sample.whole, {"container": "context"}
    if form == "context_file":
        head = raw.file_header(GGSN, 9, [3, 1, 4]) + raw.arch("llama")
        return head + sample.whole, {"container": "context_file"}
    if form == "sequence":
        return raw.u32(SEQ, 1) + sample.single, {"container": "sequence"}
    if form == "partial":
        return raw.u32(SEQ, 1) + sample.partial, {"container": "sequence", "partial": True}
    return raw.file_header(GGSQ, 2, [3, 1, 4]) + sample.single, {"container": "sequence_file"}


def read(sample: Sample, data: bytes, args: Any) -> SavedState:
    return read_state(data, StateSpec("llama", sample.parts), **args)


@SAMPLE
@pytest.mark.parametrize("form", FORMS)
def test_every_container_of_every_memory_is_read_and_rewritten_byte_for_byte(
    sample: Sample, form: str
) -> None:
    data, args = bytes_of(sample, form)
    state = read(sample, data, args)
    assert b"".join(write_state(state, args["container"])) == data
    assert state_nbytes(state, args["container"]) == len(data)


def test_the_facts_of_a_state_are_read() -> None:
    data, args = bytes_of(SAMPLES["hybrid"], "context_file")
    state = read(SAMPLES["hybrid"], data, args)
    assert state.arch == "llama" and state.tokens is not None and state.tokens.tolist() == [3, 1, 4]
    attn, recr = state.parts
    assert isinstance(attn, KVBlock) and isinstance(recr, RecurrentBlock)
    assert [s is None or len(s.cells) for s in attn.streams] == [1, 2, True]
    assert recr.cells.pos.tolist() == [9, 5] and recr.cells.seq_flat.tolist() == [0, 2, 1]
    assert len(recr.r) == len(recr.s) == 2 and recr.n_layer == 3
    data, args = bytes_of(SAMPLES["m-rope"], "sequence")
    state = read(SAMPLES["m-rope"], data, args)
    (block,) = state.parts
    assert isinstance(block, KVBlock) and block.streams[0] is not None
    assert state.seq_id == 1 and block.streams[0].cells.ext is not None
    assert block.streams[0].cells.ext.tolist() == [[5, 6], [9, 10]]


def test_rows_are_views_into_the_data() -> None:
    data, args = bytes_of(SAMPLES["kv"], "sequence")
    (block,) = read(SAMPLES["kv"], data, args).parts
    assert isinstance(block, KVBlock) and block.streams[0] is not None
    rows = block.streams[0].k[0].rows()
    assert rows.shape == (2, 34) and np.shares_memory(rows, np.frombuffer(data, np.uint8))


def test_transposed_rows_have_one_line_an_element() -> None:
    data, args = bytes_of(SAMPLES["kv-transposed"], "context")
    (block,) = read(SAMPLES["kv-transposed"], data, args).parts
    assert isinstance(block, KVBlock) and block.streams[0] is not None
    assert block.streams[0].v[0].rows().shape == (16, 3 * 2)


@SAMPLE
@pytest.mark.parametrize("form", FORMS)
def test_truncation_at_any_byte_is_refused(sample: Sample, form: str) -> None:
    data, args = bytes_of(sample, form)
    for n in range(len(data)):
        with pytest.raises(StateError) as caught:
            read(sample, data[:n], args)
        assert 0 <= caught.value.facts["offset"] <= n  # type: ignore[operator]


@SAMPLE
def test_bytes_left_over_are_refused(sample: Sample) -> None:
    data, args = bytes_of(sample, "sequence")
    with pytest.raises(StateError, match="end: found 1 bytes more"):
        read(sample, data + b"\0", args)


@SAMPLE
@pytest.mark.parametrize("form", ["context", "sequence"])
def test_any_changed_byte_outside_tensor_rows_is_refused_or_read_as_written(
    sample: Sample, form: str
) -> None:
    data, args = bytes_of(sample, form)
    rng = random.Random(5)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.randrange(8)
        try:
            state = read(sample, bytes(damaged), args)
        except StateError as error:
            assert error.facts["field"] and "expected" in error.facts and "found" in error.facts
        else:
            assert b"".join(write_state(state, args["container"])) == bytes(damaged)


def changed(sample: Sample, **changes: Any) -> StateSpec:
    (part,) = sample.parts
    return StateSpec("llama", (dataclasses.replace(part, **changes),))


def k_of(spec: TensorSpec) -> tuple[KVStateLayer, ...]:
    (part,) = SAMPLES["kv"].parts
    assert isinstance(part, KVStateSpec)
    return (part.layers[0], dataclasses.replace(part.layers[1], k=spec))


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "type": ("kv", {"layers": k_of(TensorSpec(F16, 34))}, "layer 1: K type: found 8, expected 1"),
    "row-size": ("kv", {"layers": k_of(TensorSpec(Q8_0, 68))}, "layer 1: K row size: found 34, expected 68"),
    "layer-count": ("kv", {"layers": k_of(TensorSpec(Q8_0, 34))[:1]}, "n_layer: found 2, expected 1"),
    "v-layout": ("kv", {"v_trans": True}, "v_trans: found 0, expected 1"),
    "n-stream": ("kv", {"n_stream": 4}, "n_stream: found 1, expected 4"),
    "too-many-cells": ("kv", {"kv_size": 2}, "stream 0: cell count: found 3, expected at most 2"),
    "seq-id": ("kv", {"n_seq_max": 3}, "sequence id: found 3, expected 0 to 2"),
    "no-ext": ("m-rope", {"n_pos_per_embd": 1}, "found"),
    "cells": ("recurrent", {"size": 1}, "cell count: found 2, expected at most 1"),
    "states": (
        "recurrent",
        {"layers": ((TensorSpec(F32, 12), TensorSpec(F32, 64)),)},
        "n_layer: found 3, expected 1",
    ),
}


@pytest.mark.parametrize(("name", "changes", "message"), WRONG.values(), ids=WRONG)
def test_case_15_a_state_that_does_not_fit_is_refused_with_the_field(
    name: str, changes: Any, message: str
) -> None:
    data, args = bytes_of(SAMPLES[name], "context")
    with pytest.raises(StateError, match=message):
        read_state(data, changed(SAMPLES[name], **changes), **args)


@SAMPLE
@pytest.mark.parametrize("form", ["context", "sequence"])
@pytest.mark.parametrize("count", [2**32 - 1, 2**31, 10**6])
def test_case_15_a_huge_count_anywhere_is_refused_before_it_is_used(
    sample: Sample, form: str, count: int
) -> None:
    data, args = bytes_of(sample, form)
    for at in range(len(data) - 3):
        damaged = data[:at] + raw.u32(count) + data[at + 4 :]
        try:
            read(sample, damaged, args)
        except StateError:
            continue


@pytest.mark.parametrize("limit", ["size", "left"])
def test_a_cell_count_of_all_ones_names_the_limit(limit: str) -> None:
    sample = SAMPLES["kv"]
    spec = changed(sample, kv_size=16 if limit == "size" else 2**32 - 1)
    data = raw.u32(SEQ, 1, 1, 2**32 - 1) + sample.single[8:]
    with pytest.raises(StateError, match="at most 16" if limit == "size" else "bytes are left") as caught:
        read_state(data, spec, "sequence")
    assert caught.value.facts["offset"] == 12 and caught.value.facts["found"] == 2**32 - 1


BAD_CELLS: dict[str, tuple[str, list[Cell], str]] = {
    "negative-position": ("context", [(0, [0], None), (-4, [0], None)], "cell 1 position: found -4"),
    "no-ids": ("context", [(0, [], None)], "n_seq_id: found 0, expected 1 to 4"),
    "too-many-ids": ("context", [(0, [0, 1, 2, 3, 0], None)], "n_seq_id: found 5"),
    "repeated-id": ("context", [(0, [1, 1], None)], "ascending"),
    "falling-ids": ("context", [(0, [0, 2], None), (1, [2, 0], None)], "found 0 after 2"),
    "negative-id": ("context", [(0, [-1], None)], "sequence id: found -1"),
    "mixed-ids": ("sequence", [(0, [1], None), (1, [0], None)], "expected 1 as in the first cell"),
    "two-ids": ("sequence", [(0, [1, 2], None)], "cell 0 n_seq_id: found 2, expected 1"),
}


@pytest.mark.parametrize(("form", "cells", "message"), BAD_CELLS.values(), ids=BAD_CELLS)
def test_cells_that_cannot_be_are_refused(form: str, cells: list[Cell], message: str) -> None:
    body = raw.kv([cells], 0, N_LAYER, [Rows(Q8_0, 34)] * 2 + [Rows(F16, 32)] * 2)
    sample = dataclasses.replace(SAMPLES["kv"], whole=body, single=body)
    with pytest.raises(StateError, match=message):
        read(sample, *bytes_of(sample, form))


def test_a_sequence_in_two_recurrent_cells_is_refused() -> None:
    body = raw.recurrent([(1, [0, 1], None), (2, [1], None)], 3, [Rows(F32, 12)] * 2 + [Rows(F32, 64)] * 2)
    sample = dataclasses.replace(SAMPLES["recurrent"], whole=body)
    with pytest.raises(StateError, match="1 in 2 cells"):
        read(sample, *bytes_of(sample, "context"))


def test_a_sequence_with_two_states_is_refused() -> None:
    body = raw.recurrent([(1, [], None), (2, [], None)], 3, [Rows(F32, 12)] * 2 + [Rows(F32, 64)] * 2)
    sample = dataclasses.replace(SAMPLES["recurrent"], single=body)
    with pytest.raises(StateError, match="one state"):
        read(sample, *bytes_of(sample, "sequence"))


def test_a_sequence_in_two_streams_is_refused() -> None:
    sample = SAMPLES["streams"]
    cell: list[Cell] = [(0, [1], None)]
    body = raw.kv([cell, cell, []], 0, N_LAYER, [Rows(Q8_0, 34)] * 2 + [Rows(F16, 32)] * 2)
    with pytest.raises(StateError, match="earlier stream"):
        read(
            dataclasses.replace(sample, single=body),
            *bytes_of(dataclasses.replace(sample, single=body), "sequence"),
        )


HEADERS: dict[str, tuple[str, bytes, str]] = {
    "magic": ("context_file", raw.u32(GGSQ, 9, 0), "magic: found 0x67677371, expected 0x6767736e"),
    "version": ("context_file", raw.u32(GGSN, 8, 0), "version: found 8, expected 9"),
    "seq-version": ("sequence_file", raw.u32(GGSQ, 3, 0), "version: found 3, expected 2"),
    "tokens": ("sequence_file", raw.u32(GGSQ, 2, 2**32 - 1), "token count: found 4294967295"),
    "seq-magic": ("sequence", raw.u32(SEQ + 1, 0), "sequence magic"),
    "seq-id": ("sequence", raw.u32(SEQ) + raw.i32(-1), "sequence id: found -1"),
    "arch": ("context", raw.arch("gemma3"), "architecture: found 'gemma3', expected 'llama'"),
    "arch-length": ("context", raw.u32(2**32 - 1), "architecture length"),
    "empty": ("context", b"", "found 0 bytes"),
}


@pytest.mark.parametrize(("container", "head", "message"), HEADERS.values(), ids=HEADERS)
def test_a_wrong_header_is_refused(container: Any, head: bytes, message: str) -> None:
    sample = SAMPLES["kv"]
    with pytest.raises(StateError, match=message):
        read_state(head + sample.whole if head else b"", StateSpec("llama", sample.parts), container)


def test_a_whole_context_is_not_saved_in_part() -> None:
    with pytest.raises(StateError, match="only sequences"):
        read_state(b"", StateSpec("llama", ()), "context", partial=True)


def test_a_context_without_memory_is_its_architecture_only() -> None:
    state = read_state(raw.arch("bert"), StateSpec("bert", ()), "context")
    assert b"".join(write_state(state, "context")) == raw.arch("bert")


def test_an_empty_sequence_is_a_count_of_zero() -> None:
    sample = SAMPLES["hybrid"]
    empty = raw.kv([[], [], []], 0, N_LAYER, []) + raw.recurrent(
        [], 3, [Rows(F32, 12)] * 2 + [Rows(F32, 64)] * 2
    )
    data, args = bytes_of(dataclasses.replace(sample, single=empty), "sequence")
    state = read(sample, data, args)
    assert b"".join(write_state(state, "sequence")) == data


# writing


def test_scattered_rows_are_written_in_the_order_given() -> None:
    rows = np.arange(60, dtype=np.uint8).reshape(6, 10)
    spec = TensorSpec(Q8_0, 10)
    pieces = tuple(rows[a:b].data.cast("B") for a, b in ((0, 2), (3, 4), (5, 6)))
    cells = CellMeta.of_sequence([0, 1, 3, 5], 2)
    state = SavedState((KVBlock((KVStream(cells, False, (TensorData(spec, pieces),), ()),)),), seq_id=2)
    data = b"".join(write_state(state, "sequence"))
    assert data.endswith(rows[[0, 1, 3, 5]].tobytes())
    layer = KVStateLayer(0, spec, None)
    back = read_state(data, StateSpec("llama", (KVStateSpec((layer,), 8, n_seq_max=3),)), "sequence")
    assert isinstance(back.parts[0], KVBlock) and back.parts[0].streams[0] is not None
    assert back.parts[0].streams[0].k[0].rows().tolist() == rows[[0, 1, 3, 5]].tolist()


def test_tensor_buffers_are_handed_through_uncopied() -> None:
    big = np.zeros(1 << 20, np.uint8)
    tensor = TensorData(TensorSpec(F16, 1 << 20), (big.data,))
    state = SavedState((KVBlock((KVStream(CellMeta.of_sequence([0], 0), False, (tensor,), ()),)),), seq_id=0)
    assert any(np.shares_memory(np.frombuffer(p, np.uint8), big) for p in write_state(state, "sequence"))


@pytest.mark.parametrize(
    ("container", "state", "message"),
    [
        ("context", SavedState(()), "needs arch"),
        ("sequence", SavedState(()), "needs seq_id"),
    ],
)
def test_a_state_that_lacks_what_its_container_says_is_refused(
    container: Any, state: SavedState, message: str
) -> None:
    with pytest.raises(StateError, match=message):
        write_state(state, container)


def test_a_tensor_with_too_few_bytes_is_refused_before_anything_is_written() -> None:
    tensor = TensorData(TensorSpec(F16, 32), (memoryview(bytes(31)),))
    state = SavedState((KVBlock((KVStream(CellMeta.of_sequence([0], 0), False, (tensor,), ()),)),), seq_id=0)
    with pytest.raises(StateError, match="has 31 bytes, 1 cells of 32 bytes"):
        write_state(state, "sequence")


@pytest.mark.parametrize("seed", range(5))
def test_random_cells_survive(seed: int) -> None:
    rng = random.Random(seed)
    n, n_seq = rng.randrange(1, 300), rng.choice([2, 64, 256])
    cells: list[Cell] = [
        (rng.randrange(10**6), sorted(rng.sample(range(n_seq), rng.choice([1, 1, 1, 2]))), None)
        for _ in range(n)
    ]
    body = raw.arch("a") + raw.kv([cells], 0, 1, [Rows(F32, 4)])
    part = KVStateSpec((KVStateLayer(0, TensorSpec(F32, 4), None),), 512, n_seq_max=n_seq)
    state = read_state(body, StateSpec("a", (part,)), "context")
    (block,) = state.parts
    assert isinstance(block, KVBlock) and block.streams[0] is not None
    got = block.streams[0].cells
    for i, (pos, ids, _) in enumerate(cells):
        assert got.pos[i] == pos
        assert got.seq_flat[got.seq_offset[i] : got.seq_offset[i + 1]].tolist() == ids
    assert b"".join(write_state(state, "context")) == body


# older layouts


def older(name: str) -> tuple[StateSpec, bytes, bytes, bytes]:
    """A spec, and a whole state, a sequence and a sequence without cells in an older layout."""
    (part,) = SAMPLES["kv-transposed"].parts
    tensors = [Rows(Q8_0, 34)] * 2 + [Rows(F16, 32, 16, 2)] * 2
    whole: list[Cell] = [(0, [0, 1], None), (1, [0], None)]
    ids = [1] if name == "2025-06" else []

    def make(cells):
        return raw.kv([cells], 1, N_LAYER, tensors, counted=False)

    recurrent = raw.recurrent([(4, [0], None)], 3, [Rows(F32, 12)] * 2 + [Rows(F32, 64)] * 2)
    head = raw.arch("llama") + raw.outputs(2, 5, 3)
    spec = StateSpec("llama", (part,))
    if name == "2025-06":
        spec = StateSpec("llama", (part, *SAMPLES["recurrent"].parts))
        single = raw.recurrent([(4, [], None)], 3, [Rows(F32, 12)] * 2 + [Rows(F32, 64)] * 2)
        none = raw.recurrent([], 3, [Rows(F32, 12)] * 2 + [Rows(F32, 64)] * 2)
        return spec, head + make(whole) + recurrent, make([(0, ids, None)]) + single, make([]) + none
    return spec, head + make(whole), make([(0, ids, None), (1, ids, None)]), make([])


@pytest.mark.parametrize("name", ["2025-05", "2025-06"])
def test_older_layouts_are_read_by_name(name: Any) -> None:
    spec, whole, single, empty = older(name)
    state = read_state(whole, spec, "context", layout=name)
    assert state.outputs is not None
    assert state.outputs.ids.tolist() == [0, 1]
    assert state.outputs.logits.tolist() == list(range(10)) and state.outputs.embeddings.tolist() == list(
        range(6)
    )
    block = state.parts[0]
    assert isinstance(block, KVBlock) and block.streams[0] is not None
    assert block.streams[0].cells.pos.tolist() == [0, 1]
    state = read_state(single, spec, "sequence", layout=name)
    assert state.seq_id is None
    read_state(raw.file_header(GGSQ, 2, [1]) + single, spec, "sequence_file", layout=name)
    read_state(raw.file_header(GGSN, 9, [1]) + whole, spec, "context_file", layout=name)
    state = read_state(empty, spec, "sequence", layout=name)
    assert isinstance(state.parts[0], KVBlock) and state.parts[0].streams[0] is not None


@pytest.mark.parametrize("name", ["2025-05", "2025-06"])
@pytest.mark.parametrize("which", [1, 2, 3], ids=["whole", "single", "empty"])
def test_truncation_of_older_layouts_is_refused(name: Any, which: int) -> None:
    spec, data = older(name)[0], older(name)[which]
    container: Any = "context" if which == 1 else "sequence"
    for n in range(len(data)):
        with pytest.raises(StateError):
            read_state(data[:n], spec, container, layout=name)


def test_the_layouts_are_not_confused() -> None:
    spec, _, single, _ = older("2025-05")
    for other in ("2025-06", "current"):
        with pytest.raises(StateError):
            read_state(single, spec, "sequence", layout=other)  # type: ignore[arg-type]


def test_older_logits_counts_are_checked() -> None:
    spec, whole, _, _ = older("2025-05")
    at = 4 + 5 + 4 + 8
    for count in (2**64 - 1, 2**62, 11):
        with pytest.raises(StateError, match="logits count"):
            read_state(whole[:at] + raw.u64(count) + whole[at + 8 :], spec, "context", layout="2025-05")


def test_an_older_state_does_not_fit_a_memory_with_streams() -> None:
    spec = changed(SAMPLES["streams"])
    with pytest.raises(StateError, match="has no streams"):
        read_state(older("2025-06")[2], spec, "sequence", layout="2025-06")


# without a model


@SAMPLE
@pytest.mark.parametrize("form", FORMS)
def test_a_state_explains_itself(sample: Sample, form: str) -> None:
    data, args = bytes_of(sample, form)
    facts = explain(data)
    parts = [p for p in sample.parts if p.in_partial or form != "partial"]
    assert (facts["container"], facts["layout"], facts["nbytes"]) == (args["container"], "current", len(data))
    assert [p["kind"] for p in facts["parts"]] == [
        "kv" if isinstance(p, KVStateSpec) else "recurrent" for p in parts
    ]
    for part, spec in zip(facts["parts"], parts, strict=True):
        if isinstance(spec, KVStateSpec):
            used = [s for s in part["streams"] if s["n_cells"]]
            assert part["n_stream"] == spec.n_stream and part["m_rope"] == (spec.n_pos_per_embd > 1)
            assert all(s["v_trans"] == spec.v_trans for s in used)
            assert all(len(s["k"]) == 2 and len(s["v"]) == 2 * (spec.layers[0].v is not None) for s in used)
        else:
            assert part["n_layer"] == 3 and [len(part["r"]), len(part["s"])] == [2, 2]
    json.dumps(facts)


def test_an_explanation_counts_cells_per_sequence_and_names_types() -> None:
    data, _ = bytes_of(SAMPLES["kv"], "context_file")
    facts = explain(data, type_names={8: "q8_0", 1: "f16"})
    (stream,) = facts["parts"][0]["streams"]
    assert facts["tokens"] == [3, 1, 4] and facts["arch"] == "llama"
    assert stream["sequences"]["1"] == {"n_cells": 2, "pos_min": 0, "pos_max": 5}
    assert stream["k"][0] == {"type": 8, "row_size": 34, "nbytes": 3 * 34, "type_name": "q8_0"}


@pytest.mark.parametrize("name", ["2025-05", "2025-06"])
def test_older_states_are_recognised(name: str) -> None:
    _, whole, single, _ = older(name)
    assert explain(whole)["layout"] in ("2025-06", name)
    assert explain(raw.file_header(GGSQ, 2, [1]) + single)["layout"] == name


def test_a_damaged_state_is_explained_as_far_as_it_goes() -> None:
    data, _ = bytes_of(SAMPLES["iswa"], "sequence_file")
    facts = explain(data[:-1])
    assert facts["tokens"] == [3, 1, 4] and "parts" not in facts
    assert facts["problem"]["offset"] > len(data) // 2


@pytest.mark.parametrize("data", [b"", b"abc", b"\x7fELF" + bytes(60), b"GGUF" + bytes(60)], ids=repr)
def test_other_files_are_not_explained(data: bytes) -> None:
    with pytest.raises(StateError):
        explain(data)


@pytest.mark.parametrize("seed", range(20))
def test_explaining_random_damage_gives_facts_or_a_state_error(seed: int) -> None:
    rng = random.Random(seed)
    sample = rng.choice(list(SAMPLES.values()))
    data = bytearray(bytes_of(sample, rng.choice(FORMS))[0])
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    with contextlib.suppress(StateError):
        json.dumps(explain(bytes(data[: rng.randrange(1, len(data) + 1)])))
