"""Sampling: greedy by default, and each setting keeps the tokens that it says."""

from __future__ import annotations

import numpy as np
import pytest

from pyggmlkv.errors import UsageError
from pyggmlkv.sampling import Sampler, SamplerSettings

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], dtype=np.float32))


def drawn(settings: SamplerSettings, n: int = 2000) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    sampler = Sampler(settings)
    return np.bincount([sampler(LOGITS) for _ in range(n)], minlength=LOGITS.size)


def test_temperature_zero_takes_the_best() -> None:
    assert Sampler()(LOGITS) == 1


def test_equal_seeds_draw_equal_tokens() -> None:
    settings = SamplerSettings(temp=1.0, seed=5)
    first, second = Sampler(settings), Sampler(settings)
    assert [first(LOGITS) for _ in range(50)] == [second(LOGITS) for _ in range(50)]


def test_everything_is_drawn_as_often_as_it_is_likely() -> None:
    counts = drawn(SamplerSettings(temp=1.0, top_k=0, top_p=1.0, seed=1), 5000)
    assert np.abs(counts / 5000 - np.exp(LOGITS)).max() < 0.03


def test_top_k_keeps_the_k_best() -> None:
    counts = drawn(SamplerSettings(temp=1.0, top_k=2, top_p=1.0, seed=1))
    assert set(np.flatnonzero(counts)) == {1, 3}


def test_top_p_keeps_the_best_up_to_the_sum() -> None:
    counts = drawn(SamplerSettings(temp=1.0, top_k=0, top_p=0.6, seed=1))
    assert set(np.flatnonzero(counts)) == {1, 3}


def test_a_tiny_top_p_keeps_the_best_one() -> None:
    counts = drawn(SamplerSettings(temp=1.0, top_k=0, top_p=1e-9, seed=1), 50)
    assert set(np.flatnonzero(counts)) == {1}


def test_a_low_temperature_sharpens() -> None:
    counts = drawn(SamplerSettings(temp=0.1, top_k=0, top_p=1.0, seed=1))
    assert counts[1] > 1900


def test_huge_logits_do_not_overflow() -> None:
    sampler = Sampler(SamplerSettings(temp=0.01, top_p=1.0, seed=1))
    assert sampler(np.array([1e4, 3e4, -1e4], dtype=np.float32)) == 1


@pytest.mark.parametrize(
    "values", [{"temp": -1.0}, {"temp": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}], ids=str
)
def test_settings_that_mean_nothing_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SamplerSettings(**values)  # type: ignore[arg-type]
