"""The probe: how fast this machine answers, captures, trains and replays, on the first prompts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.replay import Answer, Replay
from dflash_trt.training.capture import Features, TokenRow, capture
from dflash_trt.training.draft_shape import DraftDesign
from dflash_trt.training.feature_store import open_store
from dflash_trt.training.plan import Rates
from dflash_trt.training.target_source import TrainingTarget
from dflash_trt.training.trainer import TrainerSettings
from dflash_trt.training.trainer_setup import make_trainer

_WARM_STEPS, _TIMED_STEPS = 1, 3
_CAPTURED_TOKENS, _REPLAYED_ANSWERS = 4096, 4

OpenFeatures = Callable[[], AbstractContextManager[Features]]
"""Opens what computes the features of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSetup:
    """What is probed: the trainer's settings have no steps yet."""

    target: TrainingTarget
    shape: DraftDesign
    settings: TrainerSettings
    device: str
    threads: int


def probe(
    setup: ProbeSetup,
    rows: Sequence[TokenRow],
    replay: Replay,
    open_features: OpenFeatures,
    *,
    answer_tokens_s: float,
    build_s: float,
    folder: Path,
) -> Rates:
    """Rates over `rows`, answered prompts; what it writes below `folder` is removed again."""
    width = setup.shape.feature_width
    some, tokens = [], 0
    for row in rows:
        some.append(row)
        tokens += len(row.token_ids)
        if tokens >= _CAPTURED_TOKENS and len(some) >= setup.settings.rows:
            break
    with tempfile.TemporaryDirectory(prefix="probe-", dir=folder) as name:
        with open_features() as compute:
            compute(some[0].token_ids)  # what a first call takes, it takes once
            started = time.perf_counter()
            capture(some, width, compute, Path(name))
            captured = tokens / _since(started)
        step_s = _time_steps(setup, Path(name))
    answers = [Answer(row.prompt_ids, row.answer_ids) for row in some[:_REPLAYED_ANSWERS]]
    started = time.perf_counter()
    replay.measure(answers)
    replayed = sum(len(one.token_ids) for one in answers) / _since(started)
    count = len(rows)
    return Rates(
        answer_tokens_s=answer_tokens_s,
        capture_tokens_s=captured,
        step_s=step_s,
        replay_tokens_s=replayed,
        build_s=build_s,
        prompt_tokens=sum(len(row.prompt_ids) for row in rows) / count,
        answer_tokens=sum(len(row.answer_ids) for row in rows) / count,
    )


def _time_steps(setup: ProbeSetup, folder: Path) -> float:
    settings = replace(setup.settings, steps=_WARM_STEPS + _TIMED_STEPS)
    trainer = make_trainer(
        setup.target.spec, setup.shape, None, open_store(folder), settings, setup.device,
        setup.threads,
    )  # fmt: skip
    trainer.train(_WARM_STEPS, lambda report: None)
    started = time.perf_counter()
    trainer.train(settings.steps, lambda report: None)
    return _since(started) / _TIMED_STEPS


def _since(started: float) -> float:
    return max(time.perf_counter() - started, 1e-9)
