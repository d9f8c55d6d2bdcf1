"""Every way to run a pair on given GPUs, and how fast each would be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dflash_trt.bundle.memory.cache_bytes import KV_ITEM_BYTES
from dflash_trt.bundle.memory.gpu_layout import GpuLayout
from dflash_trt.bundle.memory.served import ServedMemory, fit_memory
from dflash_trt.deploy.planning.calibration import Calibration
from dflash_trt.deploy.planning.cost import Replica, Seconds
from dflash_trt.deploy.planning.decoding import Decoding, Kind, prefill
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import Gpu
from dflash_trt.models.sizes import ModelShape

MAX_BATCH = 4096
_EVERY_UP_TO = 16
_GROWTH = 1.08


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens of each request that users send; `context` are reserved for it."""

    input_tokens: int
    output_tokens: int
    context: int

    @property
    def held(self) -> float:
        """Tokens that a sequence holds on average while it decodes."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """A projection: one way to run a pair, and what the model says of it.

    Args:
        batch: sequences of each replica.
        drafts: tokens drafted in a step (0: autoregressive).
        verified: rows per sequence of the target's pass.
        tau: tokens that a step emits for each sequence.
        step: its duration, prefills aside.
        interactivity: tokens/s per user, 1 / TPOT, other users' prefills included.
        throughput: output tokens/s per GPU, prefills included.
    """

    kind: Kind
    layout: GpuLayout
    batch: int
    drafts: int
    verified: int
    tau: float
    step: Seconds
    interactivity: float
    throughput: float

    @property
    def label(self) -> str:
        drafted = f", {self.verified} rows" if self.drafts else ""
        users = "1 user" if self.batch == 1 else f"{self.batch:,} users"
        return f"{self.layout.label}, {users}{drafted}"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a pair is to run: on `gpus` of one kind, which replicas of one of `layouts` fill.

    `kv_item_bytes` are an element's of both KV caches.
    """

    gpu: Gpu
    gpus: int
    layouts: tuple[GpuLayout, ...]
    calibration: Calibration
    kv_item_bytes: int = KV_ITEM_BYTES

    def replica(self, layout: GpuLayout) -> Replica:
        """One of those that fill the GPUs."""
        return Replica(self.gpu, layout, self.calibration, self.kv_item_bytes)


def possible_layouts(gpu: Gpu, gpus: int, models: Sequence[ModelShape]) -> tuple[GpuLayout, ...]:
    """Layouts that divide both `gpus` and the models, within reach of the GPU's link."""
    found: list[GpuLayout] = []
    for size in range(1, min(gpus, gpu.link_gpus) + 1):
        if gpus % size:
            continue
        for layout in (GpuLayout(size), GpuLayout(size, "data")):
            if layout == GpuLayout(1, "data"):
                continue
            try:
                layout.check(*models)
            except DflashError:
                continue
            found.append(layout)
    return tuple(found)


def fewest_gpus(site: Site, decoding: Decoding, workload: Workload) -> int | None:
    """A power of two of the site's GPUs that holds a sequence; None: no more than it has do."""
    models = [one for one in (decoding.target, decoding.draft) if one]
    count = 1
    while count <= site.gpu.link_gpus:
        more = replace(site, gpus=count, layouts=possible_layouts(site.gpu, count, models))
        if any(memory_of(more, layout, decoding, workload).users for layout in more.layouts):
            return count
        count *= 2
    return None


def memory_of(
    site: Site, layout: GpuLayout, decoding: Decoding, workload: Workload
) -> ServedMemory:
    """The fit of the widest step of `decoding`."""
    return fit_memory(
        site.gpu,
        decoding.target,
        decoding.draft,
        context=workload.context,
        layout=layout,
        rows=max(decoding.verified(drafts) for drafts in decoding.drafts()),
        kv_item_bytes=site.kv_item_bytes,
    )


def project(site: Site, decoding: Decoding, workload: Workload) -> list[PlanPoint]:
    """Every layout and batch that fits, each with its best number of drafts."""
    points: list[PlanPoint] = []
    for layout in site.layouts:
        users = memory_of(site, layout, decoding, workload).users
        points += [
            best_at(site, layout, decoding, workload, batch)
            for batch in _batches(min(users, MAX_BATCH))
        ]
    return points


@lru_cache(maxsize=256)  # tables and charts ask for the same ones
def answer(
    site: Site, decoding: Decoding, workload: Workload, interactivity: float
) -> PlanPoint | None:
    """The most throughput per GPU with at least `interactivity` tokens/s per user; None: none has.

    A layout's best is the largest batch that is interactive enough; where GPUs have sequences of
    their own, one that divides evenly may be better still.
    """
    found: list[PlanPoint] = []
    for layout in site.layouts:
        low, high = 0, min(memory_of(site, layout, decoding, workload).users, MAX_BATCH)
        while low < high:  # `low` is interactive enough, what is above `high` is not
            middle = (low + high + 1) // 2
            if best_at(site, layout, decoding, workload, middle).interactivity >= interactivity:
                low = middle
            else:
                high = middle - 1
        even = low - low % (layout.gpus if layout.attention == "data" else 1)
        found += [
            best_at(site, layout, decoding, workload, batch) for batch in {low, even} if batch
        ]
    return max(found, key=lambda point: point.throughput, default=None)


def best_at(
    site: Site, layout: GpuLayout, decoding: Decoding, workload: Workload, batch: int
) -> PlanPoint:
    """The best number of drafts for `batch` sequences of one replica, whether they fit or not.

    In steady state each request brings a prefill, which all others wait for. Its own ends before
    its first token, so that only the others' count in its TPOT.
    """
    replica = site.replica(layout)
    share = prefill(replica, decoding.target, workload.input_tokens) / workload.output_tokens

    def project_with(drafts: int) -> PlanPoint:
        tau = decoding.tau(drafts)
        step = decoding.step(replica, batch, workload.held, drafts)
        per_token = step.total / tau
        return PlanPoint(
            kind=decoding.kind,
            layout=layout,
            batch=batch,
            drafts=drafts,
            verified=decoding.verified(drafts),
            tau=tau,
            step=step,
            interactivity=1 / (per_token + (batch - 1) * share),
            throughput=batch / (per_token + batch * share) / layout.gpus,
        )

    return max(map(project_with, decoding.drafts()), key=lambda point: point.throughput)


def _batches(users: int) -> Iterator[int]:
    """Every batch up to 16, then ever wider steps, and the largest."""
    batch = 1
    while batch < users:
        yield batch
        batch = batch + 1 if batch < _EVERY_UP_TO else int(batch * _GROWTH) + 1
    if users:
        yield users
