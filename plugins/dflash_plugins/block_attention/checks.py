"""The check of `block_attention` on a GPU: bfloat16 products and FP8 caches included, and times.

The interpreter cannot show those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from dflash_plugins.block_attention.attention_inputs import attend, expect, make_inputs
from dflash_plugins.block_attention.cases import AttentionShape, draft_shape, make_cases
from dflash_plugins.block_attention.launch import FLOOR, TACTICS
from dflash_plugins.block_attention.reference import TENSOR_CORES, error_bound
from dflash_plugins.operation import Case, DType
from dflash_plugins.public import public_pairs
from dflash_plugins.testing.gpu import Point
from dflash_plugins.testing.numeric import Accuracy, Array, Check, Run, exact, fill, judge
from dflash_trt.core.limits import PAGE_SIZE
from dflash_trt.hardware.kernels import ONE_LAUNCH, RUN

LONG = 2 * ONE_LAUNCH
"""Positions of most caches: every split has a run."""
HEADS = {
    "heads of 64": AttentionShape(16, 2, 64, LONG),
    "heads of 128": AttentionShape(8, 2, 128, LONG, block_size=16),
    "heads of 256": AttentionShape(8, 2, 256, LONG, block_size=16),
    "heads of 512": AttentionShape(8, 1, 512, LONG, block_size=16),
}
FORMS: dict[str, dict[str, Any]] = {
    "draft": {},
    "verify": {"is_causal": True},
    "window": {"window": 100},
    "long window": {"window": ONE_LAUNCH + 100},
    "paged": {"page_size": 32, "is_causal": True},
    "window paged": {"page_size": 24, "window": 5},
}


@dataclass(frozen=True, slots=True)
class AccuracyCase:
    """One call: sequences of `lengths` positions with `rows` query rows each (None: block_size)."""

    name: str
    shape: AttentionShape
    lengths: tuple[int, ...] = (16, 64, 65, RUN, RUN + 1, 1500, LONG)
    rows: int | None = None
    has_sinks: bool = False
    tactic: int = 0


def accuracy_cases() -> list[AccuracyCase]:
    """Each head size and form, at lengths where tiles, splits and pages end; each tactic."""
    found = []
    for (name, shape), (form, changes) in product(HEADS.items(), FORMS.items()):
        for compute in (DType.BFLOAT16, DType.FLOAT16):
            for cache in (compute, DType.FLOAT8):
                typed = replace(shape, compute=compute, cache=cache, **changes)
                title = f"{name}, {form}, {compute.kernel_name}, {cache.kernel_name} cache"
                has_sinks = form in ("verify", "window")
                found.append(AccuracyCase(title, typed, has_sinks=has_sinks))
    for name, shape in HEADS.items():
        floor = replace(shape, is_causal=True)
        found.append(AccuracyCase(f"{name}, tactic {FLOOR}", floor, tactic=FLOOR))
    verify = replace(HEADS["heads of 128"], is_causal=True)
    for tactic in TACTICS:
        large = replace(verify, kv_heads=1)
        found.append(AccuracyCase(f"groups of 8, tactic {tactic}", large, tactic=tactic))
    far = replace(verify, length=2 * LONG + RUN)
    found += [
        AccuracyCase("one row", replace(verify, block_size=8), (1, 64, 1500), 1),
        AccuracyCase("splits of several runs", far, (far.length, far.length - 100)),
    ]
    return found + chunk_cases()


def chunk_cases() -> list[AccuracyCase]:
    """A target's prefill chunks with each tactic: several splits, one split, and one launch."""
    small = replace(HEADS["heads of 64"], is_causal=True, page_size=32)
    large = replace(HEADS["heads of 128"], is_causal=True, page_size=32)
    targets = {"heads of 64": small, "heads of 128": large, "window": replace(small, window=128)}
    return [
        AccuracyCase(
            f"{name}, {cache.kernel_name} cache, chunk of {rows}, tactic {tactic}",
            replace(shape, cache=cache),
            (rows, rows + 700),
            rows,
            has_sinks=True,
            tactic=tactic,
        )
        for name, shape in targets.items()
        for cache in (DType.BFLOAT16, DType.FLOAT8)
        for rows in (17, 100, 512)
        for tactic in TACTICS
    ]


def checks() -> list[Check]:
    """`check_bits`, then every case against float64."""
    cases = [(f"block_attention, {one.name}", one) for one in accuracy_cases()]
    compared = [Check(name, partial(check_case, one)) for name, one in cases]
    return [Check("block_attention, bits", check_bits), *compared]


