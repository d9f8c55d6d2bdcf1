"""Prompts of the demo pair's kind, and a small training on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from demo_pair.recipe.corpus import document
from dflash_trt.models.build_config import data_folder
from dflash_trt.training.rows import RenderedRow

TARGET = data_folder("demo_pair") / "target"
STEPS = 8
SMALL = "--set answer-tokens=24 --set max-length=128 --hours 0.1".split()


def write_prompts(path: Path, count: int, *, first: int = 0, characters: int = 100) -> Path:
    """The beginnings of `count` documents, a line each."""
    texts = [document(0, "training-test", first + i)[:characters] for i in range(count)]
    return write_rows(path, [{"prompt": text} for text in texts])


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def command(prompts: Path, output: Path, *more: object, steps: int | None = STEPS) -> list[str]:
    """A small `train-draft` of the demo target, which with `steps` depends on no clock."""
    given = [] if steps is None else ["--set", "rows=8", "--set", f"steps={steps}"]
    words = ["train-draft", "--target", TARGET, "--prompts", prompts, "-o", output]
    return [str(word) for word in (*words, *SMALL, *given, *more)]


def rendered(text: str, ids: Sequence[int]) -> RenderedRow:
    """A prompt without a template."""
    return RenderedRow(
        row_id="0f", set_name="", messages=(), text=text, prompt_ids=tuple(ids), answer_ids=None
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, by its path in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
