"""Trials: answers replayed with one thing changed that may have been built wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflash_trt.bundle.bundle import Bundle, load_tokenizer
from dflash_trt.core.progress import Progress
from dflash_trt.decoding.replay import Acceptance, Answer, Edits, Replay
from dflash_trt.decoding.replay.replay_graphs import ContextRows
from dflash_trt.decoding.replay.rewire import rotate_draft, set_windows, tap_layers
from dflash_trt.models.rope import RopeSpec
from dflash_trt.proof.diagnosis.cause import Cause
from dflash_trt.proof.diagnosis.gain import Gain, count, measure_gain
from dflash_trt.proof.twins import check_twins, read_pair

SCREENED = 8
"""Answers on which every change is tried; the promising ones are tried on all."""

PROMISING = 0.01
COMMON_BASES = (1e4, 1e5, 1.5e5, 5e5, 1e6, 1e7)
"""RoPE bases that published models have."""
SMALLEST_WINDOW = 32
MOST_MASKS = 16
UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class Trial:
    """A change, the acceptance length with it, and what it gains on the answers it was tried on."""

    cause: Cause
    change: str
    acceptance_length: float | None
    gain: Gain
    answers: int

    def to_json(self) -> dict[str, Any]:
        return {
            "cause": self.cause.title,
            "change": self.change,
            "acceptance_length": self.acceptance_length,
            "gain": self.gain.to_json(),
            "answers": self.answers,
        }

    def __str__(self) -> str:
        length = "none" if self.acceptance_length is None else f"{self.acceptance_length:.2f}"
        return f"{self.change}: {length} tokens a step, {self.gain}"


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the graphs, or of the mask token, that speaks for a cause if acceptance gains.

    Where the target's graph differs too, contexts are made anew.
    """

    cause: Cause
    text: str
    edits: Edits = Edits()
    mask_token_id: int | None = None


class TrialBench:
    """Answers on a bundle, with their contexts, on which changes are tried.

    Attributes:
        base: the answers as the bundle is.
    """

    def __init__(
        self, bundle: Bundle, answers: Sequence[Answer], *, threads: int, progress: Progress
    ) -> None:
        self._bundle, self._answers, self._threads = bundle, answers, threads
        self._progress = progress
        with Replay(bundle, threads=threads) as replay:
            self.contexts = replay.inject(answers, progress)
            self.base = replay.ask(answers, self.contexts, progress)

    def try_all(self) -> list[Trial]:
        """Every change: on a few answers, and on all if that promises something."""
        longest = max(len(answer.known_ids) for answer in self._answers)
        changes = _list_changes(self._bundle, longest)
        self._progress.stage("changing one thing at a time", len(changes), "steps")
        trials = []
        for change in changes:
            with Replay(self._bundle, threads=self._threads, edits=change.edits) as replay:
                trial = self._try(replay, change, SCREENED)
                if trial.gain.value > PROMISING and len(self._answers) > SCREENED:
                    trial = self._try(replay, change, len(self._answers))
            trials.append(trial)
            self._progress.advance(1)
        return trials

    def try_others_context(self) -> Trial:
        """Each answer with the context of another: a draft that uses features loses by it."""
        contexts = [
            _stretched(self.contexts[index - 1], len(answer.known_ids))
            for index, answer in enumerate(self._answers)
        ]
        with Replay(self._bundle, threads=self._threads) as replay:
            changed = replay.ask(self._answers, contexts)
        return self._compare(Cause.DRAFT_WEIGHTS, "the context of another answer", changed)

    def try_twin(self, twin: Bundle) -> list[Trial]:
        """The target's features, then the draft, of the pair in high precision.

        Raises:
            DflashError: it is no twin.
        """
        check_twins(self._bundle, twin)
        with (
            Replay(twin, threads=self._threads) as other,
            Replay(self._bundle, threads=self._threads) as own,
        ):
            features = own.ask(self._answers, other.inject(self._answers))
            draft = other.ask(self._answers, self.contexts)
        return [
            self._compare(Cause.QUANTISED_TARGET, f"features of {twin.folder}", features),
            self._compare(Cause.QUANTISED_DRAFT, f"draft of {twin.folder}", draft),
        ]

    def _try(self, replay: Replay, change: Change, answers: int) -> Trial:
        some, mask = self._answers[:answers], change.mask_token_id
        if change.edits.target:
            changed = replay.measure(some)
        else:
            changed = replay.ask(some, self.contexts[:answers], mask_token_id=mask)
        return self._compare(change.cause, change.text, changed)

    def _compare(self, cause: Cause, change: str, changed: Acceptance) -> Trial:
        base = count(self.base.per_answer[: changed.answers])
        gain = measure_gain(base, count(changed.per_answer), paired=True)
        return Trial(cause, change, changed.acceptance_length, gain, changed.answers)


