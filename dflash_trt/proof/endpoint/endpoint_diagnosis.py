"""What moves the acceptance of a server: one thing is asked otherwise at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dflash_trt.core.progress import Progress
from dflash_trt.deploy.planning.known_pairs import find_pair, pair_names
from dflash_trt.errors import DflashError, one_line
from dflash_trt.models.build_config import load_config
from dflash_trt.proof.diagnosis.gain import Counts, Gain, measure_gain
from dflash_trt.proof.endpoint.asked_server import AskedServer, Asking, Sets
from dflash_trt.proof.endpoint.endpoint_proof import Drafts, ask_sets, drafts_to_json
from dflash_trt.proof.endpoint.told_answer import ToldAnswer
from dflash_trt.serving.client.draft_counts import DraftCounts
from dflash_trt.text.task_sets import ALL

AS_SERVED = "as served"
UNTOLD = "its stream shows no steps: compare τ"
_NO_DRAFTS = 1.05
_ADVICE = {
    "without chat template": "the draft knows texts better than chats; train it on answers to the "
    "served template, or serve the template that it was trained with",
    "thinking on": "the draft was trained on answers that think; serve with enable_thinking true, "
    "or train it on answers that do not",
    "thinking off": "the draft was trained on answers that do not think; serve with "
    "enable_thinking false, or train it on answers that do",
    "temperature 0": "what is drawn at random is hard to foresee; serve at a lower temperature",
    "cut short": "acceptance falls as answers go on; see whether the draft has a window, and "
    "train it on longer answers",
}


@dataclass(frozen=True, slots=True)
class EndpointDiagnosis:
    """τ of a server as served, and of trials and groups of answers, with what each gains.

    `gains` compare groups with the other answers; a text is why a trial says nothing. `published`
    has τ by workload of the pair `pair` whose target is called like the served model. Gains that
    are `is_estimated` come from chunks, as no answer tells of its drafts.
    """

    server: str
    drafts: Drafts
    gains: dict[str, Gain | str]
    pair: str | None
    published: dict[str, float]
    is_estimated: bool = False

    @property
    def advice(self) -> str:
        """The sentence that says what to change."""
        base = self.drafts[AS_SERVED]
        if base is None or base.length is None:
            return "nothing is told of drafts, and answers come whole: turn the metrics on"
        if base.length < _NO_DRAFTS:
            return (
                "hardly a draft is accepted, or none is made: see that speculation is on, and run "
                "`dflash-trt diagnose BUNDLE` on the same two checkpoints"
            )
        if UNTOLD in self.gains.values():
            return "no gain can be told from chance, as streams show no steps: compare τ by hand"
        known = {name: gain for name, gain in self.gains.items() if isinstance(gain, Gain)}
        for name, gain in sorted(known.items(), key=lambda pair: -pair[1].value):
            if gain.is_gain and name in _ADVICE:
                return f"{name} {gain}: {_ADVICE[name]}"
        for name, gain in sorted(known.items(), key=lambda pair: pair[1].value):
            if gain.is_loss and name not in _ADVICE and not name.startswith("temperature"):
                return f"{name} {gain} against the others: train the draft on such answers"
        if base.length < min(self.published.values(), default=0.0):
            return (
                f"below all that is published of {self.pair}, and nothing that a client asks "
                "moves it: run `dflash-trt diagnose BUNDLE` on the same two checkpoints"
            )
        return "nothing that a client asks moves it"

    def to_json(self) -> dict[str, Any]:
        gains = {
            name: gain if isinstance(gain, str) else gain.to_json()
            for name, gain in self.gains.items()
        }
        told = {"drafts": drafts_to_json(self.drafts), "gains": gains, "advice": self.advice}
        return {**asdict(self), **told}


def diagnose_endpoint(
    server: AskedServer, sets: Sets, asking: Asking, progress: Progress
) -> EndpointDiagnosis:
    """Asks all prompts as they would be served, then with one thing changed at a time.

    Raises:
        DflashError: the server fails where nothing is changed; see `AskedServer.ask_all`.
    """
    greedy = asking.temperature == 0
    trials = {
        "without chat template": replace(asking, raw=True),
        "thinking on": replace(asking, thinking=True),
        "thinking off": replace(asking, thinking=False),
        f"temperature {int(greedy)}": replace(asking, temperature=float(greedy)),
        "cut short": replace(asking, max_tokens=max(asking.max_tokens // 4, 2)),
    }
    prompts = [prompt for each in sets.values() for prompt in each]
    if not isinstance(prompts[0], str):  # a chat template is not the server's then
        trials = {name: one for name, one in trials.items() if not (one.raw or one.thinking)}
        trials.pop("thinking off")
    progress.stage(AS_SERVED, len(prompts), "steps")
    answers, found = ask_sets(server, sets, asking, progress)
    drafts: Drafts = {AS_SERVED: found.pop(ALL)}
    gains: dict[str, Gain | str] = {}
    base = count_answers(answers)
    names = np.array([name for name, each in sets.items() for _ in each])
    lengths = np.array([one.prompt_tokens or 0 for one in answers])
    groups = {name: names == name for name in found if len(found) > 1}
    for name, inside in {**groups, "longer prompts": lengths > np.median(lengths)}.items():
        part = base[:, inside]
        emitted, steps = part.sum(axis=1)
        told = DraftCounts(source="", steps=float(steps), accepted=float(emitted - steps))
        drafts[name] = found.get(name, told)
        gains[name] = _compare(base[:, ~inside], part, paired=False)
    for name, changed in trials.items():
        progress.stage(name, len(prompts), "steps")
        drafts[name] = None
        try:
            given, told_sets = ask_sets(server, sets, changed, progress)
        except DflashError as error:
            gains[name] = one_line(error.what, 120)
            continue
        drafts[name] = told_sets[ALL]
        gain = _compare(base, count_answers(given), paired=True)
        is_same = [one.text for one in given] == [one.text for one in answers]
        is_known = isinstance(gain, Gain) and not gain.value
        gains[name] = "the same answers" if is_same and is_known else gain
    is_estimated = bool(base.any()) and all(one.drafts is None for one in answers)
    published = find_published(server.model)
    return EndpointDiagnosis(server.title, drafts, gains, *published, is_estimated)


def _compare(before: Counts, after: Counts, paired: bool) -> Gain | str:
    """What is gained; UNTOLD where a side has answers without steps."""
    is_told = all(one.any() or not one.size for one in (before, after))
    return measure_gain(before, after, paired=paired) if is_told else UNTOLD


def count_answers(answers: Iterable[ToldAnswer]) -> Counts:
    """Tokens that steps emitted, and steps, of each answer: [2,n]; from chunks where it must be."""
    each = [one.drafts or one.estimate or DraftCounts(source="") for one in answers]
    return np.array([(one.accepted + one.steps, one.steps) for one in each], np.float64).T


def find_published(model: str) -> tuple[str | None, dict[str, float]]:
    """The public pair whose target a server's model is called like, and its τ by workload."""
    for name in pair_names():
        checkpoint = load_config(name)[0].target.checkpoint
        if checkpoint.rpartition("/")[2].casefold() == model.rpartition("/")[2].casefold():
            pair = find_pair(name)
            return name, dict(pair.own_taus(pair.published[0])) if pair.published else {}
    return None, {}
