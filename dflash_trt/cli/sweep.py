"""`dflash-trt sweep`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

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
    from dflash_perf.harness.interactivity import SweepAnswer
    from dflash_perf.harness.points import SweepPoint

_COUNT = click.IntRange(1)


@click.command("sweep")
@click.option(
    "--config",
    type=FILE,
    help="YAML with `configurations`, `baseline`, `goodput`, `temperature` and more "
    "(docs/measuring.md), and any option below; options win.",
)
@click.option("--name", help="One configuration without YAML: what to call it.  [default: model]")
@click.option("--url", help="…where it is served: gRPC host:port, or an OpenAI endpoint's URL.")
@click.option("--model", help="…its name there.  [default: tensorrt_llm]")
@click.option(
    "--kind",
    type=click.Choice(["llm-api", "completions", "chat"]),
    help="…the LLM-API contract of a Triton server, over gRPC, or OpenAI's.  [default: llm-api]",
)
@sets_option
@limit_option
@click.option("--osl", type=_COUNT, help="Most output tokens.  [default: 128]")
@click.option("--ignore-eos", is_flag=True, default=None, help="Always --osl output tokens.")
@click.option("--concurrency", help="Closed loop: streams, as 1,2,4.  [default: 1,2,4,8,16]")
@click.option("--request-rate", help="Open loop: requests/s at Poisson arrivals, as 0.5,2.")
@click.option("--request-count", type=_COUNT, help="Per run.  [default: 10 × concurrency]")
@click.option("--repeats", type=_COUNT, help="Runs of every point.  [default: 3]")
@click.option(
    "--interactivity", help="Also say the throughput at so many tokens/s per user, as 100,500."
)
@click.option("--refine", is_flag=True, help="…and measure more concurrencies around them.")
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
    refine: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure served models under rising load, and what speculation gains at each.

    Each finished run is on disk before the next begins: the same command again continues.
    Tokens are counted by token ids where the server has them, else by its counts, else with
    the tokenizer, never by messages.
    """
    from dflash_perf.harness.interactivity import answer
    from dflash_perf.harness.sweep import run_sweep
    from dflash_perf.harness.sweep_config import read_sweep_config

    from dflash_trt.cli.sweep_progress import SweepView

    targets = [] if interactivity is None else parse_numbers(interactivity, "--interactivity")
    if refine and not targets:
        raise DflashError("--refine needs an --interactivity to refine around", usage=True)
    settings = read_sweep_config(config, _collect(given))
    with SweepView() as view:
        store = run_sweep(settings, output_dir, view, _command_line(), targets if refine else [])
    points = store.points()
    answers = [answer(points, target, settings.baseline_name) for target in targets]
    if as_json:
        shown = [point.to_json() for point in points]
        print_json({"points": shown, "answers": [one.to_json() for one in answers]})
    else:
        _print(points, answers)
    for point in points:
        for note in point.notes:
            click.secho(f"{point.configuration}, {point.load.label}: {note}", err=True, fg="yellow")


def _collect(given: dict[str, Any]) -> dict[str, Any]:
    """The sweep's keys that the command line sets."""
    flags = {key: value for key, value in given.items() if value not in (None, ())}
    one = {key: flags.pop(key) for key in ("name", "url", "model", "kind") if key in flags}
    if "sources" in flags:
        flags["prompts"] = name_sources(flags.pop("sources"))
    if "concurrency" in flags:
        flags["concurrency"] = [
            _whole(number) for number in parse_numbers(flags["concurrency"], "--concurrency")
        ]
    if "request_rate" in flags:
        flags["request_rate"] = parse_numbers(flags["request_rate"], "--request-rate")
    if one:
        if "url" not in one:
            raise DflashError("a configuration needs its --url", usage=True)
        name = one.get("name", one.get("model", "tensorrt_llm"))
        flags["configurations"] = [{**one, "name": name}]
    return flags


def _whole(number: float) -> int:
    if number != int(number):
        raise DflashError(f"{number:g} is not a whole number", where="--concurrency", usage=True)
    return int(number)


def _command_line() -> str:
    """As typed, without this machine's folders."""
    return " ".join(["dflash-trt", *map(_without_folders, sys.argv[1:])])


def _without_folders(word: str) -> str:
    """`word`, where it or what follows its last "=" is an absolute path, with the path's name."""
    before, separator, path = word.rpartition("=")
    return f"{before}{separator}{Path(path).name}" if path.startswith("/") else word


def _print(points: list[SweepPoint], answers: list[SweepAnswer]) -> None:
    from dflash_perf.harness.interactivity import throughput_unit
    from dflash_perf.report.report_tables import Table, text_lines

    unit = throughput_unit(points)
    click.echo(
        f"interactivity = 1 / median TPOT in tokens/s per user; throughput = output {unit}, "
        "± 95 % confidence of the mean"
    )
    header = ("configuration", "load", "interactivity", "throughput", "TTFT p50/p99", "τ", "failed")
    rows = (row for point in points for row in (_row(point), *_set_rows(point)))
    table = Table(header, tuple(rows), words=2)
    for line in [*text_lines(table), *(line for one in answers for line in one.lines(unit))]:
        click.echo(line)


def _set_rows(point: SweepPoint) -> list[tuple[str, ...]]:
    """A line of each named set below the point's, where there are several."""
    from dflash_perf.report.report_tables import DASH

    rows: list[tuple[str, ...]] = []
    for name in point.set_names if len(point.set_names) > 1 else ():
        rate, tau = (point.set_value(name, tag) for tag in ("interactivity", "acceptance_length"))
        failed = sum(one.requests - one.completed for one in point.of_set(name))
        rows.append(
            (
                "",
                f"  of {name}",
                DASH if rate is None else f"{rate.mean:,.1f}",
                "",
                "",
                DASH if tau is None else f"{tau.mean:.2f}",
                str(failed),
            )
        )
    return rows


def _row(point: SweepPoint) -> tuple[str, ...]:
    throughput = point.throughput
    median, tail = point.quantile("ttft", "p50"), point.quantile("ttft", "p99")
    tau = point.value("acceptance_length")
    rate = "–"
    if throughput is not None:
        half = throughput.half_width
        rate = f"{throughput.mean:,.0f}" + ("" if half is None else f" ± {half:,.0f}")
    return (
        point.configuration,
        point.load.label,
        "–" if point.interactivity is None else f"{point.interactivity:,.1f}",
        rate,
        "–" if median is None or tail is None else f"{median * 1e3:,.1f}/{tail * 1e3:,.1f} ms",
        "–" if tau is None else f"{tau.mean:.2f}",
        str(point.failed),
    )
