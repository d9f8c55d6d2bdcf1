"""The body of `dflash::row_sample`, run by ONNX Runtime, against the NumPy definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from dflash_trt.graph.form import Precision
from dflash_trt.graph.row_sample import row_sample_function
from dflash_trt.sampling.choice import choose_tokens
from dflash_trt.sampling.params import SamplingParams, pack_sampling
from tests.graph.functions import Array, open_function

SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def open_body(
    vocabulary: int, precision: Precision = Precision.FLOAT32, inner: str | None = None
) -> ort.InferenceSession:
    """A session of the body; of the value that it calls `inner`, instead of the tokens."""
    function = row_sample_function()
    if inner is not None:
        del function.output[:]
        function.output.append(inner)
    types = {
        "logits": (precision.onnx_type, ["B", "R", vocabulary]),
        "positions": (TensorProto.INT64, ["B", "R"]),
        "sampling": (TensorProto.INT64, ["B", 4]),
    }
    return open_function(function, types)


def run(
    session: ort.InferenceSession, logits: Array, positions: Array, params: Sequence[SamplingParams]
) -> Array:
    feeds = {"logits": logits, "positions": positions, "sampling": pack_sampling(params)}
    return np.asarray(session.run(None, feeds)[0])


def expect(logits: Array, positions: Array, params: Sequence[SamplingParams]) -> Array:
    rows = zip(logits.astype(np.float32), positions, params, strict=True)
    return np.array([choose_tokens(row, place, one) for row, place, one in rows])


def random_params(generator: np.random.Generator, vocabulary: int) -> SamplingParams:
    """Any parameters, the ends of their ranges among them."""
    top_k = generator.choice([0, 1, 2, 17, vocabulary - 1, vocabulary, vocabulary + 1, 10**12])
    return SamplingParams(
        temperature=float(generator.choice([0, 5e-324, 1e-30, 0.3, 0.7, 1, 2.5, 1e30, 1e308])),
        top_k=int(top_k) or None,
        top_p=float(generator.choice([1, 1, 5e-324, 1e-9, 0.3, 0.9, 0.999, 1 - 2**-53])),
        seed=SEEDS[generator.integers(len(SEEDS))] ^ int(generator.integers(4)),
    )


@pytest.mark.parametrize("vocabulary", [2, 3, 64, 513])
def test_tokens_are_numpys(vocabulary: int) -> None:
    """8,000 rows in all: smooth ones, and such of few values with ties, both zeros and -inf."""
    session = open_body(vocabulary)
    generator = np.random.default_rng(vocabulary)
    few = np.array([-np.inf, -7.5, -0.0, 0.0, 0.25, 3], np.float32)
    for trial in range(10):
        params = [random_params(generator, vocabulary) for _ in range(25)]
        logits = 4 * generator.standard_normal((25, 8, vocabulary)).astype(np.float32)
        if trial % 2:
            logits = few[generator.integers(0, len(few), logits.shape)]
            logits[..., -1] = -1.0  # no row is all -inf
        positions = generator.integers(0, 2**40, logits.shape[:2])
        drawn, expected = run(session, logits, positions, params), expect(logits, positions, params)
        wrong = np.argwhere(drawn != expected)
        assert not len(wrong), f"row {wrong[0].tolist()} of {params[wrong[0, 0]]}"


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_float64_bits_are_read_exactly(name: str) -> None:
    """Every exponent, the subnormal ones too, with the mantissa's ends."""
    exponents = np.arange(-1074, 1024)
    values = np.ldexp(1.0, exponents)
    values = np.concatenate((values, np.nextafter(values, np.inf), np.nextafter(values, 0), [0.0]))
    values = values[np.isfinite(values)]
    sampling = np.zeros((len(values), 4), np.int64)
    sampling[:, {"temperature": 1, "top_p": 3}[name]] = values.view(np.int64)
    feeds = {
        "logits": np.zeros((len(values), 1, 1), np.float32),
        "positions": np.zeros((len(values), 1), np.int64),
        "sampling": sampling,
    }
    (read,) = open_body(1, inner=name).run(None, feeds)
    assert np.array_equal(np.asarray(read)[:, 0, 0], values)