def _stretched(context: ContextRows, length: int) -> ContextRows:
    """A context's rows over and over, `length` in all."""
    return {name: np.resize(rows, (length, *rows.shape[1:])) for name, rows in context.items()}


def _list_changes(bundle: Bundle, longest: int) -> list[Change]:
    """Every change that is tried, for sequences of up to `longest` tokens."""
    windows = _windows(bundle, longest)
    return [*_taps(bundle), *_ropes(bundle), *windows, *_masks(bundle)]


def _masks(bundle: Bundle) -> list[Change]:
    """Tokens that blocks may have been filled with in training, the likeliest MOST_MASKS.

    First those that say "mask", then unused ones, then special ones.
    """
    manifest = bundle.manifest
    used, vocab = manifest.draft.mask_token_id, manifest.target.vocab_size
    texts = dict.fromkeys(manifest.target.eos_token_ids, "end of sequence")
    if bundle.tokenizer_folder is not None:
        core = load_tokenizer(bundle).core
        texts |= {index: token.content for index, token in core.get_added_tokens_decoder().items()}
        unused = range(core.get_vocab_size(with_added_tokens=True), vocab)
        texts |= dict.fromkeys((*unused[:4], *unused[-1:]), UNUSED)
    chosen = [index for index in texts if index != used and index < vocab]
    chosen.sort(key=lambda at: ("mask" not in texts[at].lower(), texts[at] != UNUSED, at))
    return [
        Change(Cause.MASK_TOKEN, f"mask token {index} ({texts[index]})", mask_token_id=index)
        for index in chosen[:MOST_MASKS]
    ]


def _taps(bundle: Bundle) -> Iterator[Change]:
    layers, draft = bundle.manifest.target.layers, bundle.manifest.draft
    for shift, change in ((-1, "taps one layer earlier"), (1, "taps one layer later")):
        moved = [min(max(tap + shift, -1), layers - 1) for tap in draft.target_layer_ids]
        edit = tap_layers(moved, layers, norms_last=not draft.anchor_drafts)
        yield Change(Cause.TAPS, change, Edits(target=(edit,)))


def _ropes(bundle: Bundle) -> Iterator[Change]:
    pair, manifest = read_pair(bundle), bundle.manifest
    own, targets = pair.draft.rope, pair.target.rope
    bases = [targets.theta, *COMMON_BASES, own.theta * 10, own.theta / 10]
    tried: dict[RopeSpec, str] = {}
    if targets != own:
        tried[targets] = "the target's rope"
    for base in bases:
        tried.setdefault(replace(own, theta=base), f"rope base {base:g}")
    tried.pop(own, None)
    for rope, change in tried.items():
        edit = rotate_draft(rope, manifest.draft.head_dim, manifest.limits.max_seq_len)
        yield Change(Cause.ROPE, change, Edits(target=(edit,), draft=(edit,)))


def _windows(bundle: Bundle, longest: int) -> Iterator[Change]:
    stated, pool = bundle.manifest.draft.layer_windows, bundle.manifest.page_pool
    page_size = None if pool is None else pool.page_size
    if any(stated):
        edits = Edits(draft=(set_windows([None] * len(stated), page_size),))
        yield Change(Cause.CONTEXT, "sliding layers see everything", edits)
    window = SMALLEST_WINDOW
    while window < longest:
        tight = [min(window, one or window) for one in stated]
        if tight != list(stated):
            edits = Edits(draft=(set_windows(tight, page_size),))
            yield Change(Cause.WINDOW, f"layers see the last {window} positions", edits)
        window *= 2