def check_case(case: AccuracyCase, run: Run) -> Accuracy:
    """One case against float64; whatever a kernel must not read is NaN."""
    run = partial(run, tactic=case.tactic) if case.tactic else run
    inputs = make_inputs(case.shape, case.lengths, case.rows, has_sinks=case.has_sinks)
    actual, expected = attend(run, case.shape, inputs), expect(case.shape, inputs)
    bound = error_bound(case.shape, inputs, expected, TENSOR_CORES)
    return judge(f"block_attention, {case.name}", actual, expected, bound)


def check_bits(run: Run, compute: DType = DType.BFLOAT16) -> Accuracy:
    """Whether results have the same bits for a sequence alone, and for a causal row alone.

    Both calls have few rows, so as many splits.
    """
    shape = AttentionShape(2, 1, 64, ONE_LAUNCH, is_causal=True, compute=compute, cache=compute)
    inputs = make_inputs(shape, (700, 33))
    together = attend(run, shape, inputs)
    found = []
    for b, length in enumerate(inputs["key_value_lengths"]):
        names = ("q", "k_cache", "v_cache", "key_value_lengths")
        alone = inputs | {name: inputs[name][b : b + 1] for name in names}
        if attend(run, shape, alone).tobytes() != together[b : b + 1].tobytes():
            found.append(f"sequence {b} depends on its neighbours")
        for row in (0, 7):
            single = alone | {"q": np.ascontiguousarray(alone["q"][:, :, row : row + 1])}
            single["key_value_lengths"] = np.array([length - 7 + row], np.int32)
            if attend(run, shape, single).tobytes() != together[b : b + 1, :, row].tobytes():
                found.append(f"row {row} of sequence {b} depends on the rows beside it")
    return exact("block_attention, bits", found)


CONTEXTS, BATCHES = (1024, 32_768), (1, 8)
CHUNK_ROWS, CHUNK_CONTEXTS = 512, (0, 8192)


def points() -> list[Point]:
    """Every pair, type of cache and layout: blocks of drafts and prefill chunks of targets.

    Caches are just long enough. The bytes: K and V at visible positions, q, and the result.
    """
    drafts = {name: draft_shape(pair, 0) for name, pair in public_pairs().items()}
    targets = {name: replace(shape, is_causal=True) for name, shape in drafts.items()}
    window = max(public_pairs()["gpt-oss"].target.windows)
    targets["gpt-oss window"] = replace(targets["gpt-oss"], window=window)
    blocks = [
        (f"{pair}, {batch} × {context} positions", shape, batch, context, shape.block_size)
        for pair, shape in drafts.items()
        for context, batch in product(CONTEXTS, BATCHES)
    ]
    chunks = [
        (f"{pair} target, chunk of {CHUNK_ROWS} at {context}", shape, 1, context, CHUNK_ROWS)
        for pair, shape in targets.items()
        for context in CHUNK_CONTEXTS
    ]
    found = []
    for cache, page_size in product((DType.BFLOAT16, DType.FLOAT8), (None, PAGE_SIZE)):
        for title, plain, batch, context, rows in (*blocks, *chunks):
            held = context + rows
            length = -(-held // PAGE_SIZE) * PAGE_SIZE
            shape = replace(plain, cache=cache, page_size=page_size, length=length)
            name = f"{title}, {cache.kernel_name}{' paged' if page_size else ''}"
            cases = make_cases(name, shape, batch=batch, rows=rows)
            seen = min(held, shape.window + rows - 1) if shape.window else held
            kv = 2 * seen * shape.kv_heads * cache.numpy.itemsize
            moved = kv + 2 * rows * shape.query_heads * shape.compute.numpy.itemsize
            inputs = partial(_make_inputs, cases, held)
            found.append(Point(cases, inputs, batch * moved * shape.head_dim))
    return found


def _make_inputs(cases: Sequence[Case], held: int) -> dict[str, Array]:
    """Random inputs of sequences of `held` positions."""
    inputs = fill({**cases[-1].inputs, **cases[0].inputs})  # the sinks are the merge's
    inputs["q"] *= inputs["q"].dtype.type(inputs["q"].shape[3] ** -0.5)
    lengths = np.full(len(inputs["q"]), held, np.int32)
    return inputs | {"key_value_lengths": lengths}
