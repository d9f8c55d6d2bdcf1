"""How a draft is trained where it is not said: the paper's recipe, scaled to machine and budget."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.core.machine import multiplies_bf16
from dflash_trt.errors import DflashError
from dflash_trt.training.request import RecipeOptions, TrainRequest
from dflash_trt.training.trainer import TrainerSettings

PAPER_ANCHORS, SMALL_ANCHORS = 512, 64
SMALL_HOURS = 4.0
# Slot k's weight is exp(-(k - 1) / gamma): the paper's, by the largest block each is for.
GAMMAS = ((8, 4.0), (10, 5.0))
PAPER_GAMMA = 7.0
DRAFT_TOKENS = 4096
"""Of a vocabulary four times as large or larger, on a CPU: 99.6 % of what SmolLM2 answers to
questions in English are among its own 4,096 commonest tokens there."""
GPU_ROWS, CPU_ROWS = 16, 4


@dataclass(frozen=True, slots=True)
class Scale:
    """How much can be paid for: where training runs and for how long."""

    hours: float
    is_cpu: bool

    @property
    def is_small(self) -> bool:
        """Whether the paper's sizes would be too much."""
        return self.is_cpu and self.hours <= SMALL_HOURS


@dataclass(frozen=True, slots=True)
class ChosenRecipe:
    """Settings but for the number of steps, which is 0; why each is so."""

    settings: TrainerSettings
    reasons: dict[str, str]


def choose_recipe(
    request: TrainRequest, block_size: int, vocab_size: int, scale: Scale, *, is_markov: bool
) -> ChosenRecipe:
    """The recipe for a draft with blocks of `block_size` over a vocabulary of `vocab_size`.

    `is_markov`: it has DSpark's head.

    Raises:
        DflashError: tokens to choose among for DSpark's head, which has all (usage).
    """
    given: RecipeOptions = request.recipe
    default = TrainerSettings(steps=0)
    reasons: dict[str, str] = {}

    def choose(name: str, value: float | None, otherwise: float, why: str) -> float:
        reasons[name] = "given" if value is not None else why
        return otherwise if value is None else value

    is_bf16 = not scale.is_cpu or multiplies_bf16()
    gamma = next((value for most, value in GAMMAS if block_size <= most), PAPER_GAMMA)
    settings = TrainerSettings(
        steps=0,
        rows=int(
            choose(
                "batch_rows",
                given.batch_rows,
                CPU_ROWS if scale.is_cpu else GPU_ROWS,
                "many small steps learn more in the time" if scale.is_cpu else "fills a GPU",
            )
        ),
        anchors=int(
            choose(
                "anchors",
                given.anchors,
                SMALL_ANCHORS if scale.is_cpu else PAPER_ANCHORS,
                "blocks cost time, and are drawn anew in each epoch"
                if scale.is_cpu
                else "the paper's",
            )
        ),
        gamma=choose("gamma", given.gamma, gamma, f"the paper's for blocks of {block_size}"),
        learning_rate=choose(
            "learning_rate",
            given.learning_rate,
            default.learning_rate * (0.5 if request.start is not None else 1),
            "half of a fresh draft's" if request.start is not None else "Muon's, as measured",
        ),
        head_tokens=default.head_tokens if scale.is_cpu else None,
        draft_tokens=_draft_tokens(given.draft_tokens, vocab_size, scale, is_markov=is_markov),
        seed=request.seed,
        is_bf16=is_bf16,
    )
    is_cut = settings.draft_tokens is not None
    reasons["draft_tokens"] = (
        "given"
        if given.draft_tokens is not None
        else "the head of all tokens costs a CPU more than the draft"
        if is_cut
        else "all"
    )
    reasons["precision"] = (
        "bfloat16 products" if is_bf16 else "float32: this CPU has no bfloat16 products"
    )
    reasons["soft labels"] = (
        f"{100 * settings.soft:.0f} % of each label are the target's own probabilities: they tell "
        "more of it than the token that came of them"
    )
    reasons["head_tokens"] = (
        "the full head of a large vocabulary costs more than the draft; replay uses all of it"
        if scale.is_cpu
        else "all"
    )
    return ChosenRecipe(settings, reasons)


def _draft_tokens(
    given: int | None, vocab_size: int, scale: Scale, *, is_markov: bool
) -> int | None:
    """How many tokens the draft chooses among; None for all."""
    if is_markov:
        if given:
            what = "is for DFlash drafts: a Markov head has all tokens"
            raise DflashError(what, where="--draft-tokens", fix="leave it out", usage=True)
        return None
    if given is None:
        given = DRAFT_TOKENS if scale.is_cpu and vocab_size >= 4 * DRAFT_TOKENS else 0
    return given if 0 < given < vocab_size else None
