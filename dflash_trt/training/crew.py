"""The processes that train one draft together, as `accelerate launch` or `torchrun` starts them.

Each takes its share of a batch's rows, and gradients are added up: a step is that of one process,
up to rounding. The first one leads: it alone renders, answers, captures, measures and writes, and
tells the others what to do (`orders.py`).

Not PyTorch's DistributedDataParallel: that averages the processes' means, but a part with few
labels must count less than one with many, and the head looks at the labels of all parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from dflash_trt.errors import DflashError, one_line

_PATIENCE = timedelta(days=30)
"""The others wait while the first one answers or measures; a process that dies is noticed."""


@dataclass(frozen=True, slots=True)
class Crew:
    """One of `count` processes, number `rank`, `beside` of them on this machine.

    As it stands here, it is the only one.
    """

    rank: int = 0
    count: int = 1
    beside: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Makes each tensor the sum of all processes'."""

    def order(self, what: Any) -> None:
        """Tells the others what to do next; the first process calls it."""

    def take(self) -> Any:
        """Waits for the next order; the others call it."""
        raise AssertionError("there is nobody to give orders")


ALONE = Crew()


class ProcessCrew(Crew):
    """Several processes, joined by `torch.distributed`."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([one.reshape(-1) for one in tensors])
        with _one_line():
            distributed.all_reduce(flat)
        parts = torch.split(flat, [one.numel() for one in tensors])
        for one, part in zip(tensors, parts, strict=True):
            one.copy_(part.view_as(one))

    def order(self, what: Any) -> None:
        with _one_line():
            distributed.broadcast_object_list([what], src=0, device=torch.device("cpu"))

    def take(self) -> Any:
        told: list[Any] = [None]
        with _one_line():
            distributed.broadcast_object_list(told, src=0, device=torch.device("cpu"))
        return told[0]


@contextmanager
def join_crew(device: str | None) -> Iterator[Crew]:
    """The processes that a launcher has started, by its variables; else this one alone.

    At the end the first one tells the others that all is done, unless it was interrupted: they
    notice that it has gone. `device` is what was asked to train.

    Raises:
        DflashError: the others cannot be reached, or there are fewer GPUs than processes.
    """
    count = _variable("WORLD_SIZE", 1)
    if count < 2:
        yield ALONE
        return
    on_gpus = torch.cuda.is_available() and device != "cpu"
    if on_gpus:
        local = _variable("LOCAL_RANK", 0)
        if local >= torch.cuda.device_count():
            what = f"process {local + 1} of this machine has no GPU: it has "
            raise DflashError(f"{what}{torch.cuda.device_count()}", fix="start fewer processes")
        torch.cuda.set_device(local)
    try:
        # Orders and objects go by gloo also where gradients go by NCCL.
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        distributed.init_process_group(backend, timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise DflashError(
            f"cannot join the other {count - 1} processes: {one_line(error)}",
            fix="start them with `accelerate launch` or `torchrun`, or unset WORLD_SIZE",
        ) from error
    crew = ProcessCrew(distributed.get_rank(), count, _variable("LOCAL_WORLD_SIZE", 1))
    try:
        try:
            yield crew
        except DflashError:
            if crew.leads:
                crew.order(None)
            raise
        if crew.leads:
            crew.order(None)
    finally:
        distributed.destroy_process_group()


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        what = f"another process of this training has gone: {one_line(error)}"
        raise DflashError(what, fix="give the command again: it goes on") from error
