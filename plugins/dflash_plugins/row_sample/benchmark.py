"""`row_sample` on a GPU: argmax and sampling over vocabularies of public pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_plugins.operation import Case, DType, TensorSpec
from dflash_plugins.public import public_pairs
from dflash_plugins.row_sample.launch import make_cases
from dflash_plugins.testing.gpu import TorchRunner
from dflash_plugins.testing.guarded import Arrays
from dflash_plugins.testing.numeric import Array
from dflash_trt.sampling.params import SamplingParams, pack_sampling

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
