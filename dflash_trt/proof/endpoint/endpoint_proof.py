"""Does a server keep its answers, and does another give the same? Its noise is measured first."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError, one_line
from dflash_trt.proof.endpoint.answer_comparison import AnswerComparison, compare_answers
from dflash_trt.proof.endpoint.asked_server import AskedServer, Asking, Prompt, Sets
from dflash_trt.proof.endpoint.told_answer import ToldAnswer
from dflash_trt.serving.client.draft_counts import SETTLE_S, DraftCounts, add_counts, count_between
from dflash_trt.text.task_sets import ALL

ALONE, BATCH = "alone", 8
Drafts = dict[str, DraftCounts | None]
"""What is told by set, of all sets at last; None where nothing is."""


@dataclass(frozen=True, slots=True)
class EndpointSurvey:
    """What one server answers by round: ALONE, the same asked again, and BATCH at a time."""

    server: str
    rounds: Mapping[str, Sequence[ToldAnswer]]
    drafts: Drafts
    is_drawn: bool = False

    @property
    def own(self) -> list[AnswerComparison]:
        """Its later rounds against its first."""
        return self.compare(self)[1:]

    @property
    def noise(self) -> float:
        """The most that its log-probabilities move from run to run and beside others, in nats."""
        return max((one.drift[0] for one in self.own if one.drift), default=0.0)

    def compare(self, other: EndpointSurvey) -> list[AnswerComparison]:
        """Every round of another against the first of this one."""
        each = other.rounds.items()
        return [compare_answers(name, self.rounds[ALONE], got, self.is_drawn) for name, got in each]


@dataclass(frozen=True, slots=True)
class EndpointProof:
    """One server against itself, and another against it where there are two."""

    surveys: Sequence[EndpointSurvey]

    @property
    def between(self) -> list[AnswerComparison]:
        """Every round of the second server against the first's ALONE."""
        first, *others = self.surveys
        return [one for other in others for one in first.compare(other)]

    @property
    def tie_limit(self) -> float:
        """The widest gap of a tie, in nats; drawn answers have none."""
        return 0.0 if self.surveys[0].is_drawn else 2 * self.surveys[0].noise

    @property
    def verdict(self) -> Literal["identical", "ties only", "changed"]:
        """Of all rounds of both servers against the first's ALONE."""
        parts = [*self.surveys[0].own, *self.between]
        if any(one.changed(self.surveys[0].noise) for one in parts):
            return "changed"
        return "ties only" if any(one.partings for one in parts) else "identical"

    def to_json(self) -> dict[str, Any]:
        servers = [
            {
                "server": one.server,
                "noise": one.noise,
                "own": [own.to_json(one.noise) for own in one.own],
                "drafts": drafts_to_json(one.drafts),
            }
            for one in self.surveys
        ]
        return {
            "verdict": self.verdict,
            "tie_limit": self.tie_limit,
            "servers": servers,
            "between": [one.to_json(self.surveys[0].noise) for one in self.between],
        }


def survey(server: AskedServer, sets: Sets, asking: Asking, progress: Progress) -> EndpointSurvey:
    """Asks one server every prompt three times; for errors see `AskedServer.ask_all`."""
    prompts = [prompt for each in sets.values() for prompt in each]
    progress.stage(f"{server.base}, alone", len(prompts), "steps")
    alone, drafts = ask_sets(server, sets, asking, progress)
    rounds = {ALONE: alone}
    for title, beside in (("again", 1), (f"{BATCH} at a time", BATCH)):
        progress.stage(f"{server.base}, {title}", max(len(prompts), beside), "steps")
        rounds[title] = server.ask_all(prompts, asking, progress, beside)
    return EndpointSurvey(server.title, rounds, drafts, asking.temperature > 0)


def ask_sets(
    server: AskedServer, sets: Sets, asking: Asking, progress: Progress
) -> tuple[list[ToldAnswer], Drafts]:
    """The answers of all sets, one at a time, and what the server says of drafts in each."""
    answers: list[ToldAnswer] = []
    drafts: Drafts = {}
    start = before = _settled(server)
    for name, prompts in sets.items():
        given = server.ask_all(prompts, asking, progress, first=len(answers))
        check_tokenizer_fits(server, prompts, given)
        after = _settled(server)
        drafts[name] = sum_drafts(given, before, after)
        answers, before = answers + given, after
    return answers, drafts | {ALL: sum_drafts(answers, start, before)}


def sum_drafts(
    answers: Iterable[ToldAnswer], before: Mapping[str, float], after: Mapping[str, float]
) -> DraftCounts | None:
    """Counts of the answers themselves, else of the server meanwhile, else an estimate."""
    each = [(one, max(one.output_tokens - 1, 0)) for one in answers]
    whole = count_between(before, after, sum(emitted for _, emitted in each))
    told = next((one.drafts.source for one, _ in each if one.drafts is not None), None)
    if told is None:
        return whole or add_counts([one.estimate for one, _ in each if one.estimate is not None])
    # An answer without drafts says nothing of them.
    own = [one.drafts or DraftCounts(source=told, steps=steps, drafted=0) for one, steps in each]
    counted = add_counts(own)
    return None if counted is None else counted.with_positions(whole)


def drafts_to_json(drafts: Drafts) -> dict[str, Any]:
    """The counts by set, with τ."""
    return {
        name: one and {"acceptance_length": one.length, **asdict(one)}
        for name, one in drafts.items()
    }


def check_tokenizer_fits(
    server: AskedServer, prompts: Sequence[Prompt], answers: Sequence[ToldAnswer]
) -> None:
    """Raises DflashError where a server's ids are not those of the tokenizer of the bundle."""
    tokenizer = server.tokenizer
    for prompt, answer in zip(prompts, answers, strict=True) if tokenizer else ():
        assert tokenizer is not None
        what = ""
        ids = [one.token_id for one in answer.tokens if one.token_id is not None]
        is_known = max(ids, default=0) < tokenizer.core.get_vocab_size()
        texts = (tokenizer.core.decode(ids) if is_known else "", answer.text)
        shown, told = (one.strip("\ufffd \n") for one in texts)
        if answer.prompt_tokens not in (None, len(prompt)):
            what = f"counts {answer.prompt_tokens} prompt tokens where {len(prompt)} were sent"
        elif ids and not (is_known and (shown.startswith(told) or told.startswith(shown))):
            what = f"its token ids {ids[:6]} … are not the bundle's: it answers "
            what += one_line(repr(told), 60)
        if what:
            fix = "give the bundle of the served target, or leave BUNDLE out"
            raise DflashError(what, where=server.base, fix=fix)


def _settled(server: AskedServer) -> dict[str, float]:
    """Its counters, once they had the time to be told."""
    time.sleep(SETTLE_S if server.read_metrics() else 0)
    return server.read_metrics()
