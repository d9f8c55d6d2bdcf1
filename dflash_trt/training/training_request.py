"""What one may ask of `train-draft`. A default that is None is chosen: recipe.py, hours_plan.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """A draft to train.

    Args:
        target: a checkpoint's folder, a bundle's (whose weights, quantised or not, are the
            target then), or a name that `targets` lists.
        hours: of wall time for everything.
        start: a draft to go on with; it brings its shape along. One of DFlash with the kind
            "dflash2" goes on as that.
        work: where stages keep their results; None is a hidden folder beside `output`.
        online: features are computed whenever a row is used, not kept on disk.
        prompts: sets, [NAME=]SOURCE[:SHARE]; a source is a file whose lines have a "prompt" or
            "messages", an address on the hub, or self[:COUNT], which the target writes.
        topics: a file of system prompts, one a line, under which the target writes users' words.
        held_out: sets that are measured on; without one some are split off `prompts`.
        given_answers: the lines' "answer" is the target's own, so that it need not be asked.
        template_options: variables of the chat template, which replace the configuration's.
        raw: prompts go to the target without the chat template.
        max_length: tokens of a row, prompt and answer; the target's positions may be fewer.
        answer_tokens: most tokens of an answer.
        temperature: of the answers; 0 is greedy.
        rows: how many prompts to train on; None is what the budget allows.
        url: an OpenAI-compatible server that answers the prompts; None: this process does.
        endpoint_model: its name for the target; None takes the only one that it lists.
        kind: "dflash", "dflash2", "dspark", "eagle3" or "mtp".
        anchors: blocks of a row at each step.
        gamma: slot k's loss weighs exp(-(k - 1) / gamma).
        learning_rate: of the schedule's top.
        batch_rows: rows of a step.
        draft_tokens: how many tokens the draft chooses among, the commonest; 0 is all.
        steps: of the whole schedule, all of which are trained.
    """

    target: str
    hours: float
    output: Path
    start: Path | None = None
    work: Path | None = None
    overwrite: bool = False
    online: bool = False
    threads: int = 1
    seed: int = 0
    prompts: tuple[str, ...]
    topics: Path | None = None
    held_out: tuple[str, ...] = ()
    given_answers: bool = False
    system_prompt: str | None = None
    template_options: Mapping[str, bool | str] = field(default_factory=dict)
    raw: bool = False
    max_length: int = 3072
    answer_tokens: int = 512
    temperature: float = 0.0
    rows: int | None = None
    url: str | None = None
    endpoint_model: str | None = None
    kind: str | None = None
    layers: int | None = None
    block_size: int | None = None
    taps: tuple[int, ...] | None = None
    ffn: int | None = None
    mask_token_id: int | None = None
    markov_rank: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    anchors: int | None = None
    gamma: float | None = None
    learning_rate: float | None = None
    batch_rows: int | None = None
    draft_tokens: int | None = None
    steps: int | None = None
