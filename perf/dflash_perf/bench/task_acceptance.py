"""Acceptance lengths of a bundle on named sets of prompts, as papers count them.

The target alone answers every prompt, greedily and through the chat template, as many at a time as
the bundle holds; then the answers are replayed through the bundle's graphs. Both are what the
speculative loop does: its tokens are the target's, and a replay's counts are the loop's
(`dflash-trt verify` decodes with drafts instead, and compares bits). Answers that repeat themselves
are counted apart, and once more by a rule that lets the repeats overlap. Nothing depends on the
machine, and the record has hashes of prompts, weights and answers, none of their texts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.core.hashing import file_sha256
from dflash_trt.pair import LoadedPair
from dflash_trt.replay import Answer, Replay
from dflash_trt.runtime import Request, TokenEvent
from dflash_trt.runtime.loops import LOOP_TIMES, LOOP_TOKENS, is_looping
from dflash_trt.runtime.statistics import RequestStatistics, total
from dflash_trt.text.hub_prompts import is_hub_address
from dflash_trt.text.task_sets import ALL, Task, TaskSet, encode_tasks, name_sources, read_task_sets


def repeats_with_overlap(token_ids: Sequence[int]) -> bool:
    """Whether some LOOP_TOKENS tokens in a row come LOOP_TIMES times, each start counted."""
    runs = Counter(
        tuple(token_ids[start : start + LOOP_TOKENS])
        for start in range(len(token_ids) - LOOP_TOKENS + 1)
    )
    return max(runs.values(), default=0) >= LOOP_TIMES


@bench()
def measure(
    work: Work,
    bundle: Path,
    *,
    prompts: Annotated[tuple[str, ...], "A named set, as NAME=FILE; repeatable."],
    limit_prompts: int | None = None,
    max_tokens: int = 256,
    threads: int = 1,
    answers_file: Annotated[
        Path | None, "Keep answers here, as token ids: a run that was killed goes on with them."
    ] = None,
) -> Figures:
    opened = open_bundle(bundle)
    sources = name_sources(prompts)
    sets = read_task_sets(sources, limit_prompts)
    kept = KeptAnswers(answers_file or work.folder / "answers.jsonl", opened, max_tokens)
    tasks, answers = answer_tasks(sets, kept, threads)
    limits = opened.manifest.limits
    with Replay(opened, threads=threads, sequences=min(8, limits.max_batch)) as replay:
        counts = replay.measure(answers).per_answer
    names = [one.name for one in sets] + [ALL] * (len(sets) > 1)
    figures = []
    for name in names:
        chosen = [i for i, task in enumerate(tasks) if name in (task.set_name, ALL)]
        found = _figures([answers[i] for i in chosen], [counts[i] for i in chosen])
        cut = sum(len(answers[i].token_ids) == max_tokens for i in chosen)
        figures.append({"name": name, "prompts": len(chosen), "of_full_length": cut, **found})
        _show(figures[-1])
    return {
        "pair": opened.manifest.name,
        "block_size": limits.block_size,
        "threads": threads,
        "sha256": {
            **{f"prompts {name}": _source_sha256(source) for name, source in sources.items()},
            **_weight_hashes(opened),
        },
        "sets": figures,
    }


class KeptAnswers:
    """Answers in a file, a line for each, by what decides them: the pair, the prompt, the limit."""

    def __init__(self, file: Path, bundle: Bundle, max_tokens: int) -> None:
        self.bundle, self.max_tokens = bundle, max_tokens
        self._file = file
        self._weights = sorted(_weight_hashes(bundle).values())
        lines = file.read_text("utf-8").splitlines() if file.is_file() else []
        rows = (json.loads(line) for line in lines)
        self.known: dict[str, list[int]] = {row["key"]: row["token_ids"] for row in rows}

    def key(self, task: Task) -> str:
        parts = [self._weights, list(task.ids), self.max_tokens]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def add(self, task: Task, token_ids: Sequence[int]) -> None:
        key = self.key(task)
        self.known[key] = list(token_ids)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "token_ids": self.known[key]}) + "\n")


def answer_tasks(
    sets: Sequence[TaskSet], kept: KeptAnswers, threads: int
) -> tuple[list[Task], list[Answer]]:
    """The prompts of `sets` and the target's answers; what is not kept yet is decoded."""
    with LoadedPair(kept.bundle, threads=threads, speculation=False) as pair:
        tasks = encode_tasks(pair.tokenizer, sets)
        _decode_missing(pair, tasks, kept)
    answers = [Answer(task.ids, kept.known[kept.key(task)], task.set_name) for task in tasks]
    return tasks, answers


def _decode_missing(pair: LoadedPair, tasks: Sequence[Task], kept: KeptAnswers) -> None:
    """Decodes and keeps what is not kept yet."""
    missing = [task for task in tasks if kept.key(task) not in kept.known]

    def hear(index: int, event: TokenEvent) -> None:
        if event.result is not None:
            kept.add(missing[index], event.result.token_ids)
            click.echo(f"{len(kept.known):,} answers", err=True)

    if missing:
        pair.run([Request(prompt_ids=one.ids, max_tokens=kept.max_tokens) for one in missing], hear)


def _figures(answers: Sequence[Answer], counts: Sequence[RequestStatistics]) -> Figures:
    """Of the answers that do not repeat themselves, and of the others, by both rules."""
    tokens = json.dumps([list(one.token_ids) for one in answers]).encode()
    return {
        "answers_sha256": hashlib.sha256(tokens).hexdigest(),
        **_split(answers, counts, is_looping),
        "with_overlap": _split(answers, counts, repeats_with_overlap),
    }


def _split(
    answers: Sequence[Answer],
    counts: Sequence[RequestStatistics],
    repeats: Callable[[Sequence[int]], bool],
) -> Figures:
    pairs = list(zip(answers, counts, strict=True))
    return {
        name: _sums([count for answer, count in pairs if repeats(answer.token_ids) == looping])
        for name, looping in (("not_looping", False), ("looping", True))
    }


def _sums(counts: Sequence[RequestStatistics]) -> Figures:
    sums = total(counts)
    return {
        "answers": len(counts),
        "output_tokens": sums.output_tokens,
        "steps": sums.steps,
        "acceptance_length": sums.acceptance_length,
        "conditional_acceptance": list(sums.conditional_acceptance),
    }


def _source_sha256(source: str) -> str | None:
    """Of a file; what is on a hub has none here."""
    return None if is_hub_address(source) else file_sha256(Path(source))


def _weight_hashes(bundle: Bundle) -> dict[str, str]:
    """Of target and draft, which say which pair it was."""
    folder = bundle.folder
    return {
        file.path: file.sha256 or file_sha256(folder / file.path)
        for file in bundle.manifest.files
        if file.path.endswith(".safetensors")
    }


def _show(figures: dict[str, Any]) -> None:
    def tau(part: Figures) -> str:
        length = part["acceptance_length"]
        return "–" if length is None else f"{length:.3f}"

    def line(one: Figures) -> str:
        own, other = one["not_looping"], one["looping"]
        return (
            f"τ {tau(own)} over {own['answers']} answers "
            f"({own['output_tokens']:,} tokens, {own['steps']:,} steps); "
            f"{tau(other)} over {other['answers']} that repeat themselves"
        )

    click.echo(f"{figures['name']}: {line(figures)}")
    click.echo(f"{figures['name']}, repeats may overlap: {line(figures['with_overlap'])}")
