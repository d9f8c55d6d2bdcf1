"""Would a Markov head on the frozen draft lengthen what is accepted? By replay.

Known answers are replayed at every position, and of each slot the likeliest tokens stay, with their
logits. A head as DSpark's (arXiv 2607.05147) adds W2[token] · W1[token before] to them. It is
trained by cross-entropy on every second answer, of which a tenth says when to stop; the loop is
walked over the others, then the other way round. The token before is the answer's own: where a
slot counts, all before it were right. `recall` is how often the answer is among those kept, where
all slots before were right without a head: more than that no head can bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click
import numpy as np
import numpy.typing as npt

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import open_dflash
from dflash_perf.bench.task_acceptance import KeptAnswers, answer_tasks
from dflash_trt.backends.base import FloatArray, Int64Array
from dflash_trt.errors import DflashError
from dflash_trt.replay.anchors import every_anchor, mean_tau, walk_loop
from dflash_trt.replay.edits import Edits
from dflash_trt.replay.graphs import ReplayGraphs
from dflash_trt.runtime.loops import is_looping
from dflash_trt.text.task_sets import name_sources, read_task_sets
from dflash_trt.training.extras import training_module

KEPT = 16
LOST, ENDED = -1, -2
MOST_EPOCHS, PATIENCE = 30, 3
SAMPLES = 1024
RATE = 0.01


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one answer of N anchors and S-1 slots.

    `before` [N,S-1] tokens; `ids`, `logits` [N,S-1,KEPT], the likeliest first; `wanted` [N,S-1]
    the place of the answer's token among `ids`, LOST where it is not, ENDED behind the answer.
    """

    before: Int64Array
    ids: Int64Array
    logits: FloatArray
    wanted: Int64Array


def replay(graphs: ReplayGraphs, prompt: Sequence[int], answer: Sequence[int], block: int) -> Seen:
    """What the draft says at every anchor of one answer."""
    shape = (len(answer) - 1, block - 1)
    seen = Seen(
        np.zeros(shape, np.int64),
        np.zeros((*shape, KEPT), np.int64),
        np.zeros((*shape, KEPT), np.float32),
        np.full(shape, ENDED, np.int64),
    )
    for index, (_, logits, wanted) in enumerate(every_anchor(graphs, prompt, answer, block)):
        best = np.argpartition(-logits, KEPT, axis=1)[:, :KEPT]
        order = np.argsort(-np.take_along_axis(logits, best, 1), axis=1, kind="stable")
        seen.ids[index] = np.take_along_axis(best, order, 1)
        seen.logits[index] = np.take_along_axis(logits, seen.ids[index], 1)
        slots = len(wanted)
        seen.before[index, :slots] = answer[index : index + slots]
        matches = seen.ids[index, :slots] == wanted[:, None]
        seen.wanted[index, :slots] = np.where(matches.any(axis=1), matches.argmax(axis=1), LOST)
    return seen


