"""The time of one forward pass on GPUs, from bytes and FLOPs.

An operation's memory time and arithmetic time add up: that meets published tables better than the
larger of the two (a roofline) does.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from dflash_trt.bundle.memory.cache_bytes import (
    KV_ITEM_BYTES,
    STATE_ITEM_BYTES,
    kv_bytes,
    planned_state_bytes,
)
from dflash_trt.bundle.memory.gpu_layout import GpuLayout
from dflash_trt.bundle.memory.weight_bytes import attention_bytes
from dflash_trt.deploy.planning.calibration import Calibration
from dflash_trt.hardware.gpus import Gpu
from dflash_trt.models.sizes import ModelShape

ACTIVATION_BYTES = 2
LIMITS = {
    "weights": "weight bandwidth",
    "kv": "KV bandwidth",
    "compute": "compute",
    "launch": "layer overhead",
    "link": "communication",
    "host": "step overhead",
}
"""The parts of a duration in their order, and what is short where one of them takes the most."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration by what it is spent on; see LIMITS."""

    weights: float = 0.0
    kv: float = 0.0
    compute: float = 0.0
    launch: float = 0.0
    link: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(float(getattr(self, name)) for name in LIMITS)

    @property
    def limit(self) -> str:
        """What takes the most."""
        return LIMITS[max(LIMITS, key=lambda name: getattr(self, name))]

    @property
    def largest(self) -> float:
        """What `limit` takes."""
        return max(float(getattr(self, name)) for name in LIMITS)

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, name) + getattr(other, name) for name in LIMITS))

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(*(getattr(self, name) * factor for name in LIMITS))


@dataclass(frozen=True, slots=True)
class PassCost:
    """One forward pass of `rows` tokens of each of a replica's `sequences`.

    Attention reads `context` tokens per sequence besides. `head_rows` of a sequence get logits;
    `extra_weights` are matrices that every row goes through beside the layers (fc, injection).
    """

    model: ModelShape
    sequences: int
    rows: int
    context: float
    head_rows: float
    head_weights: int
    _: KW_ONLY
    extra_weights: int = 0


def expected_experts(count: int, per_token: int, tokens: float) -> float:
    """Distinct experts that `tokens` tokens touch when each draws `per_token` of `count` evenly.

    count (1 - (1 - per_token / count)^tokens). Real routing is less even and touches fewer.
    """
    return count * (1 - float((1 - per_token / count) ** tokens))


@dataclass(frozen=True, slots=True)
class Replica:
    """A layout of one kind of GPU, under a calibration."""

    gpu: Gpu
    layout: GpuLayout
    calibration: Calibration
    kv_item_bytes: int = KV_ITEM_BYTES

    @property
    def step_overhead(self) -> Seconds:
        """Of a speculative step, besides its passes."""
        return Seconds(host=self.calibration.step_overhead_us * 1e-6)

    @property
    def layer_overhead(self) -> Seconds:
        """Of a layer, or of as many kernels that wait for each other."""
        return Seconds(launch=self.calibration.layer_overhead_us * 1e-6)

    def matrix(self, sequences: int, weights: int) -> Seconds:
        """Duration of one row of each of the replica's `sequences` through a bf16 matrix."""
        ways, rows = self.layout.attention_ways, self.layout.sequences_per_gpu(sequences)
        return Seconds(
            weights=2 * weights / ways / (self.gpu.bandwidth * self.calibration.bandwidth_fraction),
            compute=self._arithmetic(2 * rows * weights / ways, self.gpu.bf16),
        )

    def reading(self, sequences: int, items: int) -> Seconds:
        """Duration of reading `items` activations of each of the replica's `sequences`."""
        moved = ACTIVATION_BYTES * items * self.layout.sequences_per_gpu(sequences)
        reach = self.gpu.bandwidth * self.calibration.bandwidth_fraction
        return Seconds(kv=moved / self.layout.attention_ways / reach)

    def time(self, work: PassCost) -> Seconds:
        """Duration of one pass; every GPU of the replica takes as long."""
        model, layout = work.model, self.layout
        ways = layout.attention_ways
        # Rows and sequences that one GPU's attention, vocabulary and draft work on.
        local = layout.sequences_per_gpu(work.sequences)
        rows = local * work.rows

        depth, weights, compute = len(model.sizes.layers), 0.0, 0.0
        for layer, layers in model.sizes.kinds.items():
            weights += len(layers) * attention_bytes(model, layer, layout)
            compute += len(layers) * self._arithmetic(
                2 * rows * model.attention_weights(layer) / ways,
                self.gpu.flops(model.attention_format),
            )
        mlp_weights, mlp_flops = self._mlp(work, rows)
        weights += depth * model.mlp_format.bytes(1) * mlp_weights
        compute += depth * self._arithmetic(mlp_flops, self.gpu.flops(model.mlp_format))
        others = (work.extra_weights + work.head_weights) / ways
        weights += 2 * (others + depth * model.router_weights)
        dense = 2 * rows * work.extra_weights + 2 * local * work.head_rows * work.head_weights
        compute += self._arithmetic(dense / ways, self.gpu.bf16)

        cache = kv_bytes(model.sizes, work.context, layout, self.kv_item_bytes)
        states = planned_state_bytes(model.sizes, layout)
        cache += 2 * states  # read once and written once, whatever the rows
        scores = 4 * rows * model.sizes.seen_elements(work.context) / ways
        # A row scales a state, takes two products with it and adds an outer product.
        scores += 7 * rows * states / STATE_ITEM_BYTES
        compute += self._arithmetic(scores, self.gpu.bf16)
        reach = self.gpu.bandwidth * self.calibration.bandwidth_fraction
        return Seconds(
            weights=weights / reach,
            kv=local * cache / reach,
            compute=compute,
            launch=depth * self.calibration.layer_overhead_us * 1e-6,
            link=self._communication(model, rows),
        )

    def _mlp(self, work: PassCost, rows: int) -> tuple[float, float]:
        """Weights that one GPU reads of a layer's MLP, and its FLOPs."""
        model, experts = work.model, work.model.experts
        if experts is None:
            share = model.mlp_weights / self.layout.attention_ways
            return share, 2 * rows * share
        tokens = work.sequences * work.rows
        touched = expected_experts(experts.experts, experts.chosen, tokens)
        share = model.mlp_weights / self.layout.gpus
        shared = model.shared_weights / self.layout.attention_ways
        flops = 2 * tokens * experts.chosen * share + 2 * rows * shared
        return touched * share + shared, flops

    def _arithmetic(self, flops: float, rate: float) -> float:
        return flops / (rate * self.calibration.flops_fraction)

    def _communication(self, model: ModelShape, rows: int) -> float:
        """Tensor parallel: two all-reduces a layer. Expert parallel: dispatch and combine.

        An all-reduce moves 2 (n - 1) / n of its data out of each GPU; an all-to-all sends a row to
        as many other GPUs as its experts lie on, at most.
        """
        n = self.layout.gpus
        if n == 1:
            return 0.0
        row = model.sizes.hidden_size * ACTIVATION_BYTES
        if self.layout.attention == "tensor":
            moved = 2 * (n - 1) / n * rows * row
        elif model.experts is not None:
            moved = min(model.experts.chosen, n) * (n - 1) / n * rows * row
        else:
            return 0.0
        link = self.gpu.link_bandwidth * self.calibration.link_fraction
        return 2 * len(model.sizes.layers) * (self.calibration.collective_us * 1e-6 + moved / link)
