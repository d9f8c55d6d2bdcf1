"""The page of a training, as a browser reads it."""

from __future__ import annotations

import re

from dflash_perf.report.training import render_training

from dflash_trt.training.observer import Evaluation, TrainingCurves
from tests.perf.page import Page


def measured(step: int, *sets: str, tokens: int | None = None) -> Evaluation:
    return Evaluation(
        step=step,
        epoch=step / 100,
        loss=4 - step / 200 if step else None,
        acceptance_length=1.5 + step / 200 if step < 300 else 2.5,
        conditional_acceptance=(0.5, 0.25, None),
        recall_at_16=(0.9, 0.8, None),
        sets=dict.fromkeys(sets, 1.5 + step / 200),
        categories={},
        tokens=tokens,
    )


def test_a_training() -> None:
    steps = range(0, 400, 100)
    evaluations = [measured(step, "gsm8k", "<b>", tokens=step * 999) for step in steps]
    text = render_training("my <draft>", TrainingCurves(evaluations, 500, "the hours"))
    page = Page(text)
    assert not page.open and not re.findall(r"https?:|//[a-z]|@import|<script|<link", text)
    assert list(page.figures) == ["length", "slots", "loss"]
    assert all(shapes > 10 for shapes in page.figures.values())
    assert len(set(page.ids)) == len(page.ids) and all(page.labels)
    for shown in ("my <draft>", "epoch 3.0; ended by the hours", "2.50 on held-out prompts"):
        assert shown in page.text
    assert "at step 200" in page.text and "200 (kept)" in page.text  # the best, not the last
    assert "τ, <b>" in page.text and "199,800" in page.text
    assert "From pale to full: step 0, 100, 200, 300." in page.text


def test_the_first_measurement_of_an_older_record() -> None:
    curves = TrainingCurves([measured(0, "all")], 500, "the hours were over at step 0 of 500")
    text = render_training("draft", curves)
    assert list(Page(text).figures) == ["length", "slots"]
    assert "ended by the hours were over" in text
