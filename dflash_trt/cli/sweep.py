"""`dflash-trt sweep`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.bars import StageBars
from dflash_trt.cli.options import (
    FILE,
    FOLDER,
    json_option,
    limit_option,
    parse_numbers,
    print_json,
    sets_option,
)
from dflash_trt.errors import DflashError
from dflash_trt.text.task_sets import name_sources

if TYPE_CHECKING:
    from dflash_perf.harness.points import SweepPoint

_COUNT = click.IntRange(1)
_NONE = "–"


@click.command("sweep")
@click.option(
    "--config",
    type=FILE,
    help="YAML with `configurations`, `baseline`, `goodput`, `temperature` and more "
    "(docs/measuring.md), and any option below; options win.",
)
@click.option(
    "--url",
    "urls",
    multiple=True,
    help="A configuration without YAML: where it is served, gRPC's host:port or the URL of an "
    "OpenAI endpoint, which is asked for chats; repeatable, the first is the baseline.",
)
@click.option("--model", help="…its name there.  [default: tensorrt_llm, or the one it lists]")
@sets_option
@limit_option
@click.option("--osl", type=_COUNT, help="Most output tokens.  [default: 128]")
@click.option("--concurrency", help="Closed loop: streams, as 1,2,4.  [default: 1,2,4,8,16]")
@click.option(
    "--interactivity",
    help="Also say the throughput at so many tokens/s per user, as 100,500, and measure more "
    "concurrencies around them.",
)
@click.option(
    "-o",
    "--output-dir",
    required=True,
    type=FOLDER,
    help="Folder of results; a sweep that was interrupted there goes on.",
)
@json_option
def command(
    config: Path | None,
    output_dir: Path,
    interactivity: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure served models under rising load, and what speculation gains at each.

    Each finished run is on disk before the next begins: the same command again continues.
    Tokens are counted by token ids where the server has them, else by its counts, else with
    the tokenizer, never by messages.
    """
    from dflash_perf.harness.interactivity import SweepAnswer, build_fronts, throughput_unit
    from dflash_perf.harness.sweep import run_sweep
    from dflash_perf.harness.sweep_config import read_sweep_config
    from dflash_perf.record import plain_argument
    from dflash_perf.report.report_tables import Table, text_lines

    targets = [] if interactivity is None else parse_numbers(interactivity, "--interactivity")
    settings = read_sweep_config(config, _collect(given))
    with StageBars() as bars:

        def say(line: str) -> None:
            bars.pause()
            click.echo(line, err=True)

        typed = " ".join(["dflash-trt", *map(plain_argument, sys.argv[1:])])
        store = run_sweep(settings, output_dir, bars, typed, targets, say)
    points = store.points()
    base, fronts = settings.baseline_name, build_fronts(points)
    answers = [SweepAnswer(target, base, fronts) for target in targets]
    if as_json:
        shown = [point.to_json() for point in points]
        print_json({"points": shown, "answers": [one.to_json() for one in answers]})
    else:
        unit = throughput_unit(points)
        click.echo(
            "interactivity = 1 / median TPOT in tokens/s per user; throughput = output "
            f"{unit}, ± 95 % confidence of the mean"
        )
        header = ("configuration", "load", "interactivity", "throughput", "TTFT p50/p99")
        rows = tuple(row for point in points for row in _rows(point))
        lines = text_lines(Table((*header, "τ", "failed"), rows, words=2))
        for line in [*lines, *(line for one in answers for line in one.lines(unit))]:
            click.echo(line)
    for point in points:
        for note in point.notes:
            click.secho(f"{point.configuration}, {point.load.label}: {note}", err=True, fg="yellow")
    if any(run.short == run.requests for point in points for run in point.runs):
        what = "every answer of a run was empty or ended after one token: nothing was measured"
        fix = "look at one with `generate --url`, or set `ignore_eos` in the --config"
        raise DflashError(what, where=output_dir, fix=fix)


def _collect(given: dict[str, Any]) -> dict[str, Any]:
    flags = {key: value for key, value in given.items() if value not in (None, ())}
    urls, model = flags.pop("urls", ()), flags.pop("model", None)
    if "sources" in flags:
        flags["prompts"] = name_sources(flags.pop("sources"))
    if "concurrency" in flags:
        numbers = parse_numbers(flags["concurrency"], "--concurrency")
        for number in numbers:
            if number != int(number):
                what = f"{number:g} is not a whole number"
                raise DflashError(what, where="--concurrency", usage=True)
        flags["concurrency"] = [int(number) for number in numbers]
    if model and not urls:
        raise DflashError("a configuration needs its --url", usage=True)
    if urls:
        bare = [re.sub(r"^\w+://|/v1/?$|[][]", "", one) for one in urls]
        hosts = [re.sub(r"[^\w.:-]+", "-", one).strip("-.:")[:60] for one in bare]
        is_alone = len(urls) == 1 and (model or not urls[0].startswith("http"))
        names = [model or "tensorrt_llm"] if is_alone else hosts
        flags["configurations"] = [
            {
                "name": name,
                "url": url,
                "kind": "chat" if url.startswith("http") else "llm-api",
                **({"model": model} if model else {}),
            }
            for name, url in zip(names, urls, strict=True)
        ]
    return flags


def _rows(point: SweepPoint) -> Iterator[tuple[str, ...]]:
    """The point's line, and below it one of each named set where there are several."""
    throughput = point.throughput
    median, tail = point.quantile("ttft", "p50"), point.quantile("ttft", "p99")
    rate, times = _NONE, _NONE
    if throughput is not None:
        half = throughput.confidence_95_half_width
        rate = f"{throughput.mean:,.0f}" + ("" if half is None else f" ± {half:,.0f}")
    if median is not None and tail is not None:
        times = f"{median * 1e3:,.1f}/{tail * 1e3:,.1f} ms"
    speed = _NONE if point.interactivity is None else f"{point.interactivity:,.1f}"
    tau = point.value("acceptance_length")
    length = _NONE if tau is None else f"{tau.mean:.2f}"
    yield point.configuration, point.load.label, speed, rate, times, length, str(point.failed)
    for name in point.set_names if len(point.set_names) > 1 else ():
        own, tau = (point.set_value(name, tag) for tag in ("interactivity", "acceptance_length"))
        speed = _NONE if own is None else f"{own.mean:,.1f}"
        length = _NONE if tau is None else f"{tau.mean:.2f}"
        failed = sum(one.requests - one.completed for one in point.of_set(name))
        yield "", f"  of {name}", speed, "", "", length, str(failed)
