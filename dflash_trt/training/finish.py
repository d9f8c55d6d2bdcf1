"""The end of a training: the best draft's pair is built, proven and published with a card."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.files import resolved
from dflash_trt.core.machine import processor
from dflash_trt.core.publish import staged_folder
from dflash_trt.decoding import Request
from dflash_trt.deploy.other_engines import serving_options
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.models.draft_kinds import TRAITS
from dflash_trt.models.safetensors_header import header_sha256
from dflash_trt.proof.verification import Mode, measure_speed, verify
from dflash_trt.training.draft_shape import DraftDesign
from dflash_trt.training.features import TokenRow
from dflash_trt.training.observer import TrainedDraft, TrainingWatch
from dflash_trt.training.pair_bundle import PairBuilder
from dflash_trt.training.preparation import RECORD_NAME, TRAINED, Preparation
from dflash_trt.training.recipe import describe
from dflash_trt.training.rows import RenderedRow, RenderedRows
from dflash_trt.training.work_folder import digest, write_lines

CURVES_NAME = "curves.html"
CONVERSATIONS_NAME = "conversations.jsonl"
"""What the target wrote and answered: `--prompts` and `--given-answers` take it."""
_PROOF_PROMPTS, _PROOF_TOKENS, _SPEED_RUNS = 4, 48, 1
_CARD = """\
---
library_name: dflash
pipeline_tag: text-generation
tags: [speculative-decoding, dflash, draft]
---

# {name}

{title} (arXiv {paper}) for **{target}**, trained with `dflash-trt train-draft`. It has no
embedding and no head of its own: it borrows the target's, and is of no use with another target.

| | |
|---|---|
| acceptance length τ, block {shape.block_size} | {tau:.2f} tokens a verify step, on {held_out} \
prompts that were held out |
{chosen}
| data | {rows:,} prompts ({sets}), {tokens:,} tokens; answers: {answers} |
| training | {steps:,} steps; {hours:g} h were given, {machine} |

τ was measured through the graphs that serve, by replaying the target's own answers. Training ended
by {ended}.

| slot | accepted, given all before | answer among the 16 likeliest |
|---|---|---|
{slots}

## Data

{hashes}

## Serving

{serving}The checkpoint has {layout}; here:

```
dflash-trt build --target-checkpoint TARGET --draft-checkpoint DRAFT
```
"""


@dataclass(frozen=True, slots=True)
class Proof:
    """Speculative answers beside the baseline's: `tokens` and `logits` compared, all equal.

    `speedup` is that of decoding one sequence, here and now.
    """

    tokens: int
    logits: int
    speedup: float | None


@dataclass(frozen=True, slots=True)
class TrainedPair:
    """What a training left: the folders of draft and bundle; `seconds` are this run's."""

    draft: Path
    bundle: Path
    trained: TrainedDraft
    proof: Proof
    seconds: float


def finish(
    preparation: Preparation,
    builder: PairBuilder,
    trained: TrainedDraft,
    rows: RenderedRows,
    train: Sequence[TokenRow],
    source: str,
    watch: TrainingWatch,
    *,
    began: float,
) -> TrainedPair:
    """Builds and proves the pair of `trained`, then publishes draft and bundle.

    Args:
        rows: trained and measured on; `train` has the answers too.
        source: what computed the features.

    Raises:
        DflashError: speculation changes an answer, or a disk refuses.
    """
    request = preparation.request
    watch.stage("building and proving the pair", None)
    measured = builder.build(trained.folder, trained.folder.parent.parent / "proven")
    most = min(_PROOF_TOKENS, request.answer_tokens)
    proof = prove(measured, rows.held_out, most, request.threads)
    output, is_over = resolved(request.output), request.overwrite
    watch.stage("publishing", None)
    with staged_folder(output, overwrite=is_over, kind=TRAINED) as folder:
        for file in sorted(trained.folder.iterdir()):
            shutil.copyfile(file, folder / file.name)
        record = make_record(preparation, trained, rows, train, source)
        text = json.dumps(record, indent=2, sort_keys=True)
        (folder / RECORD_NAME).write_text(f"{text}\n", "utf-8")
        write_lines(folder / "epochs.jsonl", map(asdict, trained.evaluations))
        own = preparation.own
        if own is not None:
            told = zip(rows.train, train, strict=True)
            write_lines(
                folder / CONVERSATIONS_NAME,
                (_conversation(*one) for one in told if one[0].set_name == own.name),
            )
        page = watch.draw(trained)
        if page is not None:
            (folder / CURVES_NAME).write_text(page, "utf-8")
        card = write_card(record, preparation.shape, output.name)
        (folder / "README.md").write_text(card, "utf-8")
    # What `verify` and `generate` may be given: the last user's message, or the text itself.
    asked = [
        next((one["content"] for one in reversed(row.messages) if one["role"] == "user"), row.text)
        for row in rows.held_out
    ]
    bundle = builder.build(output, resolved(preparation.bundle), prompts=asked, overwrite=is_over)
    return TrainedPair(request.output, bundle.folder, trained, proof, time.monotonic() - began)


def _conversation(row: RenderedRow, answered: TokenRow) -> dict[str, Any]:
    asked = {"messages": list(row.messages)} if row.messages else {"prompt": row.text}
    return {**asked, "answer": list(map(int, answered.answer_ids))}


