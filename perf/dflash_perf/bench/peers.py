"""This project beside llama.cpp, OpenVINO GenAI and transformers: the same prompts, in turn.

Every NAME=BUNDLE decodes without drafts and with them, as its schedule or its pace has it. Each way
is a process of its own that stays open, and only the one that is asked works. A round gives all of
them the next prompts, as token ids, each round in another order. Told are tokens/s after those that
ended the prefill, by the wall's clock, greedy, ends of text ignored; the prefill's apart; ratios
round by round, with 95 % intervals of their medians by bootstrap. What cannot open is skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, NamedTuple

import click

from dflash_perf.bench import peer_worker, repeat
from dflash_perf.bench.base import Figures, Work, bench
from dflash_trt.bundle.bundle import load_tokenizer
from dflash_trt.core.text_table import columns
from dflash_trt.errors import DflashError
from dflash_trt.text.prompts import encode_prompts, read_prompts

OURS = (", plain", ", drafts")
PEERS = tuple(peer_worker.KINDS)[2:]


class Round(NamedTuple):
    """What one way made of one round's prompts: token ids by prompt, tokens/s, tokens a step."""

    answers: Sequence[list[int]]
    decode: float
    prefill: float
    tokens_per_step: float


@bench(runs=15)
def measure(
    work: Work,
    bundle: tuple[str, ...],
    *,
    peer: Annotated[
        tuple[str, ...], "llama.cpp=FILE.gguf, openvino=FOLDER or transformers=FOLDER; repeatable."
    ] = (),
    peer_python: Annotated[Path | None, "Python with the peers' libraries; else this one."] = None,
    prompts: Annotated[Path | None, "File of prompts; else the first bundle's."] = None,
    each: Annotated[int, "Prompts of a round."] = 3,
    max_tokens: int = 48,
    threads: tuple[int, ...] = (1, 2),
    note: Annotated[str | None, "Recorded: how the peers' models were made, say."] = None,
) -> Figures:
    bundles, models = repeat.read_named_bundles(bundle, None), read_peers(peer)
    first = next(iter(bundles.values()))
    texts = read_prompts(prompts or repeat.prompt_file(first))
    endless = cycle(encode_prompts(load_tokenizer(first), texts, raw=False))
    rounds = [list(islice(endless, each)) for _ in range(work.runs + 1)]  # the first warms up
    asked = {kind for kind, _ in models.values()}
    skipped = {one: f"no --peer {one}=MODEL is given" for one in PEERS if one not in asked}
    own = [sys.executable, "-m", peer_worker.__name__]
    foreign = [str(peer_python or sys.executable), "-I", str(Path(peer_worker.__file__))]
    both = [(name, way, str(one.folder)) for name, one in bundles.items() for way in OURS]
    commands = {name + way: [*own, way[2:], folder] for name, way, folder in both}
    commands |= {name: [*foreign, *model] for name, model in models.items()}
    by_threads: Figures = {}
    for count in threads:
        with ExitStack() as opened:
            wanted = {name: [*one, str(count)] for name, one in commands.items()}
            ways, told = _open_all(opened, work, wanted, rounds[0], skipped)
            ask = partial(_decode, max_tokens=max_tokens)
            turns = {name: partial(ask, one, iter(rounds)) for name, one in ways.items()}
            found = repeat.take_turns(turns, work.runs, warm_up=True)
        by_threads[str(count)] = summarize(found, told)
        show_table(by_threads[str(count)], count)
    for name, reason in skipped.items():
        click.echo(f"{name}: skipped, {reason}")
    return {"prompts": len(texts), "skipped": skipped, "by_threads": by_threads}


