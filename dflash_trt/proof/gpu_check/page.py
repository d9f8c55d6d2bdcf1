"""A record for people: lines for a terminal, and a page to send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from dflash_trt.errors import one_line
from dflash_trt.proof.gpu_check.contracts import judge_contracts
from dflash_trt.proof.gpu_check.outcome import PartOutcome
from dflash_trt.proof.gpu_check.record import CheckRecord

MARKS = {True: "yes", False: "no", None: ""}
SHOWN_FIGURES = 24
CELL = 400
LEFT_OUT = ("skipped", "not run")


def lines(record: CheckRecord) -> Iterator[str]:
    """A line per part that ran, per finding that failed, and per reason to leave parts out."""
    yield summary(record)
    for name, outcome in _ran(record).items():
        yield f"{MARKS[outcome.passed]:3}  {name}: {describe(outcome)}"
        for probe in outcome.probes:
            if probe.passed is False:
                yield f"       no  {probe.name}: {probe.detail}"
    for kinds, reason in _left_out(record):
        yield f"     {kinds}: {reason}"


def summary(record: CheckRecord) -> str:
    """The machine, and whether all is well."""
    gpu, left = record.machine["gpu"], record.unfinished
    verdict = "all that ran is as it should be" if record.passed else "something is wrong"
    unfinished = f"; {len(left)} parts are unfinished" if left else ""
    machine = f"{gpu['name']} ({gpu['arch']}), {gpu['memory_gb']} GB, CUDA {gpu['driver_cuda']}"
    return f"{machine}: {verdict}{unfinished}"


def describe(outcome: PartOutcome) -> str:
    """How a part ended."""
    failed = sum(one.passed is False for one in outcome.probes)
    found = f"{len(outcome.probes)} findings" if outcome.probes else "no finding"
    if failed:
        found += f", {failed} of them wrong"
    if outcome.status == "done":
        return f"{found}, {outcome.seconds:.0f} s"
    return f"{outcome.status}: {outcome.reason} ({found}, {outcome.seconds:.0f} s)"


def _ran(record: CheckRecord) -> dict[str, PartOutcome]:
    return {name: one for name, one in record.parts.items() if one.status not in LEFT_OUT}


def _left_out(record: CheckRecord) -> list[tuple[str, str]]:
    """The kinds of parts that were not begun, and why: one reason is often that of many."""
    reasons: dict[str, Counter[str]] = {}
    for name, one in record.parts.items():
        if one.status in LEFT_OUT:
            kinds = reasons.setdefault(f"{one.status}: {one.reason}", Counter())
            kinds[name.partition(": ")[0]] += 1
    return [
        (", ".join(f"{kind} ({count})" for kind, count in kinds.items()), reason)
        for reason, kinds in reasons.items()
    ]


def page(record: CheckRecord) -> str:
    """The record as one page of Markdown."""
    return "\n".join(_page(record)) + "\n"


def _page(record: CheckRecord) -> Iterator[str]:
    machine, gpu = record.machine, record.machine["gpu"]
    versions = ", ".join(f"{name} {one}" for name, one in machine["libraries"].items())
    yield f"# GPU check: {gpu['name']}, {record.date[:10]}"
    yield ""
    yield f"{summary(record)}."
    yield ""
    yield f"Driver {gpu['driver'] or 'unknown'}, {machine['system']}, Python {machine['python']}, "
    yield f"{versions}; code {record.source}. All figures are in `record.json` beside this page;"
    yield "what they mean is in docs/first-gpu.md."
    wrong = [
        (name, probe.name, probe.detail)
        for name, outcome in record.parts.items()
        for probe in outcome.probes
        if probe.passed is False
    ]
    wrong += [
        (name, outcome.status, outcome.reason or "")
        for name, outcome in record.parts.items()
        if outcome.is_broken
    ]
    if wrong:
        yield from _table("What is wrong", ("part", "what should hold", "found"), wrong)
    rows = [(name, MARKS[one.passed], describe(one)) for name, one in _ran(record).items()]
    yield from _table("Parts", ("part", "passed", "how it ended"), rows)
    if _left_out(record):
        yield from _table("Left out", ("parts", "why"), _left_out(record))
    contracts = [
        (one["party"], one["belief"], MARKS[one["holds"]], one["probe"])
        for one in judge_contracts(record.parts)
    ]
    header = ("of", "what the tests' stand-ins believe", "holds", "shown by")
    yield from _table("Contracts", header, contracts)
    figures = [
        (probe.name, probe.detail)
        for outcome in record.parts.values()
        for probe in [one for one in outcome.probes if one.passed is None][:SHOWN_FIGURES]
    ]
    if figures:
        yield from _table("Figures", ("what", "measured"), figures)


def _table(title: str, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    yield ""
    yield f"## {title}"
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(list(header)) + "|"
    for row in rows:
        cells = (one_line(cell or "", CELL).replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"
