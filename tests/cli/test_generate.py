"""`generate`: known text, exact statistics, honest JSON, streaming.

What it refuses is in tests/frozen, as are the tokens of its options; what it has in common with
the Python interface is in test_door.
"""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest

from dflash_trt.cli import serve
from dflash_trt.cli.generation_output import OWN, TextWriter, showable
from dflash_trt.decoding import Generator, TokenEvent
from dflash_trt.text.harmony import HarmonyFormat
from dflash_trt.text.thoughts import TokenReader, open_answer
from tests.cli.bigram import token, write_tokenizer
from tests.cli.conftest import Build, Run
from tests.text.tokenizers import ANALYSIS, FINAL, encode, make_harmony
from tests.waiting import PATIENCE_S

# The keys that callers rely on; there may be more.
JSON_KEYS = set(
    "text token_ids prompt_tokens output_tokens steps drafted_tokens accepted_tokens "
    "acceptance_length acceptance_histogram time_to_first_token_s time_per_output_token_s "
    "tokens_per_second finish_reason".split()
)
GREEN, YELLOW, RESET = "\x1b[32m", "\x1b[33m", "\x1b[0m"


def test_json_of_a_known_text(run: Run, bundle: Path) -> None:
    always = ("--block-schedule", "none")  # a busy machine may decide for no drafts
    answer = run("generate", bundle, "--prompt", "cab", "--max-tokens", 9, *always, "--json").json
    assert answer.keys() >= JSON_KEYS
    assert answer["text"] == "ababababa"
    assert answer["token_ids"] == [token(char) for char in "ababababa"]
    assert (answer["prompt_tokens"], answer["output_tokens"]) == (3, 9)
    # The prefill gives "a"; then every block of 8 rows gives one right draft and a bonus.
    assert answer["steps"] == 4
    assert answer["drafted_tokens"] == 4 * 7
    assert answer["accepted_tokens"] == 4
    assert answer["acceptance_length"] == 2.0
    assert answer["acceptance_histogram"] == [0, 4, 0, 0, 0, 0, 0, 0]
    assert answer["finish_reason"] == "length"
    rate = answer["tokens_per_second"]
    assert rate == pytest.approx(1 / answer["time_per_output_token_s"])
    seconds = answer["end_to_end_s"] - answer["time_to_first_token_s"]
    assert rate == pytest.approx(8 / seconds)


def test_outputs_that_follow_something(run: Run, bundle: Path, tmp_path: Path) -> None:
    """Unbound the text goes on "456…"; a grammar's end is the end of the sequence."""
    asked = ["generate", bundle, "--prompt", "3", "--json"]
    answer = run(*asked, "--regex", "4x?5").json
    assert (answer["text"], answer["finish_reason"]) == ("45", "stop")
    plain = run(*asked, "--regex", "4x?5", "--drafter", "none").json
    assert plain["token_ids"] == answer["token_ids"]
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [56, 4567, 45678]}')
    answer = run(*asked, "--json-schema", schema).json
    assert (answer["text"], answer["finish_reason"]) == ("45678", "stop")
    refused = ["generate", bundle, "--prompt", "3", "--json-schema", schema]
    run(*refused, "--ignore-eos").fails(2, "--json-schema", "does not go with --ignore-eos")
    run(*refused, "--regex", "a").fails(2, "give --json-schema or --regex, not both")
    run("generate", bundle, "--regex", "a", "--chat").fails(2, "--regex", "does not go with --chat")
    schema.write_text("[]")
    run(*refused).fails(2, "schema.json", "must hold a JSON object, not list")
    schema.write_text('{"type": "strin"}')
    run(*refused).fails(2, "grammar", "Invalid type: strin")


def test_stop_strings_cut_the_text(run: Run, bundle: Path) -> None:
    stops = ["--stop", "no", "--stop", "56"]
    answer = run("generate", bundle, "--prompt", "1", *stops, "--json").json
    assert (answer["text"], answer["finish_reason"]) == ("234", "stop")
    assert answer["token_ids"] == [token(char) for char in "23456"]
    assert run("generate", bundle, "--prompt", "1", *stops).out == "234\n"
    special = ["generate", bundle, "--prompt", "x", "--ignore-eos", "--stop", "<end>"]
    answer = run(*special, "--json").json
    assert (answer["text"], answer["output_tokens"], answer["finish_reason"]) == ("yz", 3, "stop")


def test_text_on_stdout_statistics_on_stderr(run: Run, bundle: Path) -> None:
    always = ("--block-schedule", "none")  # a busy machine may decide for no drafts
    outcome = run.well("generate", bundle, "--prompt", "cab", "--max-tokens", 9, *always)
    assert outcome.out == "ababababa\n"
    lines = outcome.err.splitlines()
    assert lines[0] == "9 tokens from 3 of prompt, 4 steps, ended by length"
    assert lines[1].startswith("acceptance length 2.00 (14% of 28 drafts); tokens per step 1:0 2:4")
    assert lines[2].startswith("time to first token ")
    assert "\x1b" not in outcome.out


def test_view_colours_drafts_and_bonus(run: Run, bundle: Path) -> None:
    outcome = run("generate", bundle, "--prompt", "cab", "--max-tokens", 5, "--view")
    drafted, bonus = f"{GREEN}b{RESET}", f"{YELLOW}a{RESET}"
    assert outcome.out == bonus + (drafted + bonus) * 2 + "\n"


