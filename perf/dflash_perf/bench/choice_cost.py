"""What it costs to choose the tokens of 8 rows, with and without a JSON schema.

A bundle answers its prompts under a schema, greedy and drawn: what the host takes of a step, beside
the same without. Its rows of logits are then widened to `--vocab` tokens, by pairs of its tokens
and by logits drawn from the row's own below its 1,000 highest, and the tokens of 8 rows in a row of
one answer are chosen again, each in the state that the answer is in: what a mask and a draw take.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from tokenizers import Tokenizer

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import prompt_file
from dflash_perf.bench.repeat import show, spread, take_turns
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.core.arrays import FloatArray
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.pair import LoadedPair
from dflash_trt.runtime import GeneratorOptions, Request, SamplingParams
from dflash_trt.sampling.choice import choose_token
from dflash_trt.text.grammar import Follower, Grammar, GrammarCompiler
from dflash_trt.text.prompts import read_prompts
from dflash_trt.tuning.bundle_schedule import NONE

ROWS, ANSWER, PROMPTS = 8, 32, 2
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "state": {"enum": ["open", "closed", "unknown"]},
            "note": {"type": "string", "maxLength": 120},
            "load": {"type": "integer"},
        },
        "required": ["state", "note", "load"],
        "additionalProperties": False,
    }
)
WAYS = {
    "greedy": SamplingParams(),
    "temperature 0.7, top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9, seed=1),
    "temperature 0.7, min_p 0.05": SamplingParams(temperature=0.7, min_p=0.05, seed=1),
    "temperature 0.7": SamplingParams(temperature=0.7, seed=1),
    "temperature 1": SamplingParams(temperature=1.0, seed=1),
}


@bench(runs=7)
def measure(work: Work, bundle: Path, *, vocab: int = 151_936) -> Figures:
    opened = open_bundle(bundle)
    with LoadedPair(opened, threads=1, block_schedule=NONE, graphs=GRAPH_NAMES) as pair:
        texts = read_prompts(prompt_file(opened))[:PROMPTS]
        follower = pair.grammars.compile(Grammar("json_schema", SCHEMA))
        options = GeneratorOptions(record_logits=True)
        asked = pair.request(texts[0], max_tokens=ANSWER, grammar=follower)
        (answer,) = pair.make_generator(options).generate([asked])
        assert answer.logits is not None
        tokenizer = json.loads(pair.tokenizer.core.to_str())
        whole: Figures = {}
        for name in ("greedy", "temperature 1"):
            free = [pair.request(one, WAYS[name], max_tokens=ANSWER) for one in texts]
            held = [
                pair.request(one, WAYS[name], max_tokens=ANSWER, grammar=follower) for one in texts
            ]
            run = partial(_time_steps, pair)
            steps = {"free": partial(run, free), "schema": partial(run, held)}
            whole[name] = _summarize(name, take_turns(steps, work.runs))
    wide, ends = _widen_vocabulary(tokenizer, vocab), opened.manifest.target.eos_token_ids
    compiler = GrammarCompiler(wide, vocab, ends)
    start = compiler.compile(Grammar("json_schema", SCHEMA))
    logits = _widen_rows(answer.logits, vocab)
    figures: Figures = {}
    for place in (0, 16):
        state = start.fork()
        for token_id in answer.token_ids[:place]:
            state.take(token_id)
        rows, ids = logits[place : place + ROWS], answer.token_ids[place : place + ROWS]
        for name, sampling in WAYS.items():
            ways = {
                "schema": partial(_choose_all, rows, ids, sampling, state.fork),
                "free": partial(_choose_all, rows, ids, sampling, None),
            }
            found = take_turns(ways, 2 + work.runs)  # the lexer learns its states at first
            spreads = {way: spread(each[2:]) for way, each in found.items()}
            figures[f"{name}, from token {place}"] = spreads
            shown = ", ".join(f"{way} {show(one, '.2f')} ms" for way, one in spreads.items())
            click.echo(f"8 rows of {vocab:,} from token {place}, {name}: {shown}")
    return {"pair": opened.manifest.name, "vocab": vocab, "steps": whole, "ms_of_8_rows": figures}


def _time_steps(pair: LoadedPair, requests: list[Request]) -> dict[str, float]:
    """Milliseconds a step of requests that decode together: the executor's, and the host's."""
    generator = pair.make_generator(GeneratorOptions())
    results = generator.generate(requests)
    steps = max(one.statistics.steps for one in results)
    return {
        "executor": generator.executor_seconds / steps * 1e3,
        "host": (generator.step_seconds - generator.executor_seconds) / steps * 1e3,
    }


def _summarize(name: str, runs: dict[str, list[dict[str, float]]]) -> Figures:
    """What a schema adds to the host's part of a step, as a share of the executor's."""
    added = [
        (held["host"] - free["host"]) / held["executor"]
        for held, free in zip(runs["schema"], runs["free"], strict=True)
    ]
    click.echo(f"{name}: a schema adds {show(spread(added), '.3f')} of a step's executor time")
    each = {
        f"{way}_{part}_ms": spread([run[part] for run in found])
        for way, found in runs.items()
        for part in ("executor", "host")
    }
    return {"added_share": spread(added), **each}


def _choose_all(
    rows: FloatArray,
    token_ids: tuple[int, ...],
    sampling: SamplingParams,
    fork: Callable[[], Follower] | None,
) -> float:
    """Milliseconds of this thread to choose from every row; the answer goes on by its tokens."""
    follower = None if fork is None else fork()
    seconds = 0.0
    for position, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
        started = time.thread_time()
        choose_token(row, position, sampling, follower)
        seconds += time.thread_time() - started
        if follower is not None:
            follower.take(token_id)
    return seconds * 1e3


def _widen_vocabulary(tokenizer: dict[str, Any], size: int) -> Tokenizer:
    """A tokenizer of `size` tokens; each further one is two of its own after each other."""
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    most = max([*ids.values(), *(one["id"] for one in tokenizer["added_tokens"])]) + 1
    names, random = sorted(ids), np.random.default_rng(0)
    while most < size:
        first, second = (names[place] for place in random.integers(0, len(names), 2))
        if ids.setdefault(first + second, most) == most:
            most += 1
    return Tokenizer.from_str(json.dumps(tokenizer))


def _widen_rows(logits: FloatArray, size: int) -> FloatArray:
    random = np.random.default_rng(0)
    if logits.shape[1] >= size:
        return logits[:, :size]
    tails = np.sort(logits, axis=1)[:, : -min(1000, logits.shape[1] // 2)]
    more = random.choice(tails, size - logits.shape[1], axis=1)
    return np.ascontiguousarray(np.concatenate((logits, more), axis=1))
