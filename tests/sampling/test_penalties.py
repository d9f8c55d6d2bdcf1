"""Penalties and biases: what they add to a row, and what they refuse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dflash_trt.errors import DflashError
from dflash_trt.sampling.penalties import Penalties


def test_a_row_is_changed_as_openai_defines_it() -> None:
    logits = np.linspace(-3, 3, 11, dtype=np.float32)
    counts = Counter([4, 4, 4, 7])
    made = Penalties(frequency=0.5, presence=-0.25, bias=((7, 2.0), (0, -100)))
    expected = logits.astype(np.float64)
    for token in range(11):
        expected[token] -= counts[token] * 0.5 + (counts[token] > 0) * -0.25
    expected[7] += 2
    expected[0] -= 100
    before = logits.copy()
    np.testing.assert_allclose(made.apply(logits, counts), expected, rtol=1e-6)
    np.testing.assert_array_equal(logits, before)
    assert Penalties().is_neutral and not made.is_neutral
    again = Penalties(repetition=1.5).apply(logits, counts, prompt_ids=[0, 10, 10])
    for token in (0, 4, 7, 10):
        before[token] *= 1 / 1.5 if before[token] > 0 else 1.5
    np.testing.assert_allclose(again, before, rtol=1e-6)
    np.testing.assert_array_equal(Penalties(frequency=1.0).apply(logits, {}), logits)


@pytest.mark.parametrize(
    ("fields", "piece"),
    [
        ({"frequency": 2.1}, "frequency_penalty: 2.1 is not a number from -2 to 2"),
        ({"presence": float("nan")}, "presence_penalty: nan"),
        ({"presence": True}, "presence_penalty: True"),
        ({"repetition": 1e-300}, "repetition_penalty: 1e-300 is not a number from 0.01 to 2"),
        ({"bias": ((3, 1e3),)}, "logit_bias: 1000.0 is not a number from -100 to 100"),
        ({"bias": ((-1, 1.0),)}, "logit_bias: -1 is no token id"),
        ({"bias": ((1, 1.0), (1, 2.0))}, "logit_bias: names a token twice"),
        ({"bias": tuple((i, 1.0) for i in range(1025))}, "names 1,025 tokens"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], piece: str) -> None:
    with pytest.raises(DflashError, match=piece):
        Penalties(**fields)
