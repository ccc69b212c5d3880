from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyggmlkv.batch import Batch
from pyggmlkv.errors import BatchError

MISUSE: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({}, "tokens", "give tokens or embd"),
    "floats_as_tokens": ({"tokens": [1.5]}, "tokens", "expected integers"),
    "whole_floats_as_tokens": ({"tokens": np.ones(2, dtype=np.float32)}, "tokens", "expected integers"),
    "bools_as_tokens": ({"tokens": [True]}, "tokens", "expected integers"),
    "text_as_tokens": ({"tokens": "abc"}, "tokens", "expected integers"),
    "a_number_as_tokens": ({"tokens": 5}, "tokens", r"shape \(\)"),
    "ragged_tokens": ({"tokens": [[1], [1, 2]]}, "tokens", "not a regular array"),
    "tokens_in_rows": ({"tokens": [[1, 2]]}, "tokens", r"shape \(1, 2\)"),
    "token_beyond_32_bits": ({"tokens": [2**40]}, "tokens", "beyond 32 bits"),
    "token_beyond_64_bits": ({"tokens": [2**80]}, "tokens", "expected integers"),
    "unsigned_token_beyond_31_bits": (
        {"tokens": np.array([2**32 - 1], dtype=np.uint32)},
        "tokens",
        "32 bits",
    ),
    "embd_flat": ({"embd": [1.0, 2.0]}, "embd", r"expected \(n_tokens, n_embd\)"),
    "embd_ragged": ({"embd": [[1.0], [1.0, 2.0]]}, "embd", "not a regular array"),
    "embd_text": ({"embd": [["a"]]}, "embd", "expected floats"),
    "embd_complex": ({"embd": [[1j]]}, "embd", "expected floats"),
    "embd_longer_than_tokens": ({"tokens": [1], "embd": [[1.0], [2.0]]}, "embd", "for 2 tokens"),
    "pos_too_short": ({"tokens": [1, 2], "pos": [0]}, "pos", "for 1 tokens, the batch has 2"),
    "pos_sections_too_short": ({"tokens": [1, 2], "pos": [[0], [0]]}, "pos", "for 1 tokens"),
    "pos_cube": ({"tokens": [1], "pos": [[[0]]]}, "pos", r"shape \(1, 1, 1\)"),
    "pos_number": ({"tokens": [1], "pos": 0}, "pos", r"shape \(\)"),
    "pos_floats": ({"tokens": [1], "pos": [0.0]}, "pos", "expected integers"),
    "pos_beyond_32_bits": ({"tokens": [1], "pos": [2**31]}, "pos", "beyond 32 bits"),
    "seq_id_none": ({"tokens": [1], "seq_id": None}, "seq_id", "expected an int"),
    "seq_id_bool": ({"tokens": [1], "seq_id": True}, "seq_id", "expected an int"),
    "seq_id_float": ({"tokens": [1], "seq_id": 0.0}, "seq_id", "expected an int"),
    "seq_id_text": ({"tokens": [1], "seq_id": "0"}, "seq_id", "expected an int"),
    "seq_id_too_short": ({"tokens": [1, 2], "seq_id": [0]}, "seq_id", "for 1 tokens"),
    "seq_id_too_long": ({"tokens": [1], "seq_id": [[0], [1]]}, "seq_id", "for 2 tokens"),
    "seq_id_floats": ({"tokens": [1], "seq_id": [0.5]}, "seq_id", "expected integers"),
    "seq_id_list_of_floats": ({"tokens": [1], "seq_id": [[0, 0.5]]}, "seq_id", "expected integers"),
    "seq_id_too_deep": ({"tokens": [1], "seq_id": [[[0]]]}, "seq_id", "deeper"),
    "seq_id_array_too_deep": ({"tokens": [1], "seq_id": np.zeros((1, 1, 1), dtype=int)}, "seq_id", "deeper"),
    "logits_unknown_word": ({"tokens": [1], "logits": "first"}, "logits", "'first'"),
    "logits_mask_too_long": ({"tokens": [1], "logits": [True, False]}, "logits", "for 2 tokens"),
    "logits_index_outside": ({"tokens": [1], "logits": [1]}, "logits", "asks for token 1"),
    "logits_negative_index": ({"tokens": [1], "logits": [-1]}, "logits", "asks for token -1"),
    "logits_index_twice": ({"tokens": [1, 2], "logits": [1, 1]}, "logits", "token 1 twice"),
    "logits_floats": ({"tokens": [1], "logits": [0.0]}, "logits", "expected integers"),
    "logits_rows": ({"tokens": [1], "logits": [[True]]}, "logits", r"shape \(1, 1\)"),
    "logits_ragged": ({"tokens": [1], "logits": [[True], [True, False]]}, "logits", "not a mask"),
    "logits_number": ({"tokens": [1], "logits": 0}, "logits", r"shape \(\)"),
    "logits_none": ({"tokens": [1], "logits": None}, "logits", r"shape \(\)"),
}


