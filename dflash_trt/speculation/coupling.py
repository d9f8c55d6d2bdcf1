"""`coupling.json`: how sharply each draft of a block follows its logits where it shares the noise.

`dflash-trt couple` writes it, `build --coupling` takes it. docs/tuning.md shows the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dflash_trt.checkpoints.draft_kinds import DraftTraits
from dflash_trt.core.limits import MAX_BLOCK, Count
from dflash_trt.core.validation import StrictRecord, read_record
from dflash_trt.errors import DflashError
from dflash_trt.sampling.coupling import LIKELIEST

SCHEMA_VERSION: Literal[1] = 1

Sharpness = Annotated[float, Field(ge=0.01, le=LIKELIEST, allow_inf_nan=False)]
"""Of one draft; LIKELIEST and the noise decides nothing."""
Tau = Annotated[float, Field(ge=1, le=MAX_BLOCK)]


class CouplingGain(StrictRecord):
    """Tokens of a step at one temperature, on answers that nothing was fitted to: of the likeliest
    tokens, and of coupled drafts."""

    temperature: Annotated[float, Field(gt=0, le=100)]
    answers: Count
    tau_likeliest: Tau
    tau_coupled: Tau

    @property
    def gain(self) -> float:
        """What coupling adds, as a share of tau."""
        return self.tau_coupled / self.tau_likeliest - 1


class Coupling(StrictRecord):
    """The sharpness of the first, second … draft of a block, and what it brought by replay."""

    schema_version: Literal[1] = SCHEMA_VERSION
    pair: str
    sharpness: Annotated[list[Sharpness], Field(min_length=1, max_length=MAX_BLOCK - 1)]
    measured: list[CouplingGain] = Field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Coupling:
        """The coupling in the file `path`.

        Raises:
            DflashError: unreadable, another schema version, or fields that do not fit.
        """
        fix = "run `dflash-trt couple` again"
        return read_record(path, cls, SCHEMA_VERSION, fix, usage=True)


def check_couples(traits: DraftTraits, where: Path) -> None:
    """Raises DflashError (usage) where a draft's slots go on from each other's choices."""
    if not traits.couples:
        what = f"is {traits.title}, whose drafts go on from each other: they share no noise yet"
        raise DflashError(what, where=where, fix="take a DFlash draft", usage=True)


def name_sharpness(sharpness: Sequence[float]) -> str:
    """Of each draft; – where it is the likeliest token."""
    return ", ".join("–" if one == LIKELIEST else f"{one:g}" for one in sharpness)


def encode_coupling(coupling: Coupling) -> bytes:
    """The content of a coupling's file."""
    return (coupling.model_dump_json(indent=1) + "\n").encode()
