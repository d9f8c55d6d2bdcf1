"""How a draft is trained where it is not said: the paper's recipe, scaled to machine and budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from dflash_trt.core.machine import multiplies_bf16
from dflash_trt.errors import DflashError
from dflash_trt.training.trainer import TrainerSettings
from dflash_trt.training.training_request import TrainRequest

PAPER_ANCHORS, SMALL_ANCHORS = 512, 64
SMALL_HOURS = 4.0
# Slot k's weight is exp(-(k - 1) / gamma): the paper's, by the largest block each is for.
GAMMAS = ((8, 4.0), (10, 5.0))
PAPER_GAMMA = 7.0
DRAFT_TOKENS = 4096
"""Of a vocabulary four times as large or larger, on a CPU: 99.6 % of what SmolLM2 answers to
questions in English are among its own 4,096 commonest tokens there."""
GPU_ROWS, CPU_ROWS = 16, 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much can be paid for: where training runs and for how long."""

    hours: float
    is_cpu: bool

    @property
    def is_small(self) -> bool:
        """Whether the paper's sizes would be too much."""
        return self.is_cpu and self.hours <= SMALL_HOURS


class Reasons(dict[str, str]):
    """Why each value was chosen, by name."""

    def choose(self, name: str, given: T | None, default: T, why: str) -> T:
        """`given`, or else `default`."""
        self[name] = why if given is None else "given"
        return default if given is None else given


@dataclass(frozen=True, slots=True)
class ChosenRecipe:
    """Settings but for the number of steps, which is 0; why each is so."""

    settings: TrainerSettings
    reasons: Reasons


def choose_recipe(
    request: TrainRequest, block_size: int, vocab_size: int, scale: Scale, *, is_markov: bool
) -> ChosenRecipe:
    """The recipe for a draft with blocks of `block_size` over a vocabulary of `vocab_size`.

    `is_markov`: it has DSpark's head.

    Raises:
        DflashError: tokens to choose among for DSpark's head, which has all (usage).
    """
    given, is_cpu, default = request.recipe, scale.is_cpu, TrainerSettings(steps=0)
    reasons = Reasons()
    rows, rows_why, anchors, anchors_why = GPU_ROWS, "fills a GPU", PAPER_ANCHORS, "the paper's"
    tokens, tokens_why = 0, "all"
    if is_cpu:
        rows, rows_why = CPU_ROWS, "many small steps learn more in the time"
        anchors, anchors_why = SMALL_ANCHORS, "blocks cost time, and are drawn anew in each epoch"
        if vocab_size >= 4 * DRAFT_TOKENS and not is_markov:
            tokens, tokens_why = DRAFT_TOKENS, "all tokens' head costs a CPU more than the draft"
    if is_markov and given.draft_tokens:
        what = "is for DFlash drafts: a Markov head has all tokens"
        raise DflashError(what, where="--set draft-tokens", fix="leave it out", usage=True)
    tokens = reasons.choose("draft_tokens", given.draft_tokens, tokens, tokens_why)
    gamma = next((value for most, value in GAMMAS if block_size <= most), PAPER_GAMMA)
    rate, rate_why = default.learning_rate, "Muon's, as measured"
    if request.start is not None:
        rate, rate_why = rate / 2, "half of a fresh draft's"
    is_bf16 = not is_cpu or multiplies_bf16()
    settings = TrainerSettings(
        steps=0,
        rows=reasons.choose("batch_rows", given.batch_rows, rows, rows_why),
        anchors=reasons.choose("anchors", given.anchors, anchors, anchors_why),
        gamma=reasons.choose("gamma", given.gamma, gamma, f"for blocks of {block_size}: the paper"),
        learning_rate=reasons.choose("learning_rate", given.learning_rate, rate, rate_why),
        head_tokens=default.head_tokens if is_cpu else None,
        draft_tokens=tokens if 0 < tokens < vocab_size else None,
        seed=request.seed,
        is_bf16=is_bf16,
    )
    reasons["precision"] = (
        "bfloat16 products" if is_bf16 else "float32: this CPU has no bfloat16 products"
    )
    reasons["soft labels"] = (
        f"{100 * settings.soft:.0f} % of each label are the target's own probabilities: they tell "
        "more of it than the token that came of them"
    )
    reasons["head_tokens"] = "the commonest, others by chance: a CPU's time" if is_cpu else "all"
    return ChosenRecipe(settings, reasons)
