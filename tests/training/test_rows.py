"""Prompts as serving sends them: template, its variables, system prompt, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflash_trt.errors import DflashError
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.rows import LEAST_ANSWER, PromptRenderer, PromptRow, read_sets, split_rows
from dflash_trt.training.training_request import DataOptions
from tests.training.prompts import TARGET, write_prompts, write_rows

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
    (row,) = rendering.render(rows(tmp_path, {"prompt": "hello"}))
    assert row.text == text
    assert list(row.prompt_ids) == tokenizer.encode(text, special=False)
    assert bool(row.messages) is not ("raw" in options)
    assert (rendering.template_sha256 is None) is ("raw" in options)


def test_an_answer_is_used_when_it_is_said_to_be_the_targets(
    tmp_path: Path, tokenizer: BundleTokenizer
) -> None:
    given = rows(tmp_path, {"prompt": "a", "answer": "b c"}, {"prompt": "d", "answer": [7, 8]})
    rendered = renderer(tokenizer).render(given)
    assert [row.answer_ids for row in rendered] == [None, None]
    rendered = renderer(tokenizer, given_answers=True).render(given)
    said = (*tokenizer.encode("b c", special=False), END)
    assert [row.answer_ids for row in rendered] == [said, (7, 8)]


def test_a_prompt_that_leaves_no_room_is_left_out(
    tmp_path: Path, tokenizer: BundleTokenizer
) -> None:
    frame = len(tokenizer.encode("<user><assistant>", special=False))
    most = 80 - LEAST_ANSWER - frame
    some = rows(tmp_path, {"prompt": "#" * most}, {"prompt": "#" * (most + 40)})
    assert len(renderer(tokenizer).render(some)) == 1


@pytest.mark.parametrize(
    ("options", "line", "what"),
    [
        ({"template_options": {"thinking": True}}, {"prompt": "a"}, "knows no thinking"),
        (
            {"system_prompt": "be brief"},
            {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]},
            "begins with a system prompt of its own",
        ),
        (
            {"raw": True},
            {"messages": [{"role": "user", "content": "y"}]},
            "a conversation needs a chat template",
        ),
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


def test_rows_are_split_by_hash_and_never_twice(tmp_path: Path) -> None:
    first = write_prompts(tmp_path / "first.jsonl", 500)
    (given,) = read_sets([str(first)])
    split = split_rows([*given.rows, *given.rows[:10]], None)
    assert (len(split.held_out), len(split.train), split.repeated) == (25, 475, 10)
    again = split_rows(reversed(given.rows), None)
    assert [row.row_id for row in again.held_out] == [row.row_id for row in split.held_out]
    assert not {row.row_id for row in split.train} & {row.row_id for row in split.held_out}
    (own,) = read_sets([f"own={write_prompts(tmp_path / 'b.jsonl', 30, first=490)}"])
    assert {row.set_name for row in own.rows} == {"own"}
    split = split_rows(given.rows, own.rows)
    assert (len(split.held_out), len(split.train)) == (30, 490)
    assert len(split_rows(own.rows[:8], given.rows[:120]).held_out) == 100


def test_a_conversations_last_answer_is_given(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes"},
    ]
    file = write_rows(tmp_path / "a.jsonl", [{"messages": messages, "category": "chat"}])
    ((row,),) = (one.rows for one in read_sets([str(file)]))
    assert [one["role"] for one in row.messages] == ["system", "user"]
    assert (row.answer, row.category, row.text) == ("yes", "chat", None)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "  "}, "its prompt has no text"),
        ({"prompt": 3}, 'must be an object with a text "prompt"'),
        ({"messages": [{"role": "nobody", "content": "a"}]}, '"messages" of role and content'),
        ({"messages": [{"role": "system", "content": "a"}]}, "its prompt has no text"),
        ({"prompt": "a", "answer": [-1]}, 'its "answer" is neither a text nor token ids'),
        ({"prompt": "a", "answer": []}, 'its "answer" is neither a text nor token ids'),
        ({"prompt": "\ud800"}, "is not Unicode text at character 0"),
    ],
)
def test_a_row_that_asks_nothing(tmp_path: Path, row: object, what: str) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "hello"}, row])
    with pytest.raises(DflashError, match=what) as caught:
        read_sets([str(prompts)])
    assert caught.value.exit_code == 2 and str(caught.value).startswith(f"{prompts}:2")
