"""The end of a training: the best draft's pair is built, proven and published with a card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.files import resolved
from dflash_trt.core.publish import staged_folder
from dflash_trt.decoding import Request
from dflash_trt.errors import DflashError
from dflash_trt.proof.verification import Mode, measure_speed, verify
from dflash_trt.training.card import DraftRecord, write_card
from dflash_trt.training.json_lines import write_lines
from dflash_trt.training.observer import Evaluation, TrainingCurves, TrainingWatch
from dflash_trt.training.pair_bundle import PairBuilder
from dflash_trt.training.preparation import RECORD_NAME, TRAINED, Preparation
from dflash_trt.training.render import RenderedRow
from dflash_trt.training.train_stage import CURVES_NAME, TrainedDraft

_PROOF_PROMPTS, _PROOF_TOKENS, _SPEED_RUNS = 4, 48, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Speculative answers beside the baseline's: `tokens` and `logits` compared, all equal.

    `speedup` is that of decoding one sequence, here and now.
    """

    tokens: int
    logits: int
    speedup: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPair:
    """What a training left.

    Args:
        draft, bundle: their folders.
        best: the evaluation of the draft that was kept.
        ended: why training ended.
        seconds: this run took.
    """

    draft: Path
    bundle: Path
    best: Evaluation
    evaluations: tuple[Evaluation, ...]
    ended: str
    proof: Proof
    seconds: float


def finish(
    preparation: Preparation,
    builder: PairBuilder,
    trained: TrainedDraft,
    held_out: Sequence[RenderedRow],
    record: DraftRecord,
    watch: TrainingWatch,
    *,
    overwrite: bool,
    seconds: float,
) -> TrainedPair:
    """Builds and proves the pair of `trained`, then publishes draft and bundle.

    Raises:
        DflashError: speculation changes an answer, or a disk refuses.
    """
    watch.stage("building and proving the pair", None)
    measured = builder.build(trained.folder, trained.folder.parent.parent / "proven")
    most = min(_PROOF_TOKENS, preparation.request.data.answer_tokens)
    proof = prove(measured, held_out, most, preparation.request.threads)
    output = resolved(preparation.request.output)
    watch.stage("publishing", None)
    with staged_folder(output, overwrite=overwrite, kind=TRAINED) as folder:
        for file in sorted(trained.folder.iterdir()):
            shutil.copyfile(file, folder / file.name)
        text = json.dumps(record.to_json(), indent=2, sort_keys=True)
        (folder / RECORD_NAME).write_text(f"{text}\n", "utf-8")
        write_lines(folder / "epochs.jsonl", (one.to_json() for one in trained.evaluations))
        curves = TrainingCurves(trained.evaluations, trained.steps, trained.ended)
        page = watch.draw(curves)
        if page is not None:
            (folder / CURVES_NAME).write_text(page, "utf-8")
        card = write_card(record, output.name, curves=None if page is None else CURVES_NAME)
        (folder / "README.md").write_text(card, "utf-8")
    bundle = builder.build(
        output, resolved(preparation.bundle), prompts=prompts_of(held_out), overwrite=overwrite
    )
    return TrainedPair(
        draft=preparation.request.output,
        bundle=bundle.folder,
        best=trained.best,
        evaluations=trained.evaluations,
        ended=trained.ended,
        proof=proof,
        seconds=seconds,
    )


def prove(bundle: Bundle, rows: Sequence[RenderedRow], most: int, threads: int) -> Proof:
    """Held-out prompts, continued by `most` tokens with and without speculation.

    Raises:
        DflashError: a bit of a logit differs.
    """
    manifest = bundle.manifest
    requests = [
        Request(prompt_ids=row.prompt_ids, max_tokens=most) for row in rows[:_PROOF_PROMPTS]
    ]
    eos = manifest.target.eos_token_ids
    with closing(
        open_executor(bundle, threads=threads, graphs=("target", "draft", "target_only"))
    ) as executor:
        (report,) = verify(
            executor,
            requests,
            [Mode(speculation=True, batch=1, block_size=manifest.limits.block_size)],
            eos_token_ids=eos,
            prefill_chunk=manifest.limits.prefill_chunk,
        )
        if not report.is_lossless:
            raise DflashError(
                f"speculation changes an answer: {report.difference}",
                where=bundle.folder,
                fix="this is a fault of dflash-trt: please report it; nothing was published",
            )
        timing = measure_speed(
            executor,
            requests,
            block_size=manifest.limits.block_size,
            repeats=_SPEED_RUNS,
            eos_token_ids=eos,
        )
    speed = timing.speed()
    return Proof(
        tokens=report.tokens,
        logits=report.logits,
        speedup=speed.speedup if speed.ratios else None,
    )


def prompts_of(rows: Sequence[RenderedRow]) -> list[str]:
    """What `verify` and `generate` may be given: the last user's message, or the text itself."""
    said = []
    for row in rows:
        users = [one["content"] for one in row.messages if one["role"] == "user"]
        said.append(users[-1] if users else row.text)
    return said
