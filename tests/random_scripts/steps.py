"""Scripts: steps drawn from a seed, each a verb and a seed of its own, so that any of them may be left out.

What a step does exactly is decided only when it is played, from its seed and from what memory holds by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

VERBS: Mapping[str, int] = {
    "decode": 30,
    "again": 10,
    "encode": 2,
    "seq_rm": 12,
    "seq_cp": 10,
    "seq_keep": 2,
    "seq_add": 9,
    "seq_div": 3,
    "clear": 1,
    "update": 4,
    "save": 6,
    "load": 5,
    "refused": 6,
}
"""How often each verb is drawn, of 100."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One verb; `seed` decides everything else about it."""

    verb: str
    seed: int


def draw_script(seed: int, n_steps: int) -> list[Step]:
    """About `n_steps` steps, the first of them a decode. The same for the same seed."""
    rng = np.random.default_rng([31, seed])
    verbs = list(VERBS)
    weights = np.array([VERBS[verb] for verb in verbs], float)
    n = int(rng.integers(max(2, n_steps // 2), n_steps + n_steps // 2 + 1))
    chosen = ["decode", *rng.choice(verbs, n, p=weights / weights.sum())]
    return [Step(str(verb), int(rng.integers(2**31))) for verb in chosen]
