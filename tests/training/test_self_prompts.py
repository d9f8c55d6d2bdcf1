"""`--prompts self`: what the target writes, what is kept of it, and in which shares sets are."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from dflash_trt.decoding import Request
from dflash_trt.errors import DflashError
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.observer import WrittenPrompts
from dflash_trt.training.prompt_sets import TrainingSet, parse_sets
from dflash_trt.training.rows import PromptRow, read_sets, split_rows
from dflash_trt.training.self_prompts import PromptWriter, Sieve
from dflash_trt.training.work_folder import JsonLines
from tests.frozen.command_line import run, run_well
from tests.training.prompts import TARGET, command, contents, write_prompts, write_rows

TEMPLATE = (
    "{% for one in messages %}{{ one.role }}: {{ one.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_sets_and_their_shares() -> None:
    sets = parse_sets(["self:400:0.5", "math=a.jsonl:0.3", "b.jsonl"], hours=1)
    assert sets == (
        TrainingSet("self", None, 400, 0.5),
        TrainingSet("math", "a.jsonl", 0, 0.3),
        TrainingSet("b", "b.jsonl"),
    )
    assert [one.count for one in parse_sets(["own=self"], hours=0.1)] == [64]
    assert parse_sets(["self"], hours=3)[0].count == 1200


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["self:3"], "3 prompts are not between 16 and 1,000,000"),
        (["self", "b=self"], "the target writes one set"),
        (["a.jsonl:0.7", "b.jsonl:0.4"], "leave something"),
        (["a.jsonl:0.6", "b.jsonl:0.4", "c.jsonl"], "leave something"),
        (["a.jsonl:.0", "b.jsonl"], "above 0"),
        (["self", "self.jsonl"], "two sets are named 'self'"),
    ],
)
def test_sets_that_do_not_go(given: list[str], what: str) -> None:
    with pytest.raises(DflashError, match=what) as caught:
        parse_sets(given, hours=1)
    assert caught.value.exit_code == 2


def test_each_beginning_has_the_shares(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("few", "many", "rest")}
    for at, (file, count) in enumerate(zip(files.values(), (30, 300, 200), strict=True)):
        write_prompts(file, count, first=1000 * at)
    given = [f"{files['few']}:0.2", f"{files['many']}:0.4", str(files["rest"])]
    sets = parse_sets(given, hours=1)
    rows, _ = read_sets([f"{one.name}={one.source}" for one in sets])
    split = split_rows(rows, None, sets)
    ordered = [row.set_name for row in (*split.held_out, *split.train)]
    for end in (10, 50, 100, len(ordered)):
        counts = Counter(ordered[:end])
        for name, share in (("few", 0.2), ("many", 0.4), ("rest", 0.4)):
            assert abs(counts[name] - share * end) <= 1, (name, end)
    assert 150 <= len(ordered) <= 154 and split.surplus == 530 - len(ordered), "30 are a fifth"


def test_what_is_kept_of_written_prompts() -> None:
    sieve = Sieve()
    long = "Which of the two rivers that meet in the old town is the longer one"
    assert sieve.takes(f"{long}?", [1, 2, 3])
    assert not sieve.takes(f"{long}, please?", [1, 2, 3])
    assert not sieve.takes("12 + 3 = ?", [1]) and not sieve.takes("", [])
    assert not sieve.takes("Say it again and again to me", [*range(8)] * 3)
    for number in range(40):
        assert sieve.takes(f"What is {'abcdefghij'[number // 10] * 9} by {number} or so", [number])
    assert not sieve.takes("Что такое спекулятивное декодирование", [5])
    assert sieve.left_out == Counter(
        {
            "like another": 1,
            "too short": 1,
            "unfinished": 1,
            "repeating itself": 1,
            "in another script": 1,
        }
    )


class Saying:
    """A pair of the demo's tokenizer whose target answers every request with `ids`."""

    def __init__(self, folder: Path, template: str, ids: list[int]) -> None:
        copy = folder / "target"
        shutil.copytree(TARGET, copy, dirs_exist_ok=True)
        config = json.loads((copy / "tokenizer_config.json").read_text())
        (copy / "tokenizer_config.json").write_text(
            json.dumps({**config, "chat_template": template})
        )
        self.tokenizer, self.ids = BundleTokenizer(copy), ids
        self.asked: list[Request] = []
        self.bundle = SimpleNamespace(
            manifest=SimpleNamespace(target=SimpleNamespace(eos_token_ids=(0,)))
        )

    def run(self, requests: list[Request]) -> list[object]:
        self.asked += requests
        return [SimpleNamespace(token_ids=tuple(self.ids)) for _ in requests]

    def write(self, lines: Path) -> tuple[list[PromptRow], WrittenPrompts]:
        preparation = SimpleNamespace(
            renderer=SimpleNamespace(variables={}, uses_template=True),
            request=SimpleNamespace(seed=0, system_prompt=None, hours=9.0, answer_tokens=8),
            topics=(),
            max_length=600,
        )
        with JsonLines(lines) as kept:
            writer = PromptWriter(preparation, self, kept)  # type: ignore[arg-type]
            try:
                return writer.write(TrainingSet("self", None, 1), lambda count: None)
            finally:
                writer.close()


