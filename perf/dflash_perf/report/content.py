"""The report of a sweep: one self-contained HTML page, Markdown, and its charts as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from dflash_perf.extra import require
from dflash_perf.front import Front
from dflash_perf.harness.interactivity import SweepAnswer, build_fronts, throughput_unit
from dflash_perf.harness.load_metrics import (
    REQUEST_METRICS,
    RUN_METRICS,
    AcceptanceProfile,
    definition,
)
from dflash_perf.harness.points import SweepPoint
from dflash_perf.harness.store import ResultStore
from dflash_perf.report.charts import JOIN, ChartData, draw_all
from dflash_perf.report.report_page import Page, save_png
from dflash_perf.report.report_tables import (
    answer_table,
    configuration_table,
    failure_table,
    format_number,
    point_table,
    set_table,
)
from dflash_perf.report.style import Chart, chart_style
from dflash_trt.errors import DflashError

_COUNTED_BY = {
    "output_ids": "the server's token ids",
    "counts": "the server's own count",
    "tokenizer": "the tokenizer",
}


def write_report(
    results: Path, output: Path, targets: Sequence[float], baseline: str | None
) -> list[Path]:
    """Writes `output` (HTML), and beside it NAME.md and NAME-CHART.png; returns all, HTML first.

    Args:
        targets: interactivities to answer for; the first is marked in the chart. If empty, one
            that every configuration reaches is chosen.
        baseline: a configuration's name; by default that of the sweep.

    Raises:
        DflashError: `results` is no sweep's folder or has no run, no such configuration, or the
            perf extra is missing.
    """
    require("a report", "matplotlib", "scipy")
    with chart_style():
        charts, page = _gather(ResultStore(results), targets, baseline)
        output.parent.mkdir(parents=True, exist_ok=True)
        images = [save_png(chart, output.with_name(_image(output, chart))) for chart in charts]
        output.write_text(page.to_html(), encoding="utf-8")
    text = output.with_suffix(".md")
    text.write_text(page.to_markdown(lambda chart: _image(output, chart)), encoding="utf-8")
    return [output, text, *images]


def _image(output: Path, chart: Chart) -> str:
    return f"{output.stem}-{chart.key}.png"


def _gather(
    store: ResultStore, targets: Sequence[float], baseline: str | None
) -> tuple[list[Chart], Page]:
    plan, runs, points = store.plan(), store.runs(), store.points()
    if not points:
        raise DflashError("holds no finished run", where=store.folder, usage=True)
    config = plan["config"]
    names = list(dict.fromkeys(point.configuration for point in points))
    base = baseline or config["baseline"] or config["configurations"][0]["name"]
    if baseline is not None and baseline not in names:
        what = f"has no configuration {baseline!r}, but {', '.join(names)}"
        raise DflashError(what, where=store.folder, usage=True)
    profiles: dict[str, AcceptanceProfile] = {}
    for name in names:
        requests = [one for run in runs if run.configuration == name for one in store.requests(run)]
        if (profile := AcceptanceProfile.of(requests)) is not None:
            profiles[name] = profile
    fronts = build_fronts(points)
    chosen = list(targets) or choose_interactivity(fronts, base)
    answers = [SweepAnswer(target, base, fronts) for target in chosen]
    charts = draw_all(ChartData(points, base, profiles, answers[0] if answers else None))
    unit = throughput_unit(points)
    taus = {name: profile.acceptance_length for name, profile in profiles.items()}
    definitions = list(map(definition, REQUEST_METRICS.values()))
    definitions += map(definition, RUN_METRICS.values())
    repeats = sorted({len(point.runs) for point in points})
    page = Page(
        title="Sweep: " + (JOIN.join(names) if len(names) < 5 else f"{len(names)} configurations"),
        subtitle=f"begun {plan['began'][:10]}; {len(points)} points of "
        f"{' to '.join(map(str, dict.fromkeys((repeats[0], repeats[-1]))))} runs each, "
        f"{sum(point.requests for point in points):,} requests",
        headline=_headline(answers, points, chosen_here=not targets),
        sections=[
            ("Throughput at an interactivity", [answer_table(answers, unit, taus)]),
            ("", charts),
            ("Failed requests, which count in no other figure", [failure_table(points)]),
            ("Notes", [_notes(points)]),
            (
                "Points: means over the repeats, ± half of the mean's 95 % confidence interval",
                [point_table(points, unit)],
            ),
            ("Sets of prompts, without answers that repeat themselves", [set_table(points)]),
            ("Configurations", [configuration_table(config, plan.get("servers", {}))]),
            ("Requests and machine", [_settings(plan, points)]),
            ("Definitions", [definitions]),
        ],
    )
    return charts, page


def choose_interactivity(fronts: dict[str, Front], baseline: str) -> list[float]:
    """One that every configuration reaches: the middle of what all fronts cover, or, where they
    part, the most that all reach; the baseline's own range is kept to. Empty without fronts."""
    known = {name: front.points for name, front in fronts.items() if front.points}
    if not known:
        return []
    reached = min(points[-1].interactivity for points in known.values())
    covered = max(points[0].interactivity for points in known.values())
    chosen = (covered * reached) ** 0.5 if covered < reached else reached
    if baseline in known:  # below its range nothing is known of it, and so of any ratio
        chosen = max(chosen, known[baseline][0].interactivity)
    return [chosen]


