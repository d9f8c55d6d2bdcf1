"""The page of a diagnosis: its verdict, acceptance by slot, and every change that was tried."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_perf.extra import require
from dflash_perf.report.content import Chart
from dflash_perf.report.report_page import render_page
from dflash_perf.report.report_tables import DASH, Table
from dflash_perf.report.style import COLOURS, chart_style, label_lines, new_chart
from dflash_trt.proof.diagnosis.diagnose import Diagnosis
from dflash_trt.proof.diagnosis.evidence import Evidence
from dflash_trt.proof.diagnosis.trial import Trial


def render_diagnosis(bundle: str, diagnosis: Diagnosis) -> str:
    """The page, which loads nothing.

    Raises:
        DflashError: the perf extra is missing.
    """
    require("a diagnosis page", "matplotlib")
    evidence = diagnosis.evidence
    base = evidence.base
    low, high = evidence.expected
    with chart_style():
        return render_page(
            "diagnosis.html.j2",
            [_slot_chart(evidence)],
            bundle=bundle,
            verdict=diagnosis.verdict,
            summary=f"{base.answers} answers, {base.tokens:,} tokens, {base.steps:,} steps; "
            f"acceptance length {base.acceptance_length or 0:.2f} ({low:.2f} to {high:.2f}), "
            f"break-even {evidence.break_even:.2f}",
            groups=_group_table(evidence),
            changes=_change_table(evidence.tried),
        )


def _slot_chart(evidence: Evidence) -> Chart:
    base = evidence.base
    lines = {
        "among the 16 likeliest": base.recall_at_16,
        "accepted": base.conditional_acceptance,
        "the draft's confidence": base.confidence,
    }
    figure, (axes,) = new_chart()
    ends: list[tuple[float, float, str, str]] = []
    for (name, values), colour in zip(lines.items(), COLOURS, strict=False):
        known = [(slot, one) for slot, one in enumerate(values, start=1) if one is not None]
        if known:
            axes.plot(*zip(*known, strict=True), marker="o", color=colour)
            ends.append((*known[-1], name, colour))
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("slot")
    axes.set_ylabel("share, where all slots before were accepted")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xticks(range(1, len(base.recall_at_16) + 1))
    label_lines(axes, ends)
    return Chart(
        "slots",
        "Acceptance by slot",
        "How often a slot's draft is accepted, how often the answer's token is among its 16 "
        "likeliest, and what the draft itself believes. Far apart: it knows and does not choose.",
        "Lines of acceptance, recall and confidence over the slots of a block.",
        figure,
    )


def _change_table(trials: Sequence[Trial]) -> Table:
    rows = [
        {
            "change": trial.change,
            "speaks for": trial.cause.title,
            "tokens a step": _number(trial.acceptance_length),
            "gain": str(trial.gain),
            "answers": str(trial.answers),
        }
        for trial in trials
    ]
    return Table.of(rows, words=2) if rows else Table(("change",), ())


def _group_table(evidence: Evidence) -> Table | None:
    groups = [*evidence.groups, *([evidence.reference] if evidence.reference else [])]
    rows = [
        {
            "answers of": group.name,
            "answers": str(group.acceptance.answers),
            "tokens a step": _number(group.acceptance.acceptance_length),
            "against the others": str(group.gain),
        }
        for group in groups
    ]
    return Table.of(rows) if rows else None


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"
