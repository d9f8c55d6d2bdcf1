"""Which concurrencies to measure besides, so that an answer lies between near neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_perf.harness.answers import build_fronts
from dflash_perf.harness.config import OfferedLoad
from dflash_perf.harness.points import SweepPoint

ROUNDS = 2


def loads_between(points: Sequence[SweepPoint], targets: Sequence[float]) -> list[OfferedLoad]:
    """Concurrencies in the middle of the points around each target, where points are few.

    The middle is geometric, as the powers of two around it are. Empty where every front has
    enough points, or no concurrency in between.
    """
    concurrency = {point.load.label: point.load.concurrency for point in points}
    found: set[int] = set()
    for front in build_fronts(points).values():
        for target in targets:
            value = front.at(target)
            if value is None or not value.is_sparse:
                continue
            low, high = concurrency[value.below.label], concurrency[value.above.label]
            if low is not None and high is not None:
                found.add(round((low * high) ** 0.5))
    known = set(concurrency.values())
    return [OfferedLoad(concurrency=count) for count in sorted(found - known)]
