"""Acceptance: known answers, the verify steps of their replay, and what these say of a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.backends.base import FloatArray, Int64Array
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.core.limits import advise_shorter
from dflash_trt.decoding.request import check_vocabulary
from dflash_trt.decoding.statistics import AcceptanceStatistics, RequestStatistics, total
from dflash_trt.errors import DflashError

RECALL_AT = 16
UNKNOWN = -1
"""A token that is not known, or not drafted, or its rank."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target said to a prompt; `set_name` and `tags` say where figures are counted.

    `token_ids` are the output's, with the token that ended it. One token takes no step, for it
    comes from the prefill.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    set_name: str = ""
    tags: tuple[str, ...] = ()

    @property
    def known_ids(self) -> list[int]:
        """Prompt and output together."""
        return [*self.prompt_ids, *self.token_ids]


def check_ids(ids: Sequence[int], manifest: Manifest, where: str) -> None:
    """Raises DflashError (usage) for ids that are no sequence of the target."""
    max_seq_len = manifest.limits.max_seq_len
    if not len(ids):
        raise DflashError("it holds no token", where=where, usage=True)
    check_vocabulary(ids, manifest.target.vocab_size, where)
    if len(ids) > max_seq_len:
        what = f"{len(ids)} tokens exceed the bundle's max_seq_len of {max_seq_len}"
        fix = f"leave it out, or {advise_shorter(max_seq_len, manifest.longest)}"
        raise DflashError(what, where=where, fix=fix, usage=True)


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """N steps over blocks of S rows.

    Args:
        answer: [N] which of the answers.
        position: [N] of the anchor in prompt and output.
        trials, accepted: [N] drafts reached, and those of them that were accepted.
        emitted: [N] tokens that the step added.
        known: [N] tokens of the answer behind the anchor.
        draft_ids: [N,S-1]; UNKNOWN behind a block that the end of the context cut.
        token_ids: [N,S] the answer's tokens behind the anchor; UNKNOWN behind its end.
        rank: [N,S-1] how many tokens had a higher logit in the draft's slot than the answer's,
            all where that is no choice of the draft's; UNKNOWN where that or the draft is.
        probability: [N,S-1] float32, the draft's own for its token; 0 where there is none.
    """

    answer: Int64Array
    position: Int64Array
    trials: Int64Array
    accepted: Int64Array
    emitted: Int64Array
    known: Int64Array
    draft_ids: Int64Array
    token_ids: Int64Array
    rank: Int64Array
    probability: FloatArray

    @classmethod
    def join(cls, rows: Sequence[Mapping[str, Any]], block_size: int) -> StepTable:
        """A table of steps, of which each gives its columns by name, by answer and position."""
        ordered = sorted(rows, key=lambda row: (row["answer"], row["position"]))
        widths = {"draft_ids": -1, "token_ids": 0, "rank": -1, "probability": -1}
        columns: dict[str, Any] = {}
        for one in fields(cls):
            kind = np.float32 if one.name == "probability" else np.int64
            column = np.array([row[one.name] for row in ordered], kind)
            if one.name in widths:
                column = column.reshape(len(ordered), block_size + widths[one.name])
            columns[one.name] = column
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.answer)

    @property
    def block_size(self) -> int:
        """S."""
        return self.token_ids.shape[1]

    @property
    def reached(self) -> npt.NDArray[np.bool_]:
        """[N,S-1]: whether the draft in each slot was looked at, all before it accepted."""
        reached: npt.NDArray[np.bool_] = np.arange(self.block_size - 1) < self.trials[:, None]
        return reached

    def pick(self, chosen: npt.NDArray[np.bool_]) -> StepTable:
        """The steps that are chosen [N]."""
        return StepTable(**{one.name: getattr(self, one.name)[chosen] for one in fields(self)})


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the speculative loop would have accepted of known answers.

    Args:
        answers: how many.
        statistics: counts as the runtime keeps them.
        recall_at_16: per slot 1 … S-1, how often the answer's token is among the draft's 16
            likeliest where all slots before it were accepted; None where no step came so far.
        confidence: per slot, the mean probability of the draft's token, where it was reached.
        sets, tags: the same for each name, where answers have one.
        table: every step; sums are over these.
        per_answer: the same counts for each answer, in order.
    """

    answers: int
    statistics: AcceptanceStatistics
    recall_at_16: tuple[float | None, ...]
    confidence: tuple[float | None, ...]
    table: StepTable
    per_answer: tuple[RequestStatistics, ...]
    sets: Mapping[str, Acceptance] = field(default_factory=dict)
    tags: Mapping[str, Acceptance] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Verify steps."""
        return self.statistics.steps

    @property
    def tokens(self) -> int:
        """Tokens of the answers, the prefill's first ones among them."""
        return self.statistics.output_tokens

    @property
    def acceptance_length(self) -> float | None:
        """τ: tokens that steps emitted ÷ steps; None where there was no step with drafts."""
        return self.statistics.acceptance_length

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """Per slot 1 … S-1: accepted there, given accepted everywhere before it."""
        return self.statistics.conditional_acceptance

    def among(self, top_k: int) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        """Per slot, of a draft that chooses among `top_k` candidates: how often the answer's token
        is one, and how often it is chosen then; where all slots before it were accepted."""
        table = self.table
        hits = (table.rank < top_k) & (table.rank != UNKNOWN)
        chosen = table.draft_ids == table.token_ids[:, :-1]
        return _means(hits, table), _means(chosen, table, hits)

    def to_json(self) -> dict[str, Any]:
        """Figures without the steps."""
        own: dict[str, Any] = {
            "answers": self.answers,
            "steps": self.steps,
            "tokens": self.tokens,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.statistics.acceptance_rate,
            "acceptance_histogram": list(self.statistics.acceptance_histogram),
            "conditional_acceptance": list(self.conditional_acceptance),
            "recall_at_16": list(self.recall_at_16),
            "confidence": list(self.confidence),
        }
        for name, parts in (("sets", self.sets), ("tags", self.tags)):
            if parts:
                own[name] = {key: part.to_json() for key, part in parts.items()}
        return own