def test_many_prompts_come_in_order(run: Run, bundle: Path, tmp_path: Path) -> None:
    texts = ["x", "cab", "9", "x", "zq", "3"]  # more than max_batch; some end early
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text, "id": 1}) for text in texts) + "\n\n")
    wanted = ["yz", "ababa", "01234", "yz", "qqqqq", "45678"]
    common = ["generate", bundle, "--prompt-file", file, "--max-tokens", 5]
    answer = run(*common, "--json").json
    assert [one["text"] for one in answer["requests"]] == wanted
    assert all(one.keys() >= JSON_KEYS for one in answer["requests"])
    assert answer["total"]["requests"] == 6
    assert answer["total"]["output_tokens"] == 3 + 5 + 5 + 3 + 5 + 5
    shown = "\n".join(f"--- prompt {n}\n{text}" for n, text in enumerate(wanted, start=1))
    assert run(*common).out == shown + "\n"


class _Recorder(io.StringIO):
    """stdout that remembers how much was written at every flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_text_streams(run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, seen_at_step = _Recorder(), []
    real = Generator.step

    def step(self: Generator) -> Any:
        seen_at_step.append(recorder.seen[-1] if recorder.seen else "")
        return real(self)

    monkeypatch.setattr(Generator, "step", step)
    monkeypatch.setattr(sys, "stdout", recorder)
    run("generate", bundle, "--prompt", "cab", "--max-tokens", 7, "--block-schedule", "none")
    # Before each step, all that the steps before it made is flushed to the reader.
    assert seen_at_step == ["", "a", "aba", "ababa"]


def test_a_reader_may_leave(bundle: Path) -> None:
    script = "import sys; from dflash_trt.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["generate", str(bundle), "--prompt", "cab", "--max-tokens", "50"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # before the first token
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(PATIENCE_S) == 0
    assert errors == ""


def test_chat_template(run: Run, own_pair: Path, build: Build) -> None:
    write_tokenizer(
        own_pair.parent / "target",
        "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt and tools is none %}\n!\n9{% endif %}",
    )
    build.well(own_pair)
    common = ["generate", build.folder, "--prompt", " cab", "--max-tokens", 3, "--json"]
    chat = run(*common).json
    assert chat["text"] == "012"
    # "<user>" + "cab" + one special token + "!\n9": the newline after a block belongs to it,
    # and the template's special tokens are tokens.
    assert chat["prompt_tokens"] == 6 + 3 + 1 + 3
    raw = run(*common, "--raw").json
    assert (raw["text"], raw["prompt_tokens"]) == ("aba", 4)


def test_a_server_says_so_too(
    run: Run,
    slow_drafts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By its counters, once."""
    run.well("package", slow_drafts, "-o", tmp_path / "repository")
    counted = {"verify_steps": 50, "drafted_steps": 40, "step_tokens": 50, "draft_tokens": 280}
    lines = [f'dflash_{one}_total{{model="x"}} {value}\n' for one, value in counted.items()]
    told = iter([b"", "".join(lines).encode()])
    monkeypatch.setattr(serve, "_ADVISE_S", 0.0)
    server = Mock(read_metrics=lambda: next(told))
    asyncio.run(serve._advise(Mock(server=server), tmp_path / "repository"))
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: acceptance length 1.00 stays below break-even 1.70: `--drafter ")


def test_drafts_that_cost_more_than_they_bring(run: Run, slow_drafts: Path) -> None:
    useless, good = ("--prompt", "9"), ("--prompt", "b")
    for options in ([], ["--block-schedule", 8], ["--json"]):
        answer = run.well("generate", slow_drafts, *useless, "--max-tokens", 64, *options)
        (note,) = [line for line in answer.err.splitlines() if "break-even" in line]
        # The schedule goes on with smaller blocks, which cost less.
        cost = "1.6" if "--block-schedule" in options else "1."
        assert note.startswith(f"note: acceptance length 1.00 stays below break-even {cost}")
        assert note.endswith(f"faster, `dflash-trt diagnose {slow_drafts} --prompts FILE` says why")
        answer = run.well("generate", slow_drafts, *good, "--max-tokens", 128, *options)
        assert "break-even" not in answer.err
    answer = run.well("generate", slow_drafts, *useless, "--max-tokens", 64, "--drafter", "none")
    assert "break-even" not in answer.err


FORM = HarmonyFormat.find(make_harmony())
assert FORM is not None
REASONING = "Simple: 2 + 2, é 🙂."


def _open() -> TokenReader:
    assert FORM is not None
    return open_answer(FORM, ("= ",), "")


def test_reasoning_stands_before_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    writer = TextWriter(view=False, quiet=False, count=1, channels=[_open])
    ids = encode(ANALYSIS + FINAL)
    for index, token_id in enumerate(ids):
        event = TokenEvent(
            request_id=0,
            token_ids=(token_id,),
            accepted_tokens=0,
            text="x",
            pieces=("x",),
            finish_reason="stop" if index == len(ids) - 1 else None,
        )
        writer.take(0, event)
    assert capsys.readouterr().out == f"{REASONING}\n\n2 + 2 "


CODES = "a\x1b]0;b\x07\x9bc\t\n\u200dé\x7f"


def test_no_token_tells_a_terminal_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a text is as it was said."""
    event = TokenEvent(
        request_id=0,
        token_ids=(1,),
        accepted_tokens=0,
        text=CODES,
        pieces=(CODES,),
        finish_reason="stop",
    )
    assert showable(CODES) == CODES
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert showable("good\rbad\r\n") == "good\\rbad\r\n"
    shown = "a\\x1b]0;b\\x07\\x9bc\t\n\u200dé\\x7f"
    assert showable(CODES) == shown
    for view, expected in ((False, shown), (True, click.style(shown, fg=OWN))):
        TextWriter(view=view, quiet=False, count=1).take(0, event)
        assert capsys.readouterr().out == expected
