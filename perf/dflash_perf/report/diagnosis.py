"""The page of a diagnosis: its verdict, acceptance by slot, and every change that was tried."""

from __future__ import annotations

from dflash_perf.extra import require
from dflash_perf.report.report_page import Page
from dflash_perf.report.report_tables import Table, format_ratio
from dflash_perf.report.style import Chart, chart_style, draw_shares, name_above, new_chart
from dflash_trt.proof.diagnosis.diagnose import Diagnosis
from dflash_trt.proof.diagnosis.evidence import Evidence


def render_diagnosis(bundle: str, diagnosis: Diagnosis) -> str:
    """The page, which loads nothing.

    Raises:
        DflashError: the perf extra is missing.
    """
    require("a diagnosis page", "matplotlib")
    evidence, verdict = diagnosis.evidence, diagnosis.verdict
    base = evidence.base
    low, high = evidence.expected
    with chart_style():
        return Page(
            title=f"Why is acceptance low? {bundle}",
            subtitle=f"{base.answers} answers, {base.tokens:,} tokens, {base.steps:,} steps; "
            f"acceptance length {base.acceptance_length or 0:.2f} ({low:.2f} to {high:.2f}), "
            f"break-even {evidence.break_even:.2f}",
            headline=verdict.text,
            sections=[
                *(
                    (
                        finding.cause.title.capitalize(),
                        [f"{finding.evidence}.", f"What to do: {finding.cause.fix}."],
                    )
                    for finding in verdict.findings
                ),
                ("", [_slot_chart(evidence)]),
                ("Sets and tags", [_group_table(evidence)]),
                ("Everything that was changed", [_change_table(evidence)]),
            ],
        ).to_html()


def _slot_chart(evidence: Evidence) -> Chart:
    base = evidence.base
    figure, (axes,) = new_chart()
    lines = {
        "among the 16 likeliest": base.recall_at_16,
        "accepted": base.conditional_acceptance,
        "the draft's confidence": base.confidence,
    }
    draw_shares(axes, lines)
    axes.set_xlabel("slot")
    axes.set_ylabel("share, where all slots before were accepted")
    name_above(axes, len(lines))
    return Chart(
        "slots",
        "Acceptance by slot",
        "How often a slot's draft is accepted, how often the answer's token is among its 16 "
        "likeliest, and what the draft itself believes. Far apart: it knows and does not choose.",
        "Lines of acceptance, recall and confidence over the slots of a block.",
        figure,
    )


def _change_table(evidence: Evidence) -> Table | None:
    rows = [
        {
            "change": trial.change,
            "speaks for": trial.cause.title,
            "tokens a step": format_ratio(trial.acceptance_length),
            "gain": str(trial.gain),
            "answers": str(trial.answers),
        }
        for trial in evidence.tried
    ]
    return Table.of(rows, words=2) if rows else None


def _group_table(evidence: Evidence) -> Table | None:
    groups = [*evidence.groups, *([evidence.reference] if evidence.reference else [])]
    rows = [
        {
            "answers of": group.name,
            "answers": str(group.acceptance.answers),
            "tokens a step": format_ratio(group.acceptance.acceptance_length),
            "against the others": str(group.gain),
        }
        for group in groups
    ]
    return Table.of(rows) if rows else None