def _headline(
    answers: Sequence[SweepAnswer], points: Sequence[SweepPoint], *, chosen_here: bool
) -> str | None:
    """The answer in a sentence or two: throughput at an interactivity, speed for one user."""
    if not answers:
        return None
    first = answers[0]
    ratios = {name: ratio for name in first.fronts if (ratio := first.ratio(name)) is not None}
    ratios.pop(first.baseline, None)
    text = f"At {first.interactivity:.4g} tokens/s per user, "
    if ratios:
        name = max(ratios, key=ratios.__getitem__)
        value = first.values[name]
        least = "at least " if value is not None and value.is_least else ""
        text += f"{name} gives {least}{ratios[name]:.2f} × the throughput of {first.baseline}."
    else:
        found = [name for name, value in first.values.items() if value is not None]
        measured = f"only {JOIN.join(found)} measured" if found else "nothing measured"
        text += f"{measured}: no ratio to {first.baseline}."
    alone = {
        point.configuration: point.interactivity
        for point in points
        if point.load.concurrency == 1 and point.interactivity
    }
    base = alone.pop(first.baseline, None)
    if alone and base is not None:
        name = max(alone, key=alone.__getitem__)
        text += f" A single user gets {alone[name] / base:.2f} × the tokens per second with {name}."
    if chosen_here:
        text += " (Chosen by this report: an interactivity that every configuration reaches.)"
    return text


def _notes(points: Sequence[SweepPoint]) -> list[str]:
    notes = [
        f"{point.configuration}, {point.load.label}: {note}"
        for point in points
        for note in point.notes
    ]
    by_source: dict[str, dict[str, None]] = {}
    for point in points:
        for source in (source for run in point.runs for source in run.token_sources):
            by_source.setdefault(source, {})[point.configuration] = None
    for source, names in by_source.items():
        how = _COUNTED_BY.get(source, source)
        notes.append(f"Tokens of {JOIN.join(names)} are counted by {how}.")
    if {len(point.runs) for point in points} == {1}:
        notes.append("Every point is a single run: no confidence can be given.")
    return notes


def _settings(plan: dict[str, Any], points: Sequence[SweepPoint]) -> list[str]:
    config, machine = plan["config"], plan["machine"]
    own = f"the prompts' own, {format_number(points[0].quantile('input_tokens', 'avg'))} on average"
    named = JOIN.join(config.get("prompts") or [PurePath(config["input_file"] or "").name])
    limits = {key: value for key, value in config["goodput"].items() if value is not None}
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    return [
        f"prompts: {named} (sha256 {plan['prompts_sha256']})",
        f"input tokens: {config['isl'] or own}",
        f"output tokens: {'' if config['ignore_eos'] else 'at most '}{config['osl']}",
        f"sampling: temperature {config['temperature']:g}, top_p {config['top_p']:g}, "
        f"top_k {config['top_k'] or 'off'}, seed {config['seed']}",
        *(f"goodput limit: {key} ≤ {value:g} ms" for key, value in limits.items()),
        f"client: {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}, {libraries}",
        *(f"command: {one['command']}" for one in plan["commands"]),
    ]
