"""The page of a training: acceptance and loss on the way, and what the slots have learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_perf.report.report_page import Page
from dflash_perf.report.report_tables import DASH, Table, format_ratio
from dflash_perf.report.style import (
    COLOURS,
    FAINT,
    INK,
    Chart,
    chart_style,
    draw_shares,
    name_above,
    new_chart,
)
from dflash_trt.training.observer import Evaluation, TrainedDraft, WrittenPrompts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SLOT_LINES = 5
"""Measurements whose slots are drawn: the first, the last, and some between."""


SAMPLES, OPENINGS = 12, 8


def render_training(name: str, trained: TrainedDraft, written: WrittenPrompts | None = None) -> str:
    """The page of the draft `name`, which loads nothing; there is a measurement.

    `written` are the prompts that the target wrote.
    """
    evaluations, best = trained.evaluations, trained.best
    last = evaluations[-1]
    done = f"step {last.step:,} of {trained.steps:,}, epoch {last.epoch:.1f}"
    with chart_style():
        charts = [_length_chart(evaluations, best), _slot_chart(evaluations)]
        charts += [_candidate_chart(evaluations)] if last.candidate_recall else []
        charts += [_loss_chart(evaluations)] if any(one.loss for one in evaluations) else []
        return Page(
            title=f"Training of {name}",
            subtitle=f"{done}; ended by {trained.ended}",
            headline=f"Acceptance length {best.acceptance_length:.2f} on held-out prompts, "
            f"at step {best.step:,}",
            sections=[
                ("", charts),
                ("Every measurement", [_table(evaluations, best)]),
                *([] if written is None else [("What the target asks", _portrait(written))]),
            ],
        ).to_html()


def _portrait(written: WrittenPrompts) -> list[Table]:
    """Lengths, first words and samples of prompts that the target wrote."""
    lengths, count = sorted(written.lengths), len(written.lengths)
    tenths = [lengths[min(count * at // 10, count - 1)] for at in (0, 1, 5, 9, 10)]
    first = Counter(" ".join(text.split()[:2]) for text in written.texts)
    quantiles = ("least", "a tenth below", "median", "a tenth above", "most")
    left_out = written.left_out.items()
    numbers = {"prompts": count, "second messages": written.second_turns}
    numbers |= {f"tokens, {one}": tokens for one, tokens in zip(quantiles, tenths, strict=True)}
    numbers |= {f"left out: {why}": n for why, n in left_out}
    shares = {words: f"{100 * n / count:.1f} %" for words, n in first.most_common(OPENINGS)}
    samples = written.texts[:: max(count // SAMPLES, 1)][:SAMPLES]
    return [
        Table.of([{"": one, "number": f"{n:,}"} for one, n in numbers.items()]),
        Table.of([{"first words": words, "share": share} for words, share in shares.items()]),
        Table.of([{"some of them": text} for text in samples]),
    ]


def _length_chart(evaluations: Sequence[Evaluation], best: Evaluation) -> Chart:
    figure, (axes,) = new_chart()
    sets = list(evaluations[-1].sets)
    for name, colour in zip(sets if len(sets) > 1 else [], COLOURS[1:], strict=False):
        known = [(one.step, one.sets[name]) for one in evaluations if name in one.sets]
        xs, ys = zip(*known, strict=True)
        axes.plot(xs, ys, "o-", color=colour, label=name, linewidth=1, markersize=3)
    steps = [one.step for one in evaluations]
    lengths = [one.acceptance_length for one in evaluations]
    axes.plot(steps, lengths, "o-", color=COLOURS[0], label="all")
    ring: dict[str, Any] = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.8}
    axes.plot([best.step], [best.acceptance_length], "o", color=COLOURS[0], **ring)
    axes.set_xlabel("step")
    axes.set_ylabel("acceptance length τ, tokens a step")
    axes.margins(y=0.1)
    name_above(axes, len(sets) + 1)
    return Chart(
        "length",
        "Acceptance length",
        "Tokens a verify step brings on held-out prompts, replayed through the graphs that serve, "
        "and those of the first sets. The ring is the draft that is kept.",
        "Lines of the acceptance length over steps.",
        figure,
    )


def _slot_chart(evaluations: Sequence[Evaluation]) -> Chart:
    shares = {
        "accepted": [one.conditional_acceptance for one in evaluations],
        "among the 16 likeliest": [one.recall_at_16 for one in evaluations],
    }
    figure, steps = _draw_slots(evaluations, shares)
    return Chart(
        "slots",
        "By slot",
        "How often a slot's draft is accepted, and how often the answer's token is among its 16 "
        f"likeliest. From pale to full: step {steps}.",
        "Lines of acceptance and of recall over the slots of a block, for some measurements.",
        figure,
    )


def _candidate_chart(evaluations: Sequence[Evaluation]) -> Chart:
    """What limits a DFlash 2 draft: its candidates, or the choice among them."""
    shares = {
        "among the candidates": [one.candidate_recall for one in evaluations],
        "chosen, where it is one": [one.selector_accuracy for one in evaluations],
    }
    figure, steps = _draw_slots(evaluations, shares)
    return Chart(
        "candidates",
        "Candidates and selector",
        "How often the answer's token is among a slot's candidates, and how often the selector "
        f"chooses it then; acceptance is their product. From pale to full: step {steps}.",
        "Lines of candidate recall and of selector accuracy over the slots of a block.",
        figure,
    )


def _draw_slots(
    evaluations: Sequence[Evaluation], shares: Mapping[str, Sequence[Sequence[float | None]]]
) -> tuple[Figure, str]:
    """A panel for each name, with the slots of some evaluations; and the steps of these."""
    last = len(evaluations) - 1
    lines = min(SLOT_LINES, last + 1)
    drawn = [last * line // max(lines - 1, 1) for line in range(lines)]
    figure, axes = new_chart(len(shares))
    for panel, (what, values) in zip(axes, shares.items(), strict=True):
        for age, index in enumerate(drawn, start=1):
            style = {"color": COLOURS[0], "alpha": (2 + 8 * age / lines) / 10}
            draw_shares(panel, {"": values[index]}, **style)
        panel.set_title(what, loc="left", fontsize=9.5, color=INK)
        panel.set_xlabel("slot")
    axes[0].set_ylabel("share, where all slots before were accepted")
    return figure, ", ".join(f"{evaluations[index].step:,}" for index in drawn)


def _loss_chart(evaluations: Sequence[Evaluation]) -> Chart:
    known = [(one.step, one.loss) for one in evaluations if one.loss is not None]
    figure, (axes,) = new_chart(height=3.2)
    axes.plot(*zip(*known, strict=True), "o-", color=FAINT)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, the mean since the point before")
    return Chart(
        "loss",
        "Loss",
        "The training loss. It may go on falling when acceptance on held-out prompts does not: "
        "then the draft learns its rows by heart.",
        "A line of the loss over steps.",
        figure,
    )


def _table(evaluations: Sequence[Evaluation], best: Evaluation) -> Table:
    names = list(evaluations[-1].sets) if len(evaluations[-1].sets) > 1 else []
    selects = bool(evaluations[-1].candidate_recall)
    rows = [
        {
            "step": f"{one.step:,}" + (" (kept)" if one is best else ""),
            "epoch": f"{one.epoch:.1f}",
            "loss": DASH if one.loss is None else f"{one.loss:.3f}",
            "τ": f"{one.acceptance_length:.2f}",
            "slot 1": format_ratio(one.conditional_acceptance[0]),
            "recall@16, slot 1": format_ratio(one.recall_at_16[0]),
            **({"chosen, slot 1": format_ratio(one.selector_accuracy[0])} if selects else {}),
            **{f"τ, {name}": format_ratio(one.sets.get(name)) for name in names},
        }
        for one in evaluations
    ]
    return Table.of(rows)