@pytest.mark.parametrize("case", MISUSE.values(), ids=MISUSE.keys())
def test_misuse_names_the_field(case: tuple[dict[str, Any], str, str]) -> None:
    arguments, field, message = case
    with pytest.raises(BatchError, match=message) as caught:
        Batch(**arguments)
    assert caught.value.facts["field"] == field


@pytest.mark.parametrize(
    "tokens",
    [[3, 4], (3, 4), range(3, 5), np.array([3, 4], dtype=np.uint8), iter([3, 4]), {3: "", 4: ""}.keys()],
)
def test_tokens_come_from_any_integers(tokens: Any) -> None:
    batch = Batch(tokens)
    assert batch.tokens is not None
    assert batch.tokens.dtype == np.dtype(np.int32)
    assert batch.tokens.tolist() == [3, 4]


def test_arguments_are_copied() -> None:
    tokens, pos = np.array([3, 4], dtype=np.int32), np.array([0, 1], dtype=np.int32)
    batch = Batch(tokens, pos=pos)
    tokens[:] = pos[:] = 9
    assert batch.tokens is not None and batch.pos is not None
    assert (batch.tokens.tolist(), batch.pos.tolist()) == ([3, 4], [0, 1])


def test_fields_are_read_only() -> None:
    batch = Batch([3, 4], pos=[0, 1], seq_id=[[0], [0, 1]], embd=np.zeros((2, 2)))
    fields = (batch.tokens, batch.pos, batch.seq_id_flat, batch.seq_id_offset, batch.embd, batch.output)
    for array in fields:
        assert array is not None and not array.flags.writeable


@pytest.mark.parametrize(
    ("seq_id", "flat", "offset"),
    [
        ([0, 1], [0, 1], None),
        ([[0], [1]], [0, 1], None),
        ([[0, 2], [1]], [0, 2, 1], [0, 2, 3]),
        ([5, (1, 0)], [5, 1, 0], [0, 1, 3]),
        ([[], [1]], [1], [0, 0, 1]),
        (np.array([[0, 1], [2, 3]]), [0, 1, 2, 3], [0, 2, 4]),
        (np.array([[0], [2]]), [0, 2], None),
        ([[], [0, 1]], [0, 1], [0, 0, 2]),
    ],
    ids=["each", "lists_of_one", "lists", "mixed", "empty_list", "rows", "rows_of_one", "empty_and_two"],
)
def test_sequence_ids_keep_their_order(seq_id: Any, flat: list[int], offset: list[int] | None) -> None:
    batch = Batch([7, 8], seq_id=seq_id)
    assert batch.seq_id_flat is not None
    assert batch.seq_id_flat.tolist() == flat
    assert (None if batch.seq_id_offset is None else batch.seq_id_offset.tolist()) == offset


@pytest.mark.parametrize(
    ("logits", "mask", "order"),
    [
        ("last", [False, False, True], None),
        ("all", [True, True, True], None),
        ("none", [False, False, False], None),
        ([], [False, False, False], None),
        ([True, False, False], [True, False, False], None),
        ([0, 2], [True, False, True], None),
        ([2, 0], [True, False, True], [2, 0]),
    ],
    ids=["last", "all", "none", "empty", "mask", "ascending", "descending"],
)
def test_outputs_are_a_mask_and_an_order(logits: Any, mask: list[bool], order: list[int] | None) -> None:
    batch = Batch([7, 8, 9], logits=logits)
    assert batch.output.tolist() == mask
    assert (None if batch.output_order is None else batch.output_order.tolist()) == order


@pytest.mark.parametrize("arguments", [{"tokens": []}, {"embd": np.zeros((0, 4))}], ids=["tokens", "embd"])
def test_an_empty_batch_can_be_made(arguments: dict[str, Any]) -> None:
    assert len(Batch(**arguments)) == 0


def test_repr_is_one_line() -> None:
    assert repr(Batch([7, 8], seq_id=[1, 0])) == "Batch(2 tokens, seq_id=[0, 1], 1 outputs)"
