"""All benchmarks by name; importing a module here registers its benchmark."""

from __future__ import annotations

from dflash_perf.bench import (  # noqa: F401
    attention_phases,
    build_cost,
    chain_cost,
    choice_cost,
    cut_speed,
    demo_speed,
    grammar_drafts,
    harness_timing,
    kernel_resources,
    kill_campaign,
    kinds_compared,
    live_drafts,
    markov_head,
    paged_cost,
    planner_fit,
    quantization_quality,
    quantize_cost,
    row_cuts,
    served_demo,
    serving_cost,
    step_cost,
    task_acceptance,
    tuned_speed,
    two_checkouts,
)
from dflash_perf.bench.base import DECLARED

BENCHES = dict(sorted(DECLARED.items()))
