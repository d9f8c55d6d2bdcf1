"""The stage that renders: every prompt as serving sends it, and what was left out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_trt.errors import DflashError
from dflash_trt.training.json_lines import JsonLines, write_lines
from dflash_trt.training.preparation import Preparation
from dflash_trt.training.render import RenderedRow
from dflash_trt.training.rows import HELD_OUT_MOST
from dflash_trt.training.watch import TrainingWatch
from dflash_trt.training.work_folder import WorkFolder

_ROWS = "rows.jsonl"


@dataclass(slots=True)
class RenderedRows:
    """Prompts to train on, and prompts to measure on."""

    train: list[RenderedRow]
    held_out: list[RenderedRow]


def render_rows(preparation: Preparation, work: WorkFolder, watch: TrainingWatch) -> RenderedRows:
    """The prompts as serving sends them.

    Raises:
        DflashError: see `PromptRenderer.render`; no prompt leaves room for an answer.
    """
    stage = work.stage("render", preparation.render_parts(), keep_others=True)
    path = stage.folder / _ROWS
    record = stage.record
    if record is None:
        split = preparation.rows
        total = len(split.train) + len(split.held_out)
        watch.stage("rendering prompts", total, "steps")
        lines, too_long = [], 0
        for name, some in (("train", split.train), ("held_out", split.held_out)):
            rendered, dropped = preparation.renderer.render(some, lambda: watch.advance(1))
            too_long += dropped
            lines += [{**asdict(row), "part": name} for row in rendered]
        write_lines(path, lines)
        record = stage.finish({"too_long": too_long, "repeated": split.repeated})
    for key, what in (("too_long", "too long for --max-length"), ("repeated", "repeated")):
        if record[key]:
            watch.say(f"left out {record[key]:,} prompts that are {what}")
    if more := preparation.rows.unmeasured:
        watch.say(f"{more:,} held-out prompts are not measured on: {HELD_OUT_MOST} tell enough")
    brought = sum(row.answer is not None for row in preparation.rows.train)
    if brought and not preparation.request.data.given_answers:
        watch.say(
            f"{brought:,} prompts bring answers, which are not used: the target gives its own "
            "(--given-answers takes theirs)"
        )
    rows = RenderedRows([], [])
    with JsonLines(path) as saved:
        for line in saved.records:
            part = rows.train if line.pop("part") == "train" else rows.held_out
            part.append(_read_row(line))
    if not rows.train or not rows.held_out:
        what = f"no prompt leaves room for an answer within {preparation.max_length} tokens"
        raise DflashError(what, where="--prompts", fix="raise --max-length", usage=True)
    return rows


def _read_row(line: dict[str, Any]) -> RenderedRow:
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in line.items()
    }
    return RenderedRow(**values)  # type: ignore[arg-type]
