"""What the small kernels add to a step of Qwen3-8B: their time, and the share of the step.

The step is the least that it can be: weights and K and V read once at the bandwidth that streaming
reaches, without launches, products or a host. So a share is the most that it can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from dflash_plugins.row_sample.launch import make_case as sample_case
from dflash_trt.config import PublishedDecoder
from dflash_trt.core.limits import PAGE_SIZE

STEP_PAIR = "qwen3-8b"
"""Its target and its draft are dense, in bfloat16."""
ITEM_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """Kernels of one name in a step: `count` launches of `seconds` together, of a step's least."""

    kernel: str
    what: str
    batch: int
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
            "pair": STEP_PAIR,
            "batch": self.batch,
            "launches": self.count,
            "predicted_seconds": self.seconds,
            "predicted_step_share": self.share,
        }


def step_parts(
    rates: GpuRates, batches: tuple[int, ...], context: int, folder: Path
) -> Iterator[StepPart]:
    """Every small kernel of a step, for each batch, with sequences of `context` tokens."""
    pair = public_pairs()[STEP_PAIR]
    draft, target = pair.draft, pair.target
    for batch in batches:
        rows = draft.block_size
        least = step_seconds(rates, batch, context)
        plain = WriteShape(
            batch=batch,
            rows=rows,
            kv_heads=draft.kv_heads,
            head_dim=draft.head_dim,
            length=-(-(context + rows) // PAGE_SIZE) * PAGE_SIZE,
        )
        paged = WriteShape(
            batch=plain.batch,
            rows=plain.rows,
            kv_heads=plain.kv_heads,
            head_dim=plain.head_dim,
            length=plain.length,
            page_size=PAGE_SIZE,
        )
        logits = sample_case(
            "", dtype=DType.BFLOAT16, batch=batch, rows=rows, vocabulary=target.vocab
        )
        layers = target.layers + draft.layers
        points = [
            ("accept", "", 1, accept_case("", batch=batch, rows=rows)),
            ("kv_feature_injection", "linear", draft.layers, injection_case("", plain)),
            ("kv_feature_injection", "paged", draft.layers, injection_case("", paged)),
            ("kv_cache_update", "paged", layers, update_case("", paged)),
            *(("row_sample", way, 1, SamplePoint(logits, one)) for way, one in SAMPLING.items()),
        ]
        for kernel, what, count, point in points:
            time = predict_point(point, rates, folder)
            assert time is not None
            yield StepPart(
                kernel=kernel,
                what=what,
                batch=batch,
                count=count,
                seconds=count * time.seconds,
                step_seconds=least,
            )


def step_seconds(rates: GpuRates, batch: int, context: int) -> float:
    """The least that a step can take: what it reads, at the bandwidth that streaming reaches."""
    pair = public_pairs()[STEP_PAIR]
    draft, target = pair.draft, pair.target
    # The draft borrows the target's head, and its fc takes the layers that it taps.
    weights = _layer_weights(target) + _layer_weights(draft) + 2 * target.vocab * target.hidden
    weights += len(draft.target_layer_ids) * target.hidden * draft.hidden
    cache = batch * context * (_cache_elements(target) + _cache_elements(draft))
    return ITEM_BYTES * (weights + cache) / rates.reach


def _layer_weights(decoder: PublishedDecoder) -> int:
    """Of all layers of a dense decoder: q, k, v, o, gate, up and down."""
    attention = 2 * (decoder.heads + decoder.kv_heads) * decoder.head_dim
    return decoder.layers * decoder.hidden * (attention + 3 * decoder.intermediate)


def _cache_elements(decoder: PublishedDecoder) -> int:
    """Elements of K and V of one position, in all layers."""
    return 2 * decoder.layers * decoder.kv_heads * decoder.head_dim
