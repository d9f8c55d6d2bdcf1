"""Constrained requests with drafts revised by the grammar, and with drafts as they come.

Every prompt of the bundle is answered in each of a few JSON schemas; the same answers without a
grammar, and constrained ones without drafts, stand beside them. Runs are interleaved, and each
ratio is between neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import requests_of
from dflash_perf.bench.repeat import show, spread_of_ratios, spreads, take_turns
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair
from dflash_trt.runtime import GeneratorOptions, Request, total
from dflash_trt.text.grammar import Follower, Grammar
from dflash_trt.tuning.bundle_schedule import NONE

_ANSWER: dict[str, Any] = {"type": "string", "maxLength": 60}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"answer": _ANSWER, "confidence": {"type": "integer", "minimum": 0, "maximum": 100}},
    {
        "category": {"enum": ["question", "request", "complaint", "other"]},
        "language": {"enum": ["english", "french", "german"]},
        "needs_answer": {"type": "boolean"},
    },
    {
        "steps": {"type": "array", "items": _ANSWER, "minItems": 2, "maxItems": 3},
        "is_complete": {"type": "boolean"},
    },
)
"""Properties of objects, all of them required."""


class UnrevisedFollower(Follower):
    """Leaves drafts as they are."""

    def revise(self, draft: Sequence[int], most: int) -> list[int]:
        return list(draft[:most])


def decode(
    pair: LoadedPair, requests: list[Request], options: GeneratorOptions
) -> dict[str, float]:
    """Decodes `requests` one after the other; rates are of the tokens behind each one's first."""
    generator = pair.make_generator(options)
    each = [generator.generate([one])[0].statistics for one in requests]
    seconds, steps = sum(one.decode_s or 0.0 for one in each), sum(one.steps for one in each)
    return {
        "tokens_per_second": sum(one.output_tokens - 1 for one in each) / seconds,
        "acceptance_length": total(each).acceptance_length or 1.0,
        "output_tokens": sum(one.output_tokens for one in each),
        "executor_ms_per_step": generator.executor_seconds / steps * 1e3,
        "host_ms_per_step": (generator.step_seconds - generator.executor_seconds) / steps * 1e3,
    }


@bench(runs=5)
def measure(
    work: Work,
    bundle: Path,
    *,
    prompts: int = 6,
    max_tokens: int = 256,
    threads: int = 1,
) -> Figures:
    opened = open_bundle(bundle)
    asked = requests_of(opened, max_tokens)[:prompts]
    pair = LoadedPair(opened, threads=threads, block_schedule=NONE, graphs=GRAPH_NAMES)
    revised = [
        replace(one, grammar=pair.grammars.compile(_grammar(properties)))
        for one in asked
        for properties in SCHEMAS
    ]
    unrevised = [
        replace(one, grammar=UnrevisedFollower(one.grammar.compiled))
        for one in revised
        if one.grammar is not None
    ]
    drafts, plain = GeneratorOptions(), GeneratorOptions(speculation=False)
    run = partial(decode, pair)
    ways = {
        "free": partial(run, asked, drafts),
        "free_plain": partial(run, asked, plain),
        "revised": partial(run, revised, drafts),
        "unrevised": partial(run, unrevised, drafts),
        "plain": partial(run, revised, plain),
    }
    found = take_turns(ways, work.runs, rotate=True)
    rates = {name: [run["tokens_per_second"] for run in each] for name, each in found.items()}
    figures: Figures = {
        "pair": opened.manifest.name,
        "requests": len(revised),
        "revised_to_unrevised": spread_of_ratios(rates["revised"], rates["unrevised"]),
        "revised_to_plain": spread_of_ratios(rates["revised"], rates["plain"]),
        "free_to_plain": spread_of_ratios(rates["free"], rates["free_plain"]),
    }
    for name, each in found.items():
        figures[name] = {
            "acceptance_length": each[-1]["acceptance_length"],
            "output_tokens": each[-1]["output_tokens"],
            **spreads(each, "tokens_per_second", "executor_ms_per_step", "host_ms_per_step"),
        }
    lengths = {
        name: figures[name]["acceptance_length"] for name in ("free", "unrevised", "revised")
    }
    click.echo(
        f"{opened.manifest.name}: acceptance length {lengths['free']:.2f} without a grammar, "
        f"{lengths['unrevised']:.2f} with one, {lengths['revised']:.2f} with drafts that know it; "
        f"revised / unrevised {show(figures['revised_to_unrevised'], '.2f')}, revised / without "
        f"drafts {show(figures['revised_to_plain'], '.2f')} in {work.runs} interleaved runs"
    )
    return figures


def _grammar(properties: dict[str, Any]) -> Grammar:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return Grammar("json_schema", json.dumps(schema))