def read_peers(texts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Kind and model of each KIND=MODEL, by the name that it is shown by.

    Raises:
        DflashError: no such kind, or a model that is named twice or is not there (usage).
    """
    found: dict[str, tuple[str, str]] = {}
    for text in texts:
        kind, _, path = text.partition("=")
        name = f"{kind} {Path(path).name.removesuffix('.gguf')}"
        if kind not in PEERS or name in found or not (path and Path(path).exists()):
            what = f"{text!r} is no model that is there and not yet named, of {', '.join(PEERS)}"
            raise DflashError(what, where="--peer", usage=True)
        found[name] = kind, path
    return found


def _open_all(
    opened: ExitStack,
    work: Work,
    commands: Mapping[str, Sequence[str]],
    first: Sequence[Any],
    skipped: dict[str, str],
) -> tuple[dict[str, repeat.Worker], dict[str, str]]:
    """A process for each command that decodes `first`, and what it opened; peers may be skipped."""
    workers, told = dict[str, repeat.Worker](), dict[str, str]()
    for number, (name, command) in enumerate(commands.items()):
        worker = repeat.Worker(command, work.folder / str(number))
        opened.callback(worker.close)
        try:
            answer = worker.ask()
            if "model" in answer:
                worker.ask([first, 2])
        except DflashError as error:
            answer = {"error": error.message}
        if "model" in answer:
            workers[name], told[name] = worker, answer["model"]
        elif name.endswith(OURS):
            raise DflashError(answer["error"], where=name)
        else:
            skipped[name] = answer["error"]
    return workers, told


def _decode(worker: repeat.Worker, rounds: Iterator[Sequence[Any]], max_tokens: int) -> Round:
    prompts = next(rounds)
    ids, heads, steps, prefills, decodes = zip(*worker.ask([prompts, max_tokens]), strict=True)
    tokens, given = sum(map(len, ids)) - sum(heads), sum(map(len, prompts))
    return Round(ids, tokens / sum(decodes), given / sum(prefills), tokens / sum(steps))


def summarize(found: Mapping[str, Sequence[Round]], told: Mapping[str, str]) -> Figures:
    """Rates of each way, and ratios of each of ours to all others.

    Raises:
        AssertionError: drafts change a bundle's tokens.
    """
    ways, ratios = Figures(), Figures()
    for name, rounds in found.items():
        plain = found.get(name.removesuffix("drafts") + "plain", rounds)
        if [one.answers for one in rounds] != [one.answers for one in plain]:
            raise AssertionError(f"{name}: other tokens than without drafts")
        ways[name] = {
            "model": told[name],
            "decode": repeat.spread([one.decode for one in rounds]),
            "prefill": repeat.spread([one.prefill for one in rounds]),
            "tokens_per_step": fmean(one.tokens_per_step for one in rounds),
            "decode_by_round": [round(one.decode, 2) for one in rounds],
        }
        if name.endswith(OURS):
            others = {other: theirs for other, theirs in found.items() if other != name}
            ratios[name] = {other: _ratio(rounds, theirs) for other, theirs in others.items()}
    return {"ways": ways, "ratios": ratios}


def _ratio(above: Sequence[Round], below: Sequence[Round]) -> Figures:
    each = [mine.decode / theirs.decode for mine, theirs in zip(above, below, strict=True)]
    return {"median": median(each), "interval_95": repeat.interval(each)}


def show_table(figures: Figures, threads: int) -> None:
    """Prints a way a line, and how many times as fast each of ours is."""
    head = [f"{threads} thread(s), tokens/s", "decode (range)", "a step", "prefill"]
    rows = [[*head, *(f"{name} ÷ it (95 %)" for name in figures["ratios"])]]
    for name, one in figures["ways"].items():
        row = [name, repeat.show(one["decode"], ".1f"), f"{one['tokens_per_step']:.2f}"]
        row.append(f"{one['prefill']['median']:.0f}")
        for ratio in (ratios.get(name) for ratios in figures["ratios"].values()):
            shown = (ratio["median"], *ratio["interval_95"]) if ratio else ()
            row.append("{:.2f} ({:.2f} … {:.2f})".format(*shown) if shown else "")
        rows.append(row)
    opened = (f"  {name}: {one['model']}" for name, one in figures["ways"].items())
    click.echo("\n".join([*columns(rows), *opened]))
