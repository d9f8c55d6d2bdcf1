"""What all processes of a training but the first do: they repeat what it does to its trainer."""

from __future__ import annotations

from contextlib import suppress

from dflash_trt.errors import DflashError
from dflash_trt.training.crew import Crew
from dflash_trt.training.feature_store import open_store
from dflash_trt.training.orders import Make, Restore, Train
from dflash_trt.training.preparation import Preparation, prepare
from dflash_trt.training.request import TrainRequest
from dflash_trt.training.trainer import Trainer
from dflash_trt.training.trainer_setup import make_trainer


def follow(request: TrainRequest, crew: Crew) -> None:
    """Follows the orders of the first process, until it has done.

    Raises:
        DflashError: the first process has gone, or cannot be followed.
    """
    preparation: Preparation | None = None
    trainer: Trainer | None = None
    while (order := crew.take()) is not None:
        # Only now: what is wrong with the request the first process has said for all.
        preparation = preparation or prepare(request, crew)
        match order:
            case Make():
                trainer = make_trainer(
                    preparation.target.spec,
                    preparation.chosen.shape,
                    order.start,
                    open_store(order.store),
                    order.settings,
                    preparation.device,
                    request.threads,
                    crew,
                )
            case Restore():
                assert trainer is not None
                trainer.restore(order.folder)
            case Train():
                assert trainer is not None
                with suppress(DflashError):  # of the loss, which is everybody's: the first decides
                    trainer.train(order.until, lambda report: None)
