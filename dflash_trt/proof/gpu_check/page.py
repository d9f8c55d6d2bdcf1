"""A record for people: lines for a terminal, and a page to send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from dflash_trt.errors import one_line
from dflash_trt.proof.gpu_check.gpu_record import CheckRecord, PartOutcome

MARKS = {True: "yes", False: "no", None: ""}
SHOWN_FIGURES = 24
CELL = 400
LEFT_OUT = ("skipped", "not run")


def lines(record: CheckRecord) -> Iterator[str]:
    """A line per part that ran, per finding that failed, and per reason to leave parts out."""
    yield summary(record)
    for name, outcome in record.parts.items():
        if outcome.status in LEFT_OUT:
            continue
        yield f"{MARKS[outcome.passed]:3}  {name}: {describe(outcome)}"
        for probe in outcome.probes:
            if probe.passed is False:
                yield f"       no  {probe.name}: {probe.detail}"
    for kinds, reason in _left_out(record):
        yield f"     {kinds}: {reason}"


def summary(record: CheckRecord) -> str:
    """The machine, and whether all is well."""
    gpu, left = record.machine["gpu"], record.unfinished()
    verdict = "all that ran is as it should be" if record.passed else "something is wrong"
    unfinished = f"; {len(left)} parts are unfinished" if left else ""
    machine = f"{gpu['name']} ({gpu['arch']}), {gpu['memory_gb']} GB, CUDA {gpu['driver_cuda']}"
    return f"{machine}: {verdict}{unfinished}"


def describe(outcome: PartOutcome) -> str:
    """How a part ended."""
    failed = sum(one.passed is False for one in outcome.probes)
    found = f"{len(outcome.probes)} findings" if outcome.probes else "no finding"
    found += f", {failed} of them wrong" * bool(failed) + f", {outcome.seconds:.0f} s"
    return found if outcome.status == "done" else f"{outcome.status}: {outcome.reason} ({found})"


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
    machine, gpu, parts = record.machine, record.machine["gpu"], record.parts
    versions = ", ".join(f"{name} {one}" for name, one in machine["libraries"].items())
    found = [(name, probe) for name, outcome in parts.items() for probe in outcome.probes]
    wrong = [(name, one.name, one.detail) for name, one in found if one.passed is False]
    wrong += [
        (name, str(one.status), one.reason or "") for name, one in parts.items() if one.is_broken
    ]
    rows = [
        (name, MARKS[one.passed], describe(one))
        for name, one in parts.items()
        if one.status not in LEFT_OUT
    ]
    held: dict[str, list[bool]] = {}
    for name, one in found:
        if one.passed is not None and not name.startswith("kernels"):  # their cases are many
            held.setdefault(one.name, []).append(one.passed)
    figures = [
        (one.name, one.detail)
        for outcome in parts.values()
        for one in [one for one in outcome.probes if one.passed is None][:SHOWN_FIGURES]
    ]
    text = [
        f"# GPU check: {gpu['name']}, {record.date[:10]}",
        "",
        f"{summary(record)}.",
        "",
        f"Driver {gpu['driver'] or 'unknown'}, {machine['system']}, Python {machine['python']}, "
        f"{versions}; code {record.source}. All figures are in `record.json` beside this page; "
        "docs/tensorrt.md says what they mean.",
        *_table("What is wrong", ("part", "what should hold", "found"), wrong),
        *_table("Parts", ("part", "passed", "how it ended"), rows),
        *_table("Left out", ("parts", "why"), _left_out(record)),
        *_table(
            "What must hold",
            ("of CUDA and engines", "holds", "parts"),
            [(name, MARKS[all(one)], len(one)) for name, one in held.items()],
        ),
        *_table("Figures", ("what", "measured"), figures),
    ]
    return "\n".join(text) + "\n"


def _table(title: str, header: tuple[str, ...], rows: Iterable[Iterable[Any]]) -> list[str]:
    """A table of Markdown; none without rows."""
    written = [
        f"| {' | '.join(one_line(cell or '', CELL).replace('|', chr(92) + '|') for cell in row)} |"
        for row in rows
    ]
    if not written:
        return []
    return ["", f"## {title}", f"| {' | '.join(header)} |", "|---" * len(header) + "|", *written]
