"""How a generator runs, the same for all its requests."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.backends.base import TargetGraph
from dflash_trt.core.limits import PREFILL_CHUNK
from dflash_trt.decoding.drafter_kinds import DFLASH, DRAFTERS, DrafterKind, target_graph
from dflash_trt.decoding.schedule import BlockSchedule
from dflash_trt.errors import DflashError


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorOptions:
    """A generator's settings.

    Args:
        speculation: False runs the autoregressive baseline graph, target_only, throughout.
        block_size: rows of a verify step (anchor included), 2 … the trained block; None is the
            trained block.
        prefill_chunk: most prompt tokens of one prefill pass (>= 1).
        record_logits: keep the logits row of every output token (float32, [V] each).
        schedule: the block by the number of decoding sequences; a request's own block size stays
            its upper limit. None is `block_size` throughout.
        live: without a schedule, leave drafts out while they cost more time than they save. Then
            statistics, never outputs, depend on how long steps take.
        drafter: who fills the blocks.

    Raises:
        DflashError: `prefill_chunk` is below 1, a schedule or `live` beside what it would decide,
            or a schedule of another drafter (usage).
    """

    speculation: bool = True
    block_size: int | None = None
    prefill_chunk: int = PREFILL_CHUNK
    record_logits: bool = False
    schedule: BlockSchedule | None = None
    live: bool = False
    drafter: DrafterKind = DFLASH

    def __post_init__(self) -> None:
        if type(self.prefill_chunk) is not int or self.prefill_chunk < 1:
            what = f"{self.prefill_chunk!r} is not an integer of at least 1"
            raise DflashError(what, where="prefill_chunk", usage=True)
        is_fixed = self.block_size is not None or not self.speculation
        if is_fixed and (self.live or self.schedule is not None):
            what = "does not go with a fixed block size or without speculation"
            where = "live" if self.live else "schedule"
            raise DflashError(what, where=where, usage=True)
        if self.schedule is not None and self.schedule.drafter != self.drafter:
            what = f"is for {DRAFTERS[self.schedule.drafter]} drafts"
            raise DflashError(what, where="schedule", usage=True)

    @property
    def graph(self) -> TargetGraph:
        """The target that prefills and decodes; only a draft graph needs the one that injects."""
        return target_graph(self.drafter) if self.speculation else "target_only"
