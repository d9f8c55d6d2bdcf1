"""`row_sample` on a GPU: argmax and sampling over vocabularies of public pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_plugins.operation import Case, DType
from dflash_plugins.public import public_pairs
from dflash_plugins.row_sample.launch import make_case
from dflash_plugins.testing.gpu import TorchRunner
from dflash_trt.sampling.params import SamplingParams, pack_sampling

ROWS = ((1, 8), (8, 8), (64, 8))
SAMPLING = {
    "argmax": SamplingParams(),
    "drawn from all": SamplingParams(temperature=0.8, seed=1),
    "top-k 20, top-p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=1),
}


@dataclass(frozen=True, slots=True)
class SamplePoint:
    """Rows of logits and the sampling parameters of all of them."""

    case: Case
    sampling: SamplingParams

    @property
    def name(self) -> str:
        return self.case.name


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
                    case = make_case(
                        name, dtype=dtype, batch=batch, rows=rows, vocabulary=vocabulary
                    )
                    found.append(SamplePoint(case, sampling))
    return found


def measure(torch: Any, point: SamplePoint, runner: TorchRunner) -> dict[str, Any]:
    """Seconds of the kernel, and of PyTorch's argmax when greedy; the bytes are one read of logits.

    Sampling reads the rows several times, so its bandwidth looks lower than it is.
    """
    logits = point.case.inputs["logits"]
    batch, rows, _ = logits.shape
    values = 4 * np.random.default_rng(0).standard_normal(logits.shape, np.float32)
    arrays = {
        "logits": values.astype(logits.dtype.numpy),
        "positions": np.arange(batch * rows).reshape(batch, rows),
        "sampling": pack_sampling([point.sampling] * batch),
    }
    tensors = runner.upload(arrays)
    rivals = {"argmax": lambda: tensors["logits"].argmax(dim=-1)} if point.sampling.greedy else {}
    return runner.measure(point.case, tensors, rivals, logits.nbytes)