class FittedHead:
    """W1, W2 [V,rank], trained on `answers`.

    Args:
        rank: of the head.
    """

    def __init__(self, answers: Sequence[Seen], vocab: int, rank: int) -> None:
        self._torch = training_module("torch")
        self._torch.manual_seed(0)
        first = 0.1 * self._torch.randn(vocab, rank)
        self._first, self._second = (
            one.requires_grad_() for one in (first, self._torch.zeros(vocab, rank))
        )
        self._train(answers[::10], [one for i, one in enumerate(answers) if i % 10])

    def right(self, seen: Seen) -> npt.NDArray[np.bool_]:
        """Whether each slot [N,S-1] drafts the answer's token."""
        with self._torch.no_grad():
            scores = self._score(seen.before.ravel(), *_samples(seen)).numpy()
        chosen: Int64Array = scores.argmax(axis=1).reshape(seen.wanted.shape)
        right: npt.NDArray[np.bool_] = chosen == seen.wanted
        return right

    def _score(self, before: Int64Array, ids: Int64Array, logits: FloatArray) -> Any:
        torch = self._torch
        pairs = (
            self._second[torch.from_numpy(ids)] @ self._first[torch.from_numpy(before)][..., None]
        )
        return torch.from_numpy(logits) + pairs[..., 0]

    def _train(self, judges: Sequence[Seen], pupils: Sequence[Seen]) -> None:
        torch = self._torch
        weights = [self._first, self._second]
        optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.01)
        chance = np.random.default_rng(0)
        wanted = np.concatenate([one.wanted.ravel() for one in pupils])
        before = np.concatenate([one.before.ravel() for one in pupils])
        ids, logits = (np.concatenate(each) for each in zip(*map(_samples, pupils), strict=True))
        known = np.flatnonzero(wanted >= 0)
        best, best_weights, worse = self._judge(judges), [w.detach().clone() for w in weights], 0
        for _ in range(MOST_EPOCHS):
            for some in np.array_split(chance.permutation(known), -(-len(known) // SAMPLES)):
                scores = self._score(before[some], ids[some], logits[some])
                loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(wanted[some]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            tau = self._judge(judges)
            if tau > best:
                best, best_weights, worse = tau, [w.detach().clone() for w in weights], 0
            else:
                worse += 1
                if worse == PATIENCE:
                    break
        self._first, self._second = best_weights

    def _judge(self, judges: Sequence[Seen]) -> float:
        return mean_tau([walk_loop(self.right(one)) for one in judges])


def _samples(seen: Seen) -> tuple[Int64Array, FloatArray]:
    return seen.ids.reshape(-1, KEPT), seen.logits.reshape(-1, KEPT)


def recall(answers: Sequence[Seen]) -> list[float]:
    """By slot: how often the answer is among the likeliest, where all before were right."""
    wanted = np.concatenate([one.wanted for one in answers])
    reached = np.ones(len(wanted), np.bool_)
    found = []
    for slot in wanted.T:
        reached = reached & (slot != ENDED)
        found.append(float((slot[reached] >= 0).sum() / max(reached.sum(), 1)))
        reached = reached & (slot == 0)
    return found


@bench()
def measure(
    work: Work,
    bundle: Path,
    *,
    prompts: Annotated[tuple[str, ...], "A named set, as NAME=FILE; repeatable."],
    limit_prompts: int | None = None,
    max_tokens: int = 256,
    rank: tuple[int, ...] = (16, 64),
    threads: int = 1,
    answers_file: Annotated[
        Path | None, "Keep answers here, as token ids: a run that was killed goes on with them."
    ] = None,
) -> Figures:
    opened = open_dflash(bundle, "slots know the token before already")
    sets = read_task_sets(name_sources(prompts), limit_prompts)
    kept = KeptAnswers(answers_file or work.folder / "answers.jsonl", opened, max_tokens)
    _, answers = answer_tasks(sets, kept, threads)
    block = opened.manifest.limits.block_size
    graphs = ReplayGraphs(opened, threads, Edits())
    seen = [
        replay(graphs, one.prompt_ids, one.token_ids, block)
        for one in answers
        if len(one.token_ids) > 1 and not is_looping(one.token_ids)
    ]
    graphs.close()
    if len(seen) < 4:
        what = f"{len(seen)} answers that do not repeat themselves are too few to learn from"
        raise DflashError(what, where="--prompts", fix="give more prompts", usage=True)
    halves = seen[::2], seen[1::2]
    plain = mean_tau([walk_loop(one.wanted == 0) for one in seen])
    vocab = opened.manifest.target.vocab_size
    by_rank: Figures = {}
    for size in rank:
        heads = [FittedHead(half, vocab, size) for half in halves]
        walks = [
            walk_loop(head.right(one))
            for head, others in zip(heads, halves[::-1], strict=True)
            for one in others
        ]
        by_rank[str(size)] = {"tau": mean_tau(walks), "gain": mean_tau(walks) / plain - 1}
        click.echo(f"rank {size}: tau {plain:.3f} without a head, {mean_tau(walks):.3f} with one")
    return {
        "pair": opened.manifest.name,
        "block": block,
        "answers": len(seen),
        "tokens": sum(len(one.wanted) + 1 for one in seen),
        "tau": plain,
        f"recall_of_{KEPT}": recall(seen),
        "by_rank": by_rank,
    }