def prove(bundle: Bundle, rows: Sequence[RenderedRow], most: int, threads: int) -> Proof:
    """Held-out prompts, continued by `most` tokens with and without speculation.

    Raises:
        DflashError: a bit of a logit differs.
    """
    manifest = bundle.manifest
    block, eos = manifest.limits.block_size, manifest.target.eos_token_ids
    some = rows[:_PROOF_PROMPTS]
    requests = [Request(prompt_ids=row.prompt_ids, max_tokens=most) for row in some]
    with closing(open_executor(bundle, threads=threads, graphs=GRAPH_NAMES)) as executor:
        (report,) = verify(
            executor,
            requests,
            [Mode(speculation=True, batch=1, block_size=block)],
            eos_token_ids=eos,
            prefill_chunk=manifest.limits.prefill_chunk,
        )
        if not report.is_lossless:
            raise DflashError(
                f"speculation changes an answer: {report.difference}",
                where=bundle.folder,
                fix="this is a fault of dflash-trt: please report it; nothing was published",
            )
        speed = measure_speed(
            executor, requests, block_size=block, repeats=_SPEED_RUNS, eos_token_ids=eos
        ).speed()
    speedup = speed.speedup if speed.ratios else None
    return Proof(tokens=report.tokens, logits=report.logits, speedup=speedup)


def make_record(
    preparation: Preparation,
    trained: TrainedDraft,
    rows: RenderedRows,
    train: Sequence[TokenRow],
    source: str,
) -> dict[str, Any]:
    """What training.json holds: everything that decided the weights, and what came of it."""
    request, settings = preparation.request, preparation.settings
    checkpoint, threads = preparation.target.spec.checkpoint, request.threads
    headers = [header_sha256(file) for file in checkpoint.files]
    # Not of where or when it was saved.
    target_hash = digest({"config": checkpoint.config, "headers": headers})
    how = "greedy" if request.temperature == 0 else f"at temperature {request.temperature:g}"
    by = "dflash-trt" if request.url is None else "an OpenAI-compatible server"
    said = f"the target's own, {how}, from {by}, {request.answer_tokens} tokens at most"
    cpu = f"{processor()}, {threads} thread{'s' * (threads > 1)}"
    machine = cpu if preparation.device == "cpu" else torch.cuda.get_device_name()
    return {
        "target": preparation.target.name,
        "hashes": preparation.hashes | {"the target's headers and config": target_hash},
        "prompt_sets": preparation.described_sets(),
        "topics": preparation.topics,
        "sets": dict(sorted(Counter(row.set_name for row in rows.train).items())),
        "rows": len(train),
        "held_out": len(rows.held_out),
        "tokens": sum(len(row.token_ids) for row in train),
        "answers": "given with the prompts" if request.given_answers else said,
        "hours": request.hours,
        "machine": f"{machine}, torch {torch.__version__}",
        "system_prompt": request.system_prompt,
        "template_options": preparation.renderer.variables,
        "shape": preparation.shape.config(),
        "settings": asdict(replace(settings, steps=trained.steps)),
        "chosen": describe(preparation.shape, settings, source),
        "evaluations": list(map(asdict, trained.evaluations)),
        "best": asdict(trained.best),
        "ended": trained.ended,
        "start": None if request.start is None else resolved(request.start).name,
    }


def write_card(record: dict[str, Any], shape: DraftDesign, name: str) -> str:
    """README.md of the draft in a folder `name`; `record` is what training.json holds."""
    best, traits = record["best"], TRAITS[shape.kind]
    slots = zip(best["conditional_acceptance"], best["recall_at_16"], strict=True)
    serving = [f"- {key}: `{value}`" for key, value in record["template_options"].items()]
    if record["system_prompt"] is not None:
        serving += [f"- system prompt: {record['system_prompt']!r}"]
    if serving:
        first = "It was trained on answers to prompts rendered so; others are accepted less:"
        serving = [first, "", *serving, "", ""]
    hashes = {name: value for name, value in record["hashes"].items() if value}
    drafts = shape.block_size - 1
    others = "; ".join(serving_options("DFlash 2", drafts))
    layouts = {
        "EAGLE-3": "EAGLE's layout, which others serve as EAGLE-3",
        "MTP": "the target's config.json and the tensors `mtp.*` by their names in the target's "
        "own checkpoint, into which they may be put back",
        "DSpark": "DeepSpec's layout, copies of the target's matrices included",
        "DFlash 2": "z-lab's layout (DFlash2DraftModel), which others describe as theirs (none has "
        f"loaded a draft of `train-draft` so far): {others}",
        "DFlash": f"z-lab's layout, which vLLM, SGLang and TensorRT-LLM ({drafts} draft tokens) "
        "describe as theirs (none of the three has loaded a draft of `train-draft` so far)",
    }
    return _CARD.format(
        **{key: record[key] for key in ("target", "held_out", "rows", "tokens", "answers")},
        **{key: record[key] for key in ("hours", "machine", "ended")},
        name=name,
        title=traits.title[0].upper() + traits.title[1:],
        paper=traits.paper,
        shape=shape,
        tau=best["acceptance_length"],
        chosen="\n".join(f"| {key} | {value} |" for key, value in record["chosen"].items()),
        sets=", ".join(f"{name} {count:,}" for name, count in record["sets"].items()),
        steps=record["settings"]["steps"],
        slots="\n".join(
            f"| {slot} | {_percent(accepted)} | {_percent(recall)} |"
            for slot, (accepted, recall) in enumerate(slots, start=1)
        ),
        hashes="\n".join(f"- SHA-256 of {name}: `{value}`" for name, value in hashes.items()),
        serving="\n".join(serving),
        layout=layouts[shape.kind],
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
