"""What `plan` projects for a pair on given GPUs, answered at one interactivity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dflash_trt.bundle.memory.gpu_layout import GpuLayout
from dflash_trt.bundle.memory.served import ServedMemory
from dflash_trt.deploy.planning.decoding import Autoregressive, Decoding, Kind, Speculative
from dflash_trt.deploy.planning.known_pairs import PairShape
from dflash_trt.deploy.planning.layout_search import (
    PlanPoint,
    Site,
    Workload,
    answer,
    best_at,
    fewest_gpus,
    memory_of,
    project,
)
from dflash_trt.errors import DflashError

STEPS = (0.8, 1.2)
TAU = "τ"
BASELINE: Kind = "autoregressive"
_SHOWN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What an answer becomes where one parameter, or τ, is 20 % lower and 20 % higher.

    Each is throughput ÷ the projected one - 1; None where the interactivity is not reachable then.
    """

    parameter: str
    value: float
    lower: float | None
    higher: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Everything `plan` says; `points` are all that fit, `acceptance` says whose figures τ is.

    Without an `interactivity` there are no answers, but the whole fronts.
    """

    pair: PairShape
    site: Site
    workload: Workload
    interactivity: float | None
    decodings: Mapping[Kind, Decoding]
    acceptance: Mapping[Kind, str]
    points: Mapping[Kind, Sequence[PlanPoint]]
    sensitivity: tuple[Sensitivity, ...]

    def answer(self, kind: Kind, interactivity: float | None = None) -> PlanPoint | None:
        """The most throughput at an interactivity, the plan's own by default; None: none has it."""
        asked = interactivity or self.interactivity
        if asked is None:
            return None
        return answer(self.site, self.decodings[kind], self.workload, asked)

    def ratio(self, kind: Kind, interactivity: float | None = None) -> float | None:
        """Its throughput ÷ autoregressive decoding's, both at the interactivity."""
        mine, base = self.answer(kind, interactivity), self.answer(BASELINE, interactivity)
        return None if mine is None or base is None else mine.throughput / base.throughput

    def fastest(self, kind: Kind) -> PlanPoint:
        """The most interactive point."""
        return max(self.points[kind], key=lambda point: point.interactivity)

    @property
    def notes(self) -> tuple[str, ...]:
        """Formats of the target that the GPU lacks."""
        gpu, target = self.site.gpu, self.pair.target
        return tuple(
            f"{gpu.title} does not multiply {form}: weights are read in it, and multiplied in "
            f"{gpu.math(form)}"
            for form in dict.fromkeys((target.attention_format, target.mlp_format))
            if not gpu.multiplies(form)
        )

    @property
    def layout(self) -> GpuLayout:
        """Where the pair's own drafter answers, or is fastest where there is no answer."""
        own = self.pair.drafter
        return (self.answer(own) or self.fastest(own)).layout

    def blocks(self) -> list[tuple[PlanPoint, PlanPoint]]:
        """What to run on `layout` and autoregressive decoding there, by batch.

        The drafter's best block; block 1, no speculation, where that is as fast.
        """
        own = self.pair.drafter
        users = self.memory(self.layout, own).users

        def best(kind: Kind, batch: int) -> PlanPoint:
            return best_at(self.site, self.layout, self.decodings[kind], self.workload, batch)

        pairs = [(best(BASELINE, n), best(own, n)) for n in _SHOWN_BATCHES if n <= users]
        return [(max(pair, key=lambda one: one.throughput), pair[0]) for pair in pairs]

    def memory(self, layout: GpuLayout, kind: Kind, context: int | None = None) -> ServedMemory:
        """What `kind` takes of a GPU's memory, at another context than the workload's if given."""
        workload = replace(self.workload, context=context or self.workload.context)
        return memory_of(self.site, layout, self.decodings[kind], workload)

    def _memory_json(self, layout: GpuLayout, kind: Kind) -> dict[str, Any]:
        fit = self.memory(layout, kind)
        return {
            "layout": layout.label,
            "decoding": kind,
            "gpu_memory": fit.gpu_memory,
            "context": self.workload.context,
            "target_weights": fit.target_weights,
            "draft_weights": fit.draft_weights,
            "workspace": fit.workspace,
            "target_kv": fit.target_kv,
            "draft_kv": fit.draft_kv,
            "users": fit.users,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "projection": True,
            "pair": self.pair.name,
            "gpu": self.site.gpu.name,
            "gpus": self.site.gpus,
            "workload": asdict(self.workload),
            "kv_item_bytes": self.site.kv_item_bytes,
            "interactivity": self.interactivity,
            "notes": list(self.notes),
            "acceptance": dict(self.acceptance),
            "parameters": asdict(self.site.calibration),
            "answers": None
            if self.interactivity is None
            else {
                kind: None
                if (point := self.answer(kind)) is None
                else {**point_json(point), "ratio": self.ratio(kind)}
                for kind in self.points
            },
            "most_interactive": {kind: point_json(self.fastest(kind)) for kind in self.points},
            "memory": [
                self._memory_json(layout, kind)
                for layout in self.site.layouts
                for kind in self.points
            ],
            "blocks": [
                {
                    **point_json(best),
                    "block_size": best.verified,
                    "speedup": best.throughput / plain.throughput,
                }
                for best, plain in self.blocks()
            ],
            "sensitivity": [asdict(one) for one in self.sensitivity],
        }


