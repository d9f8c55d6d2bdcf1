"""A trained draft's card: what it was trained on, how well it drafts, how it is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_trt.models.draft_kinds import TRAITS
from dflash_trt.training.draft_shape import DraftDesign
from dflash_trt.training.observer import Evaluation
from dflash_trt.training.trainer import TrainerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRecord:
    """What training.json holds: everything that decided the weights, and what came of it.

    Args:
        target: its name, and the hash of its weights' headers and config.
        hashes: SHA-256 of the prompt files by name, of tokenizer.json and of the template.
        rows, held_out: prompts trained and measured on.
        answers: who gave them.
        hours: what all of it was given; a run that ended early took fewer.
        machine: what trained.
        template_options: what serving has to tell the chat template.
        reasons: why each default was chosen.
        steps: of the schedule; the best is at `best.step`.
    """

    target: str
    target_sha256: str
    hashes: dict[str, str | None]
    sets: dict[str, int]
    rows: int
    held_out: int
    tokens: int
    answers: str
    hours: float
    machine: str
    system_prompt: str | None
    template_options: dict[str, bool | str]
    shape: DraftDesign
    settings: TrainerSettings
    reasons: dict[str, str]
    evaluations: Sequence[Evaluation]
    best: Evaluation
    ended: str
    start: str | None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "shape": self.shape.config()}


def write_card(record: DraftRecord, name: str, *, curves: str | None) -> str:
    """README.md of the draft; `name` is the folder's, `curves` that of the page beside it."""
    best, shape = record.best, record.shape
    kind = TRAITS[shape.kind]
    title = kind.title[0].upper() + kind.title[1:]
    lines = [
        "---",
        "library_name: dflash",
        "pipeline_tag: text-generation",
        "tags: [speculative-decoding, dflash, draft]",
        "---",
        "",
        f"# {name}",
        "",
        f"{title} (arXiv {kind.paper}) for **{record.target}**, trained with "
        "`dflash-trt train-draft`. It has no embedding and no head of its own: it borrows the "
        "target's, and is of no use with another target.",
        "",
        "| | |",
        "|---|---|",
        f"| acceptance length τ, block {shape.block_size} | {best.acceptance_length:.2f} tokens a "
        f"verify step, on {record.held_out} prompts that were held out |",
        f"| shape | {shape.layers} layers × {shape.hidden_size}, heads {shape.heads}/"
        f"{shape.kv_heads} × {shape.head_dim}, ffn {shape.intermediate_size}, "
        f"{shape.parameters:,} parameters |",
        f"| taps | layers {', '.join(map(str, shape.target_layer_ids))} of "
        f"{shape.num_target_layers} |",
        f"| mask token | {shape.mask_token_id} |",
        f"| data | {record.rows:,} prompts, {record.tokens:,} tokens; answers: {record.answers} |",
        f"| training | {record.settings.steps:,} steps of {record.settings.rows} rows; "
        f"{record.hours:g} h were given, {record.machine} |",
        "",
        "τ was measured through the graphs that serve, by replaying the target's own answers.",
        "",
        "## By position",
        "",
        "| slot | accepted, given all before | answer among the 16 likeliest |",
        "|---|---|---|",
    ]
    slots = zip(best.conditional_acceptance, best.recall_at_16, strict=True)
    lines += [
        f"| {slot} | {_percent(accepted)} | {_percent(recall)} |"
        for slot, (accepted, recall) in enumerate(slots, start=1)
    ]
    for what, parts in (("set", best.sets), ("category", best.categories)):
        if len(parts) > 1:
            lines += ["", f"## By {what}", "", f"| {what} | τ |", "|---|---|"]
            lines += [f"| {name} | {_number(tau)} |" for name, tau in sorted(parts.items())]
    if curves is not None:
        lines += ["", f"Every measurement, slot and set: [{curves}]({curves})."]
    lines += ["", f"Training ended by {record.ended}.", "", "## Data", ""]
    lines += [f"- {name}: {count:,} prompts" for name, count in record.sets.items()]
    lines += [f"- SHA-256 of {name}: `{value}`" for name, value in record.hashes.items() if value]
    lines += [f"- SHA-256 of the target's headers and config: `{record.target_sha256}`"]
    if record.start is not None:
        lines += [f"- continued from {record.start}"]
    lines += ["", "## Serving", ""]
    lines += _serving(record)
    return "\n".join(lines) + "\n"


def _serving(record: DraftRecord) -> list[str]:
    lines = [
        f"- chat template variable `{name}`: `{value}`"
        for name, value in record.template_options.items()
    ]
    if record.system_prompt is not None:
        lines += [f"- system prompt: {record.system_prompt!r}"]
    if lines:
        first = "It was trained on answers to prompts rendered so; others are accepted less:"
        lines = [first, "", *lines, ""]
    drafts = record.shape.block_size - 1
    layouts = {
        "EAGLE-3": "EAGLE's layout, which others serve as EAGLE-3",
        "DSpark": "DeepSpec's layout, copies of the target's matrices included",
        "DFlash": f"z-lab's layout, which vLLM (`num_speculative_tokens` {drafts}), SGLang "
        f"(`--speculative-num-draft-tokens {record.shape.block_size}`) and TensorRT-LLM "
        f"(`max_draft_len` {drafts}) describe as theirs (none of the three has loaded a draft of "
        "`train-draft` so far)",
    }
    return [
        *lines,
        f"The checkpoint has {layouts[record.shape.kind]}; here:",
        "",
        "```",
        "dflash-trt build --target-checkpoint TARGET --draft-checkpoint DRAFT",
        "```",
    ]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
