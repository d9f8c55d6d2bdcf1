"""What a server tells of its drafts: in an answer, in its metrics, or by how its stream is cut.

Sources: vLLM, docs/features/speculative_decoding/acceptance_metrics.md (`metrics`, counters);
SGLang, production metrics (an answer's counts do not come in a stream); llama.cpp, tools/server
(`timings`, /metrics); TensorRT-LLM, trtllm-serve's Prometheus metrics
(tensorrt_llm/metrics/collector.py: those by position with `return_perf_metrics`, the others with
`enable_iter_perf_stats`), and `speculative_decoding` of a choice as ai-dynamo's aiperf reads it,
src/aiperf/spec_decode/trtllm_adapter.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

ESTIMATE = "tokens a chunk"
SETTLE_S = 0.6
"""How long counters may lag behind answers: our own are told twice a second."""
METRICS = ("/metrics", "/prometheus/metrics")
"""Where servers have them, above /v1."""
_GAUGES = ("sglang:spec_accept_length", "trtllm_spec_decode_acceptance_length")
_CALLS = "sglang:spec_verify_calls_total"
_OURS = "dflash_accepted_draft_tokens_by_position_total"
# Counters of a server: steps, drafts, accepted ones, and those by position.
_KINDS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
_COUNTERS = [
    [f"{server}spec_decode_num_{kind}_total" for kind in _KINDS]
    for server in ("vllm:", "llamacpp:", "trtllm_")
]
# Of finished requests, by position: a step that drafts at all drafts at position 0.
_BY_POSITION = [f"trtllm_spec_decode_{kind}_tokens_total" for kind in ("drafted", "accepted")]
_COUNTERS.insert(0, [f"{_BY_POSITION[0]} 0", *_BY_POSITION, _BY_POSITION[1]])
_OUR_KINDS = ("verify_steps", "draft_tokens", "accepted_draft_tokens")
_COUNTERS.append([*(f"dflash_{kind}_total" for kind in _OUR_KINDS), _OURS])
# In an answer: where, and there the names of steps, accepted drafts, and drafts.
_TOLD = """
metrics.speculative_decoding num_spec_steps num_accepted_draft_tokens num_draft_tokens
speculative_decoding num_spec_steps total_accepted_draft_tokens total_draft_tokens
timings - draft_n_accepted draft_n
usage.completion_tokens_details num_verify_steps accepted_prediction_tokens -
"""
_SAMPLE = re.compile(
    r"^([\w:]+)(?:\{(.*)\})? (\d{1,15}(?:\.\d*)?(?:e[+]?\d\d)?)(?: \d+)?$", re.MULTILINE
)
_POSITION = re.compile(r'position="(\d{1,3})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Verify steps and accepted drafts, of an answer or of many.

    Args:
        source: who says so; ESTIMATE: nobody, the chunks of a stream were counted.
        drafted: drafts verified; None where nobody says.
        by_position: item j counts the steps that accepted draft j + 1; empty where nobody says.
        gauge: τ of a server that tells no counts, over whatever it did last.
    """

    source: str
    steps: float = 0
    accepted: float = 0
    drafted: float | None = None
    by_position: tuple[float, ...] = ()
    gauge: float | None = None

    @property
    def length(self) -> float | None:
        """τ = tokens emitted by verify steps / steps, bonus included; None without steps."""
        return 1 + self.accepted / self.steps if self.steps else self.gauge

    def with_positions(self, other: DraftCounts | None) -> DraftCounts:
        """With the shares by position of `other`, unless it has its own."""
        total = 0.0 if other is None else sum(other.by_position)
        if self.by_position or other is None or not total:
            return self
        scale = self.accepted / total  # steps are not alike: some count those without drafts
        return replace(self, by_position=tuple(one * scale for one in other.by_position))


def add_counts(counts: Sequence[DraftCounts]) -> DraftCounts | None:
    """The sum; None of nothing."""
    if not counts:
        return None
    rows = zip_longest(*(one.by_position for one in counts), fillvalue=0.0)
    drafted = [one.drafted for one in counts if one.drafted is not None]
    return DraftCounts(
        source=counts[0].source,
        steps=sum(one.steps for one in counts),
        accepted=sum(one.accepted for one in counts),
        drafted=sum(drafted) if len(drafted) == len(counts) else None,
        by_position=tuple(map(sum, rows)),
    )


def read_answer_counts(told: Mapping[str, object], tokens: int) -> DraftCounts | None:
    """What an answer of `tokens` output tokens tells; None for nothing.

    `told` has its usage, metrics and timings, and the keys of its last choice.
    """
    for line in _TOLD.split("\n")[1:-1]:
        path, *names = line.split()
        inside: Any = told
        for key in path.split("."):
            inside = inside.get(key) if isinstance(inside, dict) else None
        found = inside if isinstance(inside, dict) else {}
        steps, accepted, drafted = (_count(found.get(name)) for name in names)
        if (rejected := _count(found.get("rejected_prediction_tokens"))) is not None:
            drafted = rejected + (accepted or 0)
        if accepted is None or drafted is None or not (drafted or steps):
            continue
        raw = found.get("acceptance_histogram")
        bars = [_count(one) or 0.0 for one in raw] if isinstance(raw, list) else []
        return DraftCounts(
            source="its answers",
            # The first token is the prompt's, and a step gives one beside its drafts.
            steps=steps or max(tokens - 1 - accepted, 0.0),
            accepted=accepted,
            drafted=drafted,
            by_position=tuple(sum(bars[place:]) for place in range(1, len(bars))),
        )
    return None


def read_metrics(text: bytes) -> dict[str, float]:
    """What Prometheus's text tells of drafts, summed over labels, and by position from 0."""
    known, found = {_CALLS, *_GAUGES, *chain.from_iterable(_COUNTERS)}, dict[str, float]()
    for name, labels, value in _SAMPLE.findall(text.decode(errors="replace")):
        if name in known:
            place = _POSITION.search(labels)
            keys = {name, name if place is None else f"{name} {int(place[1]) - (name == _OURS)}"}
            for key in keys:
                found[key] = float(value) + (0.0 if name in _GAUGES else found.get(key, 0.0))
    return found


def count_between(
    before: Mapping[str, float], after: Mapping[str, float], emitted: int
) -> DraftCounts | None:
    """What the whole server drafted between two readings of `read_metrics`; None where untold.

    `emitted` are the tokens after the first of the answers meanwhile, for those that count no
    steps.
    """
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    for steps, drafted, accepted, positions in _COUNTERS:
        if drafted in grown:
            taken = grown.get(accepted, 0.0)
            places = [grown.get(f"{positions} {one}") for one in range(len(grown))]
            return DraftCounts(
                source="its metrics",
                steps=grown.get(steps) or max(emitted - taken, 0.0),
                accepted=taken,
                drafted=grown[drafted],
                by_position=tuple(one for one in places if one is not None),
            )
    if calls := grown.get(_CALLS):
        return DraftCounts(source="its metrics", steps=calls, accepted=max(emitted - calls, 0.0))
    gauge = next((after[one] for one in _GAUGES if after.get(one)), None)
    return None if gauge is None else DraftCounts(source="its gauge", gauge=gauge)


def estimate_counts(chunks: Sequence[int], tokens: int) -> DraftCounts | None:
    """From a stream's chunks with text, of so many tokens each, or 0 where they do not say."""
    steps, emitted = len(chunks) - 1, sum(chunks[1:]) or tokens - 1
    if not 1 <= steps <= emitted:
        return None
    return DraftCounts(source=ESTIMATE, steps=steps, accepted=emitted - steps)


def _count(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e15 else None
