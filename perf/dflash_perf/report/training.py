"""The page of a training: acceptance and loss on the way, and what the slots have learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dflash_perf.report.content import Chart
from dflash_perf.report.report_page import render_page
from dflash_perf.report.report_tables import DASH, Table
from dflash_perf.report.style import COLOURS, FAINT, INK, chart_style, label_lines, new_chart
from dflash_trt.training.observer import Evaluation, TrainingCurves, best_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SLOT_LINES = 5
"""Measurements whose slots are drawn: the first, the last, and some between."""


def render_training(name: str, curves: TrainingCurves) -> str:
    """The page of the draft `name`, which loads nothing; there is a measurement."""
    evaluations = curves.evaluations
    best, last = best_of(evaluations), evaluations[-1]
    assert best is not None
    done = f"step {last.step:,} of {curves.steps:,}, epoch {last.epoch:.1f}"
    with chart_style():
        charts = [_length_chart(evaluations, best), _slot_chart(evaluations)]
        charts += [_set_chart(evaluations)] if len(last.sets) > 1 else []
        charts += [_loss_chart(evaluations)] if any(one.loss for one in evaluations) else []
        return render_page(
            "training.html.j2",
            charts,
            name=name,
            state=f"{done}; ended by {curves.ended}",
            headline=f"Acceptance length {best.acceptance_length:.2f} on held-out prompts, "
            f"at step {best.step:,}",
            table=_table(evaluations, best),
        )


def _length_chart(evaluations: Sequence[Evaluation], best: Evaluation) -> Chart:
    """By step and, where known, by training tokens: a logarithm shows what more may bring."""
    counted = [one for one in evaluations if one.tokens]
    figure, axes = new_chart(2 if counted else 1)
    axes[0].set_ylabel("acceptance length τ, tokens a step")
    panels: list[tuple[Axes, Sequence[Evaluation], Callable[[Evaluation], float]]]
    panels = [(axes[0], evaluations, lambda one: one.step)]
    axes[0].set_xlabel("step")
    axes[0].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if counted:
        panels.append((axes[1], counted, lambda one: one.tokens or 0))
        _log_tokens(axes[1])
        axes[1].set_xlabel("training tokens, rows counted as often as used")
    for panel, some, place in panels:
        xs = [place(one) for one in some]
        panel.plot(xs, [one.acceptance_length for one in some], "o-", color=COLOURS[0])
        if best in some:
            at = (place(best), best.acceptance_length)
            (ring,) = panel.plot(*at, "o", color=COLOURS[0], markersize=11)
            ring.set(markerfacecolor="none", markeredgewidth=1.8)
    axes[0].margins(y=0.1)
    return Chart(
        "length",
        "Acceptance length",
        "Tokens a verify step brings on held-out prompts, replayed through the graphs that serve. "
        "The ring is the draft that is kept. Against tokens on a logarithmic axis, a line that "
        "still rises says what twice the training would bring.",
        "Lines of the acceptance length over steps and over training tokens.",
        figure,
    )


def _log_tokens(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: format_count(value))


def format_count(value: float) -> str:
    """A number of tokens, short: 500k, 2M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _slot_chart(evaluations: Sequence[Evaluation]) -> Chart:
    drawn = _spread(evaluations)
    figure, axes = new_chart(2)
    for age, one in enumerate(drawn, start=1):
        strength = (2 + 8 * age / len(drawn)) / 10
        for panel, values in zip(axes, (one.conditional_acceptance, one.recall_at_16), strict=True):
            known = [(slot, value) for slot, value in enumerate(values, 1) if value is not None]
            if known:
                slots, shares = zip(*known, strict=True)
                panel.plot(slots, shares, "o-", color=COLOURS[0], alpha=strength)
    for panel, what in zip(axes, ("accepted", "among the 16 likeliest"), strict=True):
        panel.set_title(what, loc="left", fontsize=9.5, color=INK)
        panel.set_xlabel("slot")
        panel.set_xticks(range(1, len(drawn[-1].recall_at_16) + 1))
    axes[0].set_ylim(0, 1.03)
    axes[0].set_ylabel("share, where all slots before were accepted")
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    steps = ", ".join(f"{one.step:,}" for one in drawn)
    return Chart(
        "slots",
        "By slot",
        "How often a slot's draft is accepted, and how often the answer's token is among its 16 "
        f"likeliest. From pale to full: step {steps}.",
        "Lines of acceptance and of recall over the slots of a block, for some measurements.",
        figure,
    )


def _set_chart(evaluations: Sequence[Evaluation]) -> Chart:
    names = list(evaluations[-1].sets)[: len(COLOURS)]
    figure, (axes,) = new_chart()
    ends: list[tuple[float, float, str, str]] = []
    for name, colour in zip(names, COLOURS, strict=False):
        lengths = [(one.step, one.sets.get(name)) for one in evaluations]
        known = [(step, length) for step, length in lengths if length is not None]
        if known:
            axes.plot(*zip(*known, strict=True), marker="o", color=colour)
            ends.append((*known[-1], name, colour))
    axes.set_xlabel("step")
    axes.set_ylabel("acceptance length τ, tokens a step")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    label_lines(axes, ends)
    left = len(evaluations[-1].sets) - len(names)
    return Chart(
        "sets",
        "By set of prompts",
        "The acceptance length of each set." + (f" {left} more are in the table." if left else ""),
        "Lines of the acceptance length of each set over steps.",
        figure,
    )


def _loss_chart(evaluations: Sequence[Evaluation]) -> Chart:
    known = [(one.step, one.loss) for one in evaluations if one.loss is not None]
    figure, (axes,) = new_chart(height=3.2)
    axes.plot(*zip(*known, strict=True), "o-", color=FAINT)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, the mean since the point before")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
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
    rows = [
        {
            "step": f"{one.step:,}" + (" (kept)" if one is best else ""),
            "epoch": f"{one.epoch:.1f}",
            "tokens": DASH if one.tokens is None else f"{one.tokens:,}",
            "loss": DASH if one.loss is None else f"{one.loss:.3f}",
            "τ": f"{one.acceptance_length:.2f}",
            "slot 1": _share(one.conditional_acceptance[0]),
            "recall@16, slot 1": _share(one.recall_at_16[0]),
            **{f"τ, {name}": _number(one.sets.get(name)) for name in names},
        }
        for one in evaluations
    ]
    return Table.of(rows)


def _spread(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """At most SLOT_LINES of them, evenly, the first and the last among them."""
    last = len(evaluations) - 1
    lines = min(SLOT_LINES, last + 1)
    return [evaluations[last * line // max(lines - 1, 1)] for line in range(lines)]


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"
