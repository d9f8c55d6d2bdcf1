"""What changes a row of logits before a token is chosen from it, as OpenAI's API and, of the
repetition penalty, Hugging Face define it (arXiv 1909.05858); in vLLM's order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from dflash_trt.core.arrays import FloatArray, Int64Array
from dflash_trt.errors import DflashError, one_line

TokenName = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
"""A token id as the key of a JSON object."""
MOST_PENALTY, MOST_BIAS, MOST_BIASED = 2.0, 100.0, 1024
LEAST_REPETITION, MOST_REPETITION = 1e-4, 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """By how much tokens are made less likely, or likelier; 0 and nothing by default.

    The bias comes first, then repetition, frequency and presence.

    Args:
        frequency: taken off a token's logit for every time that the output has it already,
            -2 … 2.
        presence: taken off once if the output has it at all, -2 … 2.
        repetition: divides a logit above 0, and multiplies one below, of every token that prompt or
            output have, 0.0001 … 10,000.
        bias: (token id, what is added to its logit, -100 … 100), at most 1,024, each token once.
        counts_prompt: frequency and presence count the prompt's tokens too.
        scale: what frequency and presence are multiplied by (> 0). With the temperature they are
            those of TensorRT-LLM, which takes them off what the temperature has divided.

    Raises:
        DflashError: a value outside its range (usage).
    """

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    counts_prompt: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("frequency", self.frequency), ("presence", self.presence)):
            if not _is_within(value, MOST_PENALTY):
                what = f"{value!r} is not a number from -{MOST_PENALTY:g} to {MOST_PENALTY:g}"
                raise DflashError(what, where=f"{name}_penalty", usage=True)
        is_number = _is_within(self.repetition, MOST_REPETITION)
        if not is_number or self.repetition < LEAST_REPETITION:
            limits = f"from {LEAST_REPETITION:g} to {MOST_REPETITION:g}"
            what = f"{self.repetition!r} is not a number {limits}"
            raise DflashError(what, where="repetition_penalty", usage=True)
        if len(self.bias) > MOST_BIASED:
            what = f"names {len(self.bias):,} tokens, more than {MOST_BIASED:,}"
            raise DflashError(what, where="logit_bias", usage=True)
        for token_id, value in self.bias:
            if not _is_within(value, MOST_BIAS):
                shown = one_line(repr(value), 40)
                what = f"{shown} is not a number from -{MOST_BIAS:g} to {MOST_BIAS:g}"
                raise DflashError(what, where="logit_bias", usage=True)
            if type(token_id) is not int or token_id < 0:
                raise DflashError(f"{token_id!r} is no token id", where="logit_bias", usage=True)
        if len({token_id for token_id, _ in self.bias}) < len(self.bias):
            raise DflashError("names a token twice", where="logit_bias", usage=True)

    @property
    def is_neutral(self) -> bool:
        """Whether nothing changes."""
        return self.repetition == 1 and not (self.frequency or self.presence or self.bias)


class PenaltyState:
    """Penalties over one prompt, and an output that grows by `take`."""

    def __init__(
        self, penalties: Penalties, prompt_ids: Sequence[int], output_ids: Iterable[int] = ()
    ) -> None:
        self._penalties = penalties
        # A prompt can be long, and does not change: looked through once.
        self._prompt, self._prompt_times = np.unique(
            np.array(prompt_ids, np.int64), return_counts=True
        )
        self._in_prompt = frozenset(self._prompt.tolist())
        self._bias_ids = np.array([token_id for token_id, _ in penalties.bias], np.int64)
        self._biases = np.array([value for _, value in penalties.bias], np.float32)
        self._times: dict[int, int] = {}
        self._new: list[int] = []
        for token_id in output_ids:
            self.take(token_id)

    def take(self, token_id: int) -> None:
        """The output goes on with `token_id`."""
        times = self._times.get(token_id, 0)
        self._times[token_id] = times + 1
        if not times and token_id not in self._in_prompt:
            self._new.append(token_id)

    def apply(self, logits: FloatArray) -> FloatArray:
        """A copy of the row [V] that the output's next token is chosen from."""
        penalties, row = self._penalties, logits.copy()
        if self._bias_ids.size:
            row[self._bias_ids] += self._biases
        if penalties.repetition != 1:
            _repeat(row, self._prompt, penalties.repetition)
            _repeat(row, np.array(self._new, np.int64), penalties.repetition)
        if not (penalties.frequency or penalties.presence):
            return row
        frequency = np.float32(penalties.frequency * penalties.scale)
        presence = np.float32(penalties.presence * penalties.scale)
        ids = np.fromiter(self._times, np.int64, len(self._times))
        times = np.fromiter(self._times.values(), np.float32, len(self._times))
        if penalties.counts_prompt:
            row[self._prompt] -= self._prompt_times.astype(np.float32) * frequency + presence
            row[ids] -= times * frequency
            row[np.array(self._new, np.int64)] -= presence
        else:
            row[ids] -= times * frequency + presence
        return row


def _repeat(row: FloatArray, ids: Int64Array, repetition: float) -> None:
    factor, values = np.float32(repetition), row[ids]
    row[ids] = np.where(values > 0, values / factor, values * factor)


def _is_within(value: object, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -most <= value <= most  # NaN is not, and an integer may be too large for math.isfinite
