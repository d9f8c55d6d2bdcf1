"""Acceptance and speed by named set of prompts, as papers print them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dflash_trt.decoding.statistics import TotalStatistics, total
from dflash_trt.proof.verification import ModeReport, Speed, Timing
from dflash_trt.text.task_sets import ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigures:
    """A set's figures, or those of all together: sums over prompts, so long answers weigh more.

    `statistics` and `speed` are of answers that do not loop (`runtime.loops`), `looping` is of
    those that do, which inflate an acceptance length.
    """

    name: str
    statistics: TotalStatistics
    speed: Speed
    looping: TotalStatistics

    def to_json(self) -> dict[str, Any]:
        measured = bool(self.speed.ratios)
        return {
            "name": self.name,
            "prompts": self.statistics.requests,
            "output_tokens": self.statistics.output_tokens,
            "steps": self.statistics.steps,
            "acceptance_length": self.statistics.acceptance_length,
            "target_only_tokens_per_second": median(self.speed.baseline) if measured else None,
            "dflash_tokens_per_second": median(self.speed.speculative) if measured else None,
            "speedup": self.speed.speedup if measured else None,
            "looping": {
                "answers": self.looping.requests,
                "acceptance_length": self.looping.acceptance_length,
            },
        }


def tabulate(names: Sequence[str], report: ModeReport, timing: Timing) -> list[TaskFigures]:
    """The figures of each set, and of all where there are several.

    `names` has the set of every prompt of `report` and of `timing`.
    """
    sets = {
        name: [i for i, one in enumerate(names) if one == name] for name in dict.fromkeys(names)
    }
    if len(sets) > 1:
        sets[ALL] = list(range(len(names)))
    return [_figures(name, prompts, report, timing) for name, prompts in sets.items()]


def _figures(
    name: str, prompts: Collection[int], report: ModeReport, timing: Timing
) -> TaskFigures:
    looping = {index for index in prompts if report.are_looping[index]}
    others = set(prompts) - looping
    return TaskFigures(
        name=name,
        statistics=total(report.of_prompts[index] for index in sorted(others)),
        speed=timing.speed(others),
        looping=total(report.of_prompts[index] for index in sorted(looping)),
    )
