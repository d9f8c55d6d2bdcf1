"""What the small kernels add to a step of a public pair: their time, and the share of the step.

The step is the least that it can be: weights and K and V read once at the bandwidth that streaming
reaches, without launches, products or a host; of experts as many as one row chooses. So a share is
the most that it can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from dflash_plugins.accept.launch import make_case as accept_case
from dflash_plugins.kv_cache_update.launch import make_case as update_case
from dflash_plugins.kv_caches import WriteShape
from dflash_plugins.kv_feature_injection.launch import make_case as injection_case
from dflash_plugins.operation import DType
from dflash_plugins.public import public_pairs
from dflash_plugins.roofline.kernels import predict_point
from dflash_plugins.roofline.rates import GpuRates
from dflash_plugins.row_sample.benchmark import SAMPLING, SamplePoint
from dflash_plugins.row_sample.launch import make_cases as sample_cases
from dflash_trt.config import PublishedDecoder, PublishedPair, PublishedTarget
from dflash_trt.core.formats import Format
from dflash_trt.core.limits import PAGE_SIZE

SMALL_KERNELS = ("accept", "kv_cache_update", "kv_feature_injection", "row_sample")
ITEM_BYTES = 2
"""Of what is not quantised, and of K and V."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """Kernels of one name in a step of `pair`: `count` launches, of `seconds` together.

    `what` tells forms and uses of one kernel apart. `step_seconds` is the least of the whole step.
    """

    pair: str
    kernel: str
    what: str
    batch: int
    context: int
    count: int
    seconds: float
    step_seconds: float

    @property
    def share(self) -> float:
        return self.seconds / self.step_seconds

    def as_json(self, gpu: str) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "what": self.what,
            "gpu": gpu,
            "pair": self.pair,
            "batch": self.batch,
            "context": self.context,
            "launches": self.count,
            "predicted_seconds": self.seconds,
            "predicted_step_share": self.share,
        }


def step_parts(
    rates: GpuRates,
    pair: str,
    kernels: Sequence[str],
    batches: Sequence[int],
    context: int,
    folder: Path,
) -> Iterator[StepPart]:
    """Those of `kernels` in a step of each batch, with sequences of `context` tokens."""
    shape = public_pairs()[pair]
    for batch in batches:
        least = step_seconds(rates, shape, batch, context)
        for kernel, what, count, point in _points(shape, batch, context):
            if kernel not in kernels:
                continue
            time = predict_point(point, rates, folder)
            assert time is not None
            yield StepPart(
                pair=pair,
                kernel=kernel,
                what=what,
                batch=batch,
                context=context,
                count=count,
                seconds=count * time.seconds,
                step_seconds=least,
            )


def _points(pair: PublishedPair, batch: int, context: int) -> Iterator[tuple[str, str, int, Any]]:
    """Kernel, form, launches of a step, and the point: one of each layer that has it."""
    draft, target = pair.draft, pair.target
    rows = draft.block_size
    plain = WriteShape(
        batch=batch,
        rows=rows,
        kv_heads=draft.kv_heads,
        head_dim=draft.head_dim,
        length=-(-(context + rows) // PAGE_SIZE) * PAGE_SIZE,
    )
    paged = replace(plain, page_size=PAGE_SIZE)
    yield "accept", "", 1, accept_case("", batch=batch, rows=rows)
    yield "kv_feature_injection", "linear", draft.layers, injection_case("", plain)
    yield "kv_feature_injection", "paged", draft.layers, injection_case("", paged)
    yield "kv_cache_update", "paged", target.layers + draft.layers, update_case("", paged)
    samples = sample_cases(
        "", dtype=DType.BFLOAT16, batch=batch, rows=rows, vocabulary=target.vocab
    )
    for way, sampling in SAMPLING.items():
        yield "row_sample", way, 1, SamplePoint(samples, sampling)


def step_seconds(rates: GpuRates, pair: PublishedPair, batch: int, context: int) -> float:
    """The least that a step can take: what it reads, at the bandwidth that streaming reaches."""
    draft, target = pair.draft, pair.target
    # The draft borrows the target's head, and its fc takes the layers that it taps.
    others = 2 * target.vocab * target.hidden
    others += len(draft.target_layer_ids) * target.hidden * draft.hidden
    weights = _target_bytes(target) + _dense_bytes(draft) + ITEM_BYTES * others
    caches = batch * (_cache_bytes(target, context) + _cache_bytes(draft, context))
    return (weights + caches) / rates.reach


def _attention_bytes(decoder: PublishedDecoder) -> int:
    """q, k, v and o of all layers."""
    elements = 2 * (decoder.heads + decoder.kv_heads) * decoder.head_dim
    return ITEM_BYTES * decoder.layers * decoder.hidden * elements


def _dense_bytes(decoder: PublishedDecoder) -> int:
    """All layers of a dense decoder."""
    mlp = 3 * decoder.hidden * decoder.intermediate
    return _attention_bytes(decoder) + ITEM_BYTES * decoder.layers * mlp


def _target_bytes(target: PublishedTarget) -> float:
    """All layers of a target, with as many experts of each as one row chooses."""
    if target.experts_per_token is None:
        return _dense_bytes(target)
    chosen = target.layers * target.experts_per_token * 3 * target.hidden * target.intermediate
    return _attention_bytes(target) + Format(target.mlp_format).bytes(chosen)


def _cache_bytes(decoder: PublishedDecoder, context: int) -> int:
    """K and V that a sequence's rows see, in all layers."""
    windows = islice(cycle(decoder.windows), decoder.layers)
    seen = sum(min(context, window) if window else context for window in windows)
    return 2 * ITEM_BYTES * seen * decoder.kv_heads * decoder.head_dim
