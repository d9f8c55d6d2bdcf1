"""The check of `row_sample` on a GPU: it must choose the tokens that NumPy chooses; times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from dflash_plugins.operation import Case, DType
from dflash_plugins.public import public_pairs
from dflash_plugins.row_sample.launch import OPERATIONS, make_cases
from dflash_plugins.testing.gpu import Point
from dflash_plugins.testing.guarded import Arrays
from dflash_plugins.testing.numeric import Accuracy, Array, Check, Run, fill
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


def compare_draws(
    run: Run, logits: Array, params: Sequence[SamplingParams], name: str = "", seed: int = 0
) -> Accuracy:
    """Compares the kernel's tokens for logits [B,S,V] with those of choose_tokens.

    A token may differ if NumPy draws it with a top-p that is larger or smaller by BORDER; `error`
    is the fraction of those that differ.
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
    return Accuracy(name, moved / tokens.size, BORDER, wrong)


def checks() -> list[Check]:
    """Vocabularies below and above the kernel's tile."""
    dtypes = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
    found = []
    for dtype, vocabulary in product(dtypes, (1, 13, 4099, 151_936, 262_144)):
        name = f"row_sample, {dtype.kernel_name}, {vocabulary:,} tokens"
        found.append(Check(name, partial(_check_rows, name, dtype, vocabulary)))
    return found


def _check_rows(name: str, dtype: DType, vocabulary: int, run: Run) -> Accuracy:
    generator = np.random.default_rng(vocabulary)
    logits = 4 * generator.standard_normal((len(PARAMS), 8, vocabulary))
    return compare_draws(run, logits.astype(dtype.numpy), PARAMS, name)


ROWS = ((1, 8), (8, 8), (64, 8))
SAMPLING = {
    "argmax": SamplingParams(),
    "drawn from all": SamplingParams(temperature=0.8, seed=1),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "top-k 20, top-p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=1),
}


def points() -> list[Point]:
    """Every vocabulary, type of logits, batch and entry of SAMPLING.

    The bytes are one read of logits. What sampling opens again is not counted.
    """
    vocabularies: dict[int, str] = {}
    for pair, public in public_pairs().items():
        vocabularies.setdefault(public.target.vocab, pair)
    found = []
    for (vocabulary, pair), dtype, (batch, rows), (way, sampling) in product(
        vocabularies.items(), (DType.BFLOAT16, DType.FLOAT32), ROWS, SAMPLING.items()
    ):
        name = f"{pair} {dtype.kernel_name}, {batch} × {rows} rows, {way}"
        cases = make_cases(name, dtype=dtype, batch=batch, rows=rows, vocabulary=vocabulary)
        moved = cases[0].inputs["logits"].nbytes
        found.append(Point(cases, partial(_make_inputs, cases[0], sampling), moved))
    return found


def _make_inputs(case: Case, sampling: SamplingParams) -> Arrays:
    batch, rows, _ = case.inputs["logits"].shape
    positions = np.arange(batch * rows).reshape(batch, rows)
    logits = fill(case.inputs)["logits"] * case.inputs["logits"].dtype.numpy.type(4)
    return {"logits": logits, "positions": positions, "sampling": pack_sampling([sampling] * batch)}