def summarise(
    answers: Sequence[Answer], per_answer: Sequence[RequestStatistics], table: StepTable
) -> Acceptance:
    """The figures of `answers`, whose counts are `per_answer`, in all and by set and tag."""

    def part(chosen: Sequence[int], **parts: Mapping[str, Acceptance]) -> Acceptance:
        counts = tuple(per_answer[index] for index in chosen)
        steps = table.pick(np.isin(table.answer, np.array(chosen, np.int64)))
        hits = (steps.rank < RECALL_AT) & (steps.rank != UNKNOWN)
        return Acceptance(
            answers=len(chosen),
            statistics=total(counts),
            recall_at_16=_means(hits, steps),
            confidence=_means(steps.probability, steps),
            table=steps,
            per_answer=counts,
            **parts,
        )

    names = dict.fromkeys(answer.set_name for answer in answers if answer.set_name)
    tags = dict.fromkeys(tag for answer in answers for tag in answer.tags)
    sets = {
        name: part([i for i, answer in enumerate(answers) if answer.set_name == name])
        for name in names
    }
    tagged = {tag: part([i for i, one in enumerate(answers) if tag in one.tags]) for tag in tags}
    return part(range(len(answers)), sets=sets, tags=tagged)


def _means(
    values: npt.NDArray[Any], table: StepTable, where: npt.NDArray[np.bool_] | None = None
) -> tuple[float | None, ...]:
    """Per slot: the mean of `values` [N,S-1] where the slot was reached, and `where` [N,S-1]."""
    counted = table.reached if where is None else table.reached & where
    return tuple(
        float(values[reached, slot].mean()) if reached.any() else None
        for slot, reached in enumerate(counted.T)
    )
