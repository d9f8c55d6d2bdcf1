"""Pages: complete, self-contained, honest about what is missing, safe with any name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from dflash_perf.harness.records import RequestRecord, RunRecord
from dflash_perf.harness.store import ResultStore
from dflash_perf.report.style import COLOURS, chart_style, looks, name_above, new_chart
from dflash_perf.report.training import render_training

from dflash_trt.training.observer import Evaluation, TrainedDraft
from tests.frozen.command_line import run, run_well
from tests.perf.invented import BLOCKS, invent_run, invented_config, summarize, write_invented
from tests.perf.page import Page

CHARTS = ["front", "speedup", "acceptance-by-position", "ttft", "tpot"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("invented") / "results"
    write_invented(folder, invented_config(concurrency=[1, 4, 16, 64], repeats=2))
    return folder


@pytest.fixture(scope="module")
def report(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report's files."""
    page = tmp_path_factory.mktemp("report") / "report.html"
    done = run_well("report", results, "-o", page, "--interactivity", "80,5000", "--json")
    images = [f"report-{key}.png" for key in CHARTS]
    assert {Path(name).name for name in done.json} == {"report.html", "report.md", *images}
    return page.parent


def test_the_page_is_complete_and_loads_nothing(report: Path) -> None:
    text = (report / "report.html").read_text()
    assert not re.findall(r"https?:|//[a-z]|@import|<script|<link|<iframe", text)
    parsed = Page(text)
    assert parsed.open == []
    assert all(
        value.startswith("#") or re.fullmatch(r"[^:]*:[^:]*(;[^:]*:[^:]*)*;?", value)
        for value in parsed.loads
    )
    places = re.findall(r"url\(([^)]*)\)", text)
    places += [value for value in parsed.loads if value.startswith("#")]
    assert {place.removeprefix("#") for place in places} <= set(parsed.ids)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert list(parsed.figures) == CHARTS
    assert all(shapes > 20 for shapes in parsed.figures.values()), parsed.figures
    assert len(parsed.labels) == len(CHARTS) and all(parsed.labels)
    for words in [
        *BLOCKS,
        *("not measured", "Interactivity = 1 / median TPOT", "E2E = request sent", "cores"),
    ]:
        assert words in parsed.text
    for key in CHARTS:
        image = (report / f"report-{key}.png").read_bytes()
        assert image.startswith(b"\x89PNG") and len(image) > 10_000


def test_markdown_says_the_same(report: Path) -> None:
    text = (report / "report.md").read_text()
    assert re.findall(r"!\[.+\]\((.+)\)", text) == [f"report-{key}.png" for key in CHARTS]
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    headline = next(line for line in text.splitlines() if line.startswith("**"))
    ratio = re.search(r"gives (?:at least )?([\d.]+) × the throughput of autoregressive", headline)
    assert ratio is not None and 1 < float(ratio[1]) < 10
    assert re.search(r"A single user gets [1-9]\.\d\d × the tokens per second", headline)
    assert headline[2:-2] in (report / "report.html").read_text().replace("&#39;", "'")


