"""The check of `row_sample` on a GPU: it must choose the tokens that NumPy chooses; times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from dflash_plugins.operation import Case, DType, TensorSpec
from dflash_plugins.public import public_pairs
from dflash_plugins.row_sample.launch import OPERATIONS, make_cases
from dflash_plugins.testing.gpu import TorchRunner
from dflash_plugins.testing.guarded import Arrays, Run
from dflash_plugins.testing.numeric import Accuracy, Array, attempt, spread
from dflash_trt.sampling.choice import choose_tokens
from dflash_trt.sampling.params import SamplingParams, pack_sampling

# Relative error allowed in the top-p threshold: the kernel sums probabilities partly in float32.
BORDER = 1e-6

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=2**64 - 1),
    SamplingParams(temperature=0.3, seed=2**63 + 9, top_k=1),
    SamplingParams(temperature=0.7, seed=1, top_k=5),
    SamplingParams(temperature=1.3, seed=2, top_p=0.8),
    SamplingParams(temperature=0.9, seed=3, top_k=40, top_p=0.5),
    SamplingParams(temperature=2.5, seed=4, top_k=10**6, top_p=1e-9),
    SamplingParams(temperature=1e-30, seed=5, top_p=0.999),
    SamplingParams(temperature=1e30, seed=6, top_k=3),
)


def sample(run: Run, inputs: Arrays) -> Array:
    """token_ids [B,S] by both launches; logits, positions and sampling are given."""
    known = dict(inputs)
    for operation in OPERATIONS:
        known |= run(operation.name, {name: known[name] for name in operation.inputs}, {})
    return known["token_ids"]


@dataclass(frozen=True, slots=True)
class Draws:
    """How many tokens were drawn and how many `moved`: they differ from NumPy's.

    `wrong` describes the first that rounding at the border of top-p does not explain.
    """

    drawn: int
    moved: int
    wrong: str | None


def compare_draws(
    run: Run, logits: Array, params: Sequence[SamplingParams], seed: int = 0
) -> Draws:
    """Compares the kernel's tokens for logits [B,S,V] with those of choose_tokens.

    A token may differ if NumPy draws it with a top-p that is larger or smaller by BORDER.
    """
    positions = np.random.default_rng(seed).integers(0, 2**34, logits.shape[:2])
    inputs = {"logits": logits, "positions": positions, "sampling": pack_sampling(params)}
    tokens = sample(run, inputs)
    moved, wrong = 0, None
    for sequence, one in enumerate(params):
        wide = logits[sequence].astype(np.float32)
        expected = choose_tokens(wide, positions[sequence], one)
        for row in np.flatnonzero(tokens[sequence] != expected):
            moved += 1
            alone = wide[row : row + 1], positions[sequence, row : row + 1]
            others = [
                choose_tokens(*alone, replace(one, top_p=min(1.0, one.top_p * factor)))[0]
                for factor in (1 - BORDER, 1 + BORDER)
            ]
            if one.top_p == 1 or tokens[sequence, row] not in others:
                wrong = wrong or f"row {row} of {one}: {tokens[sequence, row]}, not {expected[row]}"
    return Draws(tokens.size, moved, wrong)


def check_accuracy(run: Run) -> Iterator[Accuracy]:
    """Vocabularies below and above the kernel's tile; `error` is the fraction of moved tokens."""
    dtypes = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
    for dtype, vocabulary in spread([*product(dtypes, (1, 13, 4099, 151_936, 262_144))]):
        name = f"row_sample, {dtype.kernel_name}, {vocabulary:,} tokens"
        yield from attempt(name, partial(_check_rows, run, name, dtype, vocabulary))


def _check_rows(run: Run, name: str, dtype: DType, vocabulary: int) -> Accuracy:
    generator = np.random.default_rng(vocabulary)
    logits = 4 * generator.standard_normal((len(PARAMS), 8, vocabulary))
    draws = compare_draws(run, logits.astype(dtype.numpy), PARAMS)
    return Accuracy(name, draws.moved / draws.drawn, BORDER, draws.wrong)


ROWS = ((1, 8), (8, 8), (64, 8))
SAMPLING = {
    "argmax": SamplingParams(),
    "drawn from all": SamplingParams(temperature=0.8, seed=1),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "top-k 20, top-p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=1),
}


@dataclass(frozen=True, slots=True)
class SamplePoint:
    """Both launches for rows of logits, and the sampling parameters of all of them."""

    cases: list[Case]
    sampling: SamplingParams

    @property
    def name(self) -> str:
        return self.cases[0].name

    @property
    def logits(self) -> TensorSpec:
        return self.cases[0].inputs["logits"]

    def arrays(self) -> Arrays:
        """Its inputs."""
        batch, rows, vocabulary = self.logits.shape
        logits = make_logits(batch * rows, vocabulary, self.logits.dtype)
        return {
            "logits": logits.reshape(self.logits.shape),
            "positions": np.arange(batch * rows).reshape(batch, rows),
            "sampling": pack_sampling([self.sampling] * batch),
        }


def make_logits(rows: int, vocabulary: int, dtype: DType) -> Array:
    """Logits [rows,vocabulary] with a standard deviation of 4; more rows begin with the same."""
    values = 4 * np.random.default_rng(0).standard_normal((rows, vocabulary), np.float32)
    return values.astype(dtype.numpy)


def points() -> list[SamplePoint]:
    """Every vocabulary, type of logits, batch and entry of SAMPLING."""
    found = []
    vocabularies: dict[int, str] = {}
    for pair, public in public_pairs().items():
        vocabularies.setdefault(public.target.vocab, pair)
    for vocabulary, pair in vocabularies.items():
        for dtype in (DType.BFLOAT16, DType.FLOAT32):
            for batch, rows in ROWS:
                for way, sampling in SAMPLING.items():
                    name = f"{pair} {dtype.kernel_name}, {batch} × {rows} rows, {way}"
                    cases = make_cases(
                        name, dtype=dtype, batch=batch, rows=rows, vocabulary=vocabulary
                    )
                    found.append(SamplePoint(cases, sampling))
    return found


def measure(torch: Any, point: SamplePoint, runner: TorchRunner) -> dict[str, Any]:
    """Seconds of both launches, and of PyTorch's argmax when greedy.

    The bytes are one read of logits. What sampling opens again is not counted.
    """
    tensors = runner.upload(point.arrays())
    works = []
    for case in point.cases:
        work, outputs = runner.prepare(case, tensors)
        tensors |= outputs
        works.append(work)

    def run() -> None:
        for work in works:
            work()

    seconds = runner.seconds(run)
    rivals = {"argmax": lambda: tensors["logits"].argmax(dim=-1)} if point.sampling.greedy else {}
    return {
        "operation": point.cases[-1].operation.kernel,
        "case": point.name,
        "seconds": seconds,
        "required_bytes": point.logits.nbytes,
        "bytes_per_second": point.logits.nbytes / seconds,
        "rival_seconds": {name: runner.seconds(one) for name, one in rivals.items()},
    }
