"""Prompts as serving sends them: template, its variables, system prompt, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflash_trt.errors import DflashError
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.render import LEAST_ANSWER, PromptRenderer
from dflash_trt.training.training_request import DataOptions
from dflash_trt.training.training_rows import PromptRow, read_sets
from tests.training.prompts import TARGET, write_rows

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "<assistant>{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
)
END = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> BundleTokenizer:
    """The demo target's, with a chat template that may think."""
    folder = tmp_path_factory.mktemp("target")
    shutil.copy(TARGET / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return BundleTokenizer(folder)


def rows(folder: Path, *lines: object) -> list[PromptRow]:
    (one,) = read_sets([str(write_rows(folder / "rows.jsonl", lines))])
    return list(one.rows)


def renderer(tokenizer: BundleTokenizer, **options: object) -> PromptRenderer:
    data = DataOptions(prompts=(), **options)  # type: ignore[arg-type]
    return PromptRenderer(tokenizer, data, {"enable_thinking": True}, (END,), 80)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "<user>hello<assistant>"),
        ({"template_options": {"enable_thinking": False}}, "<user>hello<assistant>quick"),
        ({"system_prompt": "be brief"}, "<system>be brief<user>hello<assistant>"),
        ({"raw": True}, "hello"),
    ],
)
def test_a_prompt_is_what_serving_sends(
    tmp_path: Path, tokenizer: BundleTokenizer, options: dict[str, object], text: str
) -> None:
    rendering = renderer(tokenizer, **options)
    (row,), too_long = rendering.render(rows(tmp_path, {"prompt": "hello"}))
    assert (row.text, too_long) == (text, 0)
    assert list(row.prompt_ids) == tokenizer.encode(text, special=False)
    assert bool(row.messages) is not ("raw" in options)
    assert (rendering.template_sha256 is None) is ("raw" in options)


def test_an_answer_is_used_when_it_is_said_to_be_the_targets(
    tmp_path: Path, tokenizer: BundleTokenizer
) -> None:
    given = rows(tmp_path, {"prompt": "a", "answer": "b c"}, {"prompt": "d", "answer": [7, 8]})
    rendered, _ = renderer(tokenizer).render(given)
    assert [row.answer_ids for row in rendered] == [None, None]
    rendered, _ = renderer(tokenizer, given_answers=True).render(given)
    said = (*tokenizer.encode("b c", special=False), END)
    assert [row.answer_ids for row in rendered] == [said, (7, 8)]


def test_a_prompt_that_leaves_no_room_is_left_out(
    tmp_path: Path, tokenizer: BundleTokenizer
) -> None:
    frame = len(tokenizer.encode("<user><assistant>", special=False))
    most = 80 - LEAST_ANSWER - frame
    some = rows(tmp_path, {"prompt": "#" * most}, {"prompt": "#" * (most + 40)})
    rendered, too_long = renderer(tokenizer).render(some)
    assert (len(rendered), too_long) == (1, 1)


@pytest.mark.parametrize(
    ("options", "line", "what"),
    [
        ({"template_options": {"thinking": True}}, {"prompt": "a"}, "knows no thinking"),
        (
            {"system_prompt": "be brief"},
            {
                "messages": [
                    {"role": "system", "content": "x"},
                    {"role": "user", "content": "y"},
                ]
            },
            "begins with a system prompt of its own",
        ),
        (
            {"raw": True},
            {"messages": [{"role": "user", "content": "y"}]},
            "a conversation needs a chat template",
        ),
        ({}, {"prompt": "a", "prompt_ids": [1]}, "are not what serving sends"),
    ],
)
def test_what_cannot_be_rendered(
    tmp_path: Path,
    tokenizer: BundleTokenizer,
    options: dict[str, object],
    line: object,
    what: str,
) -> None:
    with pytest.raises(DflashError, match=what) as caught:
        renderer(tokenizer, **options).render(rows(tmp_path, line))
    assert caught.value.exit_code == 2