def point_json(point: PlanPoint) -> dict[str, Any]:
    """A point's figures; seconds of a step by what they are spent on."""
    return {
        "layout": point.layout.label,
        "gpus_per_replica": point.layout.gpus,
        "batch": point.batch,
        "rows": point.verified,
        "tau": point.tau,
        "interactivity": point.interactivity,
        "throughput_per_gpu": point.throughput,
        "step_seconds": asdict(point.step),
        "limited_by": point.step.limit,
    }


def make_projection(
    pair: PairShape,
    site: Site,
    workload: Workload,
    interactivity: float | None,
    speculative: Sequence[Speculative],
) -> Projection:
    """Projects autoregressive decoding and `speculative` ones, the pair's own among them.

    Raises:
        DflashError: no sequence fits beside the weights.
    """
    decodings: dict[Kind, Decoding] = {BASELINE: Autoregressive(pair.target)}
    decodings |= {decoding.kind: decoding for decoding in speculative}
    own = next(decoding for decoding in speculative if decoding.kind == pair.drafter)
    points: dict[Kind, Sequence[PlanPoint]] = {}
    for kind, decoding in decodings.items():
        points[kind] = project(site, decoding, workload)
        if not points[kind]:
            raise _does_not_fit(site, decoding, workload)
    return Projection(
        pair=pair,
        site=site,
        workload=workload,
        interactivity=interactivity,
        decodings=decodings,
        acceptance={decoding.kind: decoding.acceptance.source for decoding in speculative},
        points=points,
        sensitivity=_sensitivity(site, own, workload, interactivity),
    )


def _sensitivity(
    site: Site, decoding: Speculative, workload: Workload, interactivity: float | None
) -> tuple[Sensitivity, ...]:
    if interactivity is None:
        return ()
    base = answer(site, decoding, workload, interactivity)
    if base is None:
        return ()

    def change(name: str, factor: float) -> float | None:
        other, drafted = site, decoding
        if name == TAU:
            drafted = replace(decoding, acceptance=decoding.acceptance.scaled(factor))
        else:
            other = replace(site, calibration=site.calibration.scaled(name, factor))
        found = answer(other, drafted, workload, interactivity)
        return None if found is None else found.throughput / base.throughput - 1

    values = {TAU: decoding.tau(max(decoding.drafts())), **asdict(site.calibration)}
    return tuple(
        Sensitivity(name, value, *(change(name, factor) for factor in STEPS))
        for name, value in values.items()
    )


def _does_not_fit(site: Site, decoding: Decoding, workload: Workload) -> DflashError:
    plain = Autoregressive(decoding.target)
    fits = (memory_of(site, layout, plain, workload) for layout in site.layouts)
    fit = max(fits, key=lambda one: (one.users, one.free))
    gpus = fewest_gpus(site, decoding, workload)
    more = "another GPU" if gpus is None else f"--gpu {site.gpu.name}x{gpus}"
    return DflashError(
        f"no sequence of {workload.context:,} tokens fits beside {fit.target_weights / 1e9:,.1f} "
        f"GB of weights on a GPU of {fit.gpu_memory / 1e9:,.0f} GB ({decoding.kind})",
        where=f"{site.gpus} × {site.gpu.title}",
        fix=f"give {more}, a lower --context or a narrower --precision",
    )