def test_a_users_words_end_where_the_template_ends_them(tmp_path: Path) -> None:
    """At a special token of the template, which need not end answers."""
    words = "which of the keys is in rome"
    for end, stops in (("<|endoftext|>", ()), ("<|mask|>", (1,))):
        pair = Saying(tmp_path, TEMPLATE.replace("{{ eos_token }}", end), [])
        pair.ids = [*pair.tokenizer.encode(words), *(stops or (0,))]
        rows, told = pair.write(tmp_path / f"{len(stops)}.jsonl")
        assert rows[0].messages[-1]["content"] == words and told.lengths == [len(pair.ids) - 1]
        assert pair.asked[0].stop_token_ids == stops
    with pytest.raises(DflashError, match="ends a user's words with no special token"):
        Saying(tmp_path, TEMPLATE.replace("{{ eos_token }}", " [/INST]"), [5]).write(
            tmp_path / "2.jsonl"
        )
    with pytest.raises(DflashError, match=r"of 128 .* 0 are of use \(128 unfinished\)"):
        Saying(tmp_path, TEMPLATE, [5, 6, 7]).write(tmp_path / "3.jsonl")


def test_options_that_do_not_go_with_it(tmp_path: Path) -> None:
    topics = tmp_path / "topics"
    topics.write_text("a\n")
    prompts, output = write_prompts(tmp_path / "prompts.jsonl", 24), tmp_path / "draft"
    own = [str(word) for word in command(Path("self:16"), output)]
    cases = [
        ([*own, "--given-answers"], "--given-answers"),
        ([*command(prompts, output), "--set", f"topics={topics}"], "--prompts self"),
        ([*own, "--set", f"topics={topics}"], "needs a chat template"),
    ]
    for words, piece in cases:
        run(*words).fails(2, piece)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["prompts.jsonl", "topics"]


def words_for(output: Path, target: Path = TARGET, count: int = 64, rows: int = 40) -> list[str]:
    given = f"--prompts self:{count} --set rows={rows} --set steps=60 --threads 1".split()
    small = "--set answer-tokens=64 --set max-length=192 --hours 0.1".split()
    return ["train-draft", "--target", str(target), "-o", str(output), *given, *small]


@pytest.mark.exhaustive
def test_a_draft_from_the_target_alone(tmp_path: Path) -> None:
    """One run without a break; one that is interrupted as it writes, and goes on."""
    out = run_well(*words_for(tmp_path / "draft")).out
    assert "the target wrote 64 prompts, 0 of them second messages" in out
    lines = (tmp_path / "draft" / "conversations.jsonl").read_text().splitlines()
    assert len(lines) == 40 and all(json.loads(line)["answer"] for line in lines)
    page = (tmp_path / "draft" / "curves.html").read_text()
    assert "What the target asks" in page and "second messages" in page

    write, rounds = PromptWriter._write_round, []

    def interrupt(self: PromptWriter, first: int) -> object:
        rounds.append(first)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return write(self, first)

    again = tmp_path / "again" / "draft"
    with mock.patch.object(PromptWriter, "_write_round", interrupt):
        assert run(*words_for(again)).code == 130
        run_well(*words_for(again))
    assert rounds[:3] == [0, 32, 32], "what was written is kept"
    assert contents(again) == contents(tmp_path / "draft")

    # What it left can be trained on again, without asking anybody.
    told = tmp_path / "draft" / "conversations.jsonl"
    more = command(told, tmp_path / "third", "--given-answers", "--json")
    assert run_well(*more).json["proof"]["tokens"] > 0


@pytest.mark.exhaustive
def test_users_speak_where_the_template_lets_them(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    topics = tmp_path / "topics"
    topics.write_text("shift\n\nsort\n")
    words = [*words_for(tmp_path / "draft", target, 24, 12), "--set", f"topics={topics}"]
    prompts = write_rows(tmp_path / "own.jsonl", [{"prompt": f"shift #{i}"} for i in range(16)])
    words += ["--prompts", f"{prompts}:0.25", "--set", "steps=8", "--set", "max-length=640"]
    go_on = PromptWriter._continue

    def end(self: PromptWriter, *given: object) -> object:
        """The demo's texts are far longer than a user's: what is there counts as whole."""
        return [(ids, True) for ids, _ in go_on(self, *given)]  # type: ignore[arg-type]

    with mock.patch.object(PromptWriter, "_continue", end):
        out = run_well(*words).out
    (line,) = [one for one in out.splitlines() if one.startswith("the target wrote")]
    assert ", 0 of them second" not in line
    record = json.loads((tmp_path / "draft" / "training.json").read_text())
    assert record["sets"] == {"own": 3, "self": 9}
    talks = (tmp_path / "draft" / "conversations.jsonl").read_text().splitlines()
    roles = Counter(tuple(m["role"] for m in json.loads(one)["messages"]) for one in talks)
    assert roles.keys() == {("user",), ("user", "assistant", "user")} and roles.total() == 9
