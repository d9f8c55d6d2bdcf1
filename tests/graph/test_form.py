"""The form of a graph: narrow ones compute the CPU's function. tests/frozen has all hashes."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.graph.form import GraphForm, Precision
from tests.graph.builds import PAIRS, build
from tests.graph.runner import GraphRunner, tokens
from tests.pairs import PairFactory, TinyPair


@pytest.fixture(params=list(PAIRS))
def built(request: pytest.FixtureRequest, make_pair: PairFactory) -> TinyPair:
    return PAIRS[request.param](make_pair)


def test_float16_computes_the_same_function(built: TinyPair) -> None:
    """ONNX Runtime has float16 kernels on the CPU (bfloat16 it has not)."""
    narrow = build(built, "target", GraphForm(Precision.FLOAT16, cache_length=128))
    ids = tokens(200, 2, 40)
    runners = GraphRunner(built, batch=2), GraphRunner(built, batch=2, models={"target": narrow})
    exact, half = (runner.target(ids, [0, 0]) for runner in runners)
    for name, want in exact.items():
        if name != "choice_ids":
            got = half[name].astype(np.float32)
            assert np.abs(got - want).max() <= 0.02 * np.abs(want).max(), name
    agree = half["choice_ids"] == exact["choice_ids"]
    top = np.sort(exact["logits"], axis=2)
    assert agree[top[..., -1] - top[..., -2] > 0.02 * np.abs(top).max()].all()
