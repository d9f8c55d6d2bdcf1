"""Several processes train what one does: a batch's rows are shared, and gradients added up.

Threads stand in for processes here; `accelerate launch` starts real ones in the exhaustive test.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.errors import DflashError
from dflash_trt.training.blocks import draw_batch
from dflash_trt.training.crew import Crew, join_crew
from dflash_trt.training.draft_model import new_draft
from dflash_trt.training.trainer import StepReport, Trainer, TrainerSettings
from tests.training.test_draft_model import SETTINGS, SHAPE, ends, make_store

ROWS = 13
"""Of the store: an epoch's last batch has one row, which is no row for some processes."""


class ThreadCrew(Crew):
    """A process that is a thread; those of one crew share `given` and `barrier`."""

    def __init__(
        self, rank: int, count: int, given: list[list[Tensor]], barrier: threading.Barrier
    ) -> None:
        super().__init__(rank, count)
        object.__setattr__(self, "_shared", (given, barrier))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        given, barrier = self._shared  # type: ignore[attr-defined]
        given[self.rank] = list(tensors)
        barrier.wait(60)
        sums = [sum(parts[1:], parts[0]) for parts in zip(*given, strict=True)]
        barrier.wait(60)
        for one, whole in zip(tensors, sums, strict=True):
            one.copy_(whole)


def crew_of(count: int) -> list[Crew]:
    given: list[list[Tensor]] = [[] for _ in range(count)]
    barrier = threading.Barrier(count)
    return [ThreadCrew(rank, count, given, barrier) for rank in range(count)]


def train(
    settings: TrainerSettings, crew: Crew, *, folder: Path | None = None, until: int = 12
) -> tuple[Trainer, list[StepReport]]:
    """A trainer that went on from `folder`, if there is one, and what it reported."""
    shape = replace(SHAPE, windows=(None,))
    trainer = Trainer(new_draft(shape, 0), ends(), make_store(ROWS), settings, crew)
    if folder is not None:
        trainer.restore(folder)
    reports: list[StepReport] = []
    trainer.train(until, reports.append)
    return trainer, reports


def train_together(
    count: int, settings: TrainerSettings, **how: Any
) -> list[tuple[Trainer, list[StepReport]]]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda crew: train(settings, crew, **how), crew_of(count)))


def test_a_batch_is_dealt_out() -> None:
    store, crew = make_store(), crew_of(2)
    whole = draw_batch(store, [0, 1, 2], 4, SHAPE.block_size, 0, 5)
    parts = [draw_batch(store, [0, 1, 2], 4, SHAPE.block_size, 0, 5, one) for one in crew]
    for name in ("anchors", "anchor_ids", "labels"):
        assert torch.equal(getattr(whole, name)[0::2], getattr(parts[0], name))
        assert torch.equal(getattr(whole, name)[1::2], getattr(parts[1], name))
    length = parts[1].features.shape[1]
    assert torch.equal(whole.features[1::2, :length], parts[1].features)
    assert whole.whole is None and all(torch.equal(whole.labels, one.whole) for one in parts)
    assert len(draw_batch(store, [3], 4, SHAPE.block_size, 0, 5, crew[1]).features) == 0


@pytest.mark.numeric
@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,  # soft labels over all tokens
        replace(SETTINGS, soft=0.0, head_tokens=20),  # a head cut to the labels of all parts
    ],
)
def test_two_learn_what_one_does(settings: TrainerSettings, monkeypatch: Any) -> None:
    monkeypatch.setattr("dflash_trt.training.trainer.DRAWN", 4)
    alone, expected = train(settings, Crew(), until=6)
    together = train_together(2, settings, until=6)
    for trainer, reports in together:
        for one, other in zip(reports, expected, strict=True):
            assert one.loss == pytest.approx(other.loss, abs=1e-5)
            assert (one.labels, one.step, one.rate) == (other.labels, other.step, other.rate)
            assert one.accuracy == pytest.approx(other.accuracy, abs=0.05)
        for name, weight in trainer.model.state_dict().items():
            torch.testing.assert_close(
                weight, alone.model.state_dict()[name], atol=2e-6, rtol=0, msg=name
            )
    for name, weight in together[0][0].model.state_dict().items():  # they stay one draft
        assert torch.equal(weight, together[1][0].model.state_dict()[name])


def test_a_crew_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    whole = train_together(2, SETTINGS)[0][0]
    train_together(2, SETTINGS, until=5)[0][0].save(tmp_path)
    rest, reports = train_together(2, SETTINGS, folder=tmp_path)[1]
    assert [one.step for one in reports] == list(range(6, 13))
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, rest.model.state_dict()[name]), name


def test_a_launcher_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with join_crew("cpu") as crew:
        assert crew.leads and crew.count == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(DflashError, match=r"cannot join the other 1 processes: .*unset WORLD_SIZE"),
        join_crew("cpu"),
    ):
        pass