def test_the_baseline_can_be_another(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    run_well("report", results, "-o", page, "--baseline", "DFlash, block 4")
    assert "Output throughput ÷ that of DFlash, block 4" in page.with_suffix(".md").read_text()
    run("report", results, "-o", page, "--baseline", "x").fails(2, "no configuration 'x'")


def test_many_long_names_leave_room_for_the_chart() -> None:
    names = [f"DFlash {number}, same data: τ = 3.50" for number in range(len(COLOURS) + 1)]
    chosen = looks(names, names[0])
    assert len({look["color"] for look in chosen.values()}) == len(names)
    with chart_style():
        figure, (axes,) = new_chart()
        for name, look in chosen.items():
            axes.plot([0, 1], [0, 1], label=name, **look)
        name_above(axes, len(names))
        figure.draw_without_rendering()
    assert axes.get_position().width > 0.85


def test_names_and_errors_are_words_not_markup(tmp_path: Path) -> None:
    """Whatever a server answers is shown, never run; charts do without what is missing."""
    config = invented_config(
        configurations=[{"name": "autoregressive", "url": "https://h:1", "hardware": "<b>&|`"}],
        concurrency=[1],
        repeats=1,
    )
    store = ResultStore(tmp_path / "results")
    load = config.loads[0]
    requests = (
        RequestRecord(index=0, prompt=0, sent_s=0, error="<script>alert(1)</script> | `x`"),
        RequestRecord(index=1, prompt=1, sent_s=0, ttft_s=0.1, e2e_s=0.1, output_tokens=1),
    )
    record = RunRecord(requests=requests, window_s=1.0, client_cpu_share=0.9)
    with store.open_for(config, "", "dflash-trt sweep"):
        store.add(record, summarize(record, "autoregressive", load, 0))
    run_well("report", tmp_path / "results")
    text = (tmp_path / "results" / "report.html").read_text()
    parsed = Page(text)
    assert "script" not in parsed.tags and "b" not in parsed.tags
    assert "<script>alert(1)</script> | `x`" in parsed.text and "<b>&|`" in parsed.text
    assert list(parsed.figures) == ["ttft"]
    for words in ["1 of 2 requests failed", "may be the bottleneck", "a single run"]:
        assert words in parsed.text
    markdown = (tmp_path / "results" / "report.md").read_text()
    assert "\\<script\\>" in markdown and "\\|" in markdown


def test_a_sweep_without_whole_runs(tmp_path: Path) -> None:
    """What holds no sweep at all is refused in tests/frozen."""
    config = invented_config()
    store = ResultStore(tmp_path / "results")
    with store.open_for(config, "", ""):
        pass
    run("report", tmp_path / "results").fails(2, "holds no finished run")
    run_folder = tmp_path / "results" / "runs" / "autoregressive" / "c1-r0"
    run_folder.mkdir(parents=True)
    (run_folder / "summary.json").write_text("{}")
    run("report", tmp_path / "results").fails(1, "is no summary of a run")
    record = invent_run(4, 1, 0)
    summary = summarize(record, "DFlash, block 4", config.loads[0], 0)
    (run_folder / "summary.json").write_text(json.dumps(summary.to_json()))
    run("report", tmp_path / "results").fails(1, "no such file")


def measured(step: int, *sets: str) -> Evaluation:
    return Evaluation(
        step=step,
        epoch=step / 100,
        loss=4 - step / 200 if step else None,
        acceptance_length=1.5 + step / 200 if step < 300 else 2.5,
        conditional_acceptance=[0.5, 0.25, None],
        recall_at_16=[0.9, 0.8, None],
        sets=dict.fromkeys(sets, 1.5 + step / 200),
    )


def test_the_page_of_a_training() -> None:
    steps = range(0, 400, 100)
    evaluations = tuple(measured(step, "gsm8k", "<b>") for step in steps)
    trained = TrainedDraft(Path(), evaluations, 500, "the hours")
    text = render_training("my <draft>", trained)
    page = Page(text)
    assert not page.open and not re.findall(r"https?:|//[a-z]|@import|<script|<link", text)
    assert list(page.figures) == ["length", "slots", "loss"]
    assert all(shapes > 10 for shapes in page.figures.values())
    assert len(set(page.ids)) == len(page.ids) and all(page.labels)
    for shown in ("my <draft>", "epoch 3.0; ended by the hours", "2.50 on held-out prompts"):
        assert shown in page.text
    assert "at step 200" in page.text and "200 (kept)" in page.text  # the best, not the last
    assert "τ, <b>" in page.text
    assert "From pale to full: step 0, 100, 200, 300." in page.text

    selected = {"candidate_recall": [1.0, 0.75, None], "selector_accuracy": [0.5, 0.25, None]}
    dflash2 = tuple(replace(one, **selected) for one in evaluations)
    page = Page(render_training("draft", TrainedDraft(Path(), dflash2, 500, "the hours")))
    assert list(page.figures) == ["length", "slots", "candidates", "loss"]
    assert page.figures["candidates"] > 10 and "chosen, slot 1" in page.text

    first = TrainedDraft(Path(), (measured(0, "all"),), 500, "the hours")
    assert list(Page(render_training("draft", first)).figures) == ["length", "slots"]
