"""`generate`: known text, exact statistics, honest JSON, streaming, refusals."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import dflash_trt.pair as pair
from dflash_trt.runtime import Generator
from tests.cli.bigram import END, token
from tests.cli.conftest import Run
from tests.waiting import PATIENCE_S

# The keys that callers rely on; there may be more.
JSON_KEYS = {
    "text",
    "token_ids",
    "prompt_tokens",
    "output_tokens",
    "steps",
    "drafted_tokens",
    "accepted_tokens",
    "acceptance_length",
    "acceptance_histogram",
    "time_to_first_token_s",
    "time_per_output_token_s",
    "tokens_per_second",
    "finish_reason",
}
GREEN, YELLOW, RESET = "\x1b[32m", "\x1b[33m", "\x1b[0m"


def test_json_of_a_known_text(run: Run, bundle: Path) -> None:
    answer = run("generate", bundle, "--prompt", "cab", "--max-tokens", 9, "--json").json
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


@pytest.mark.parametrize("sampling", [[], ["--temperature", 6, "--top-p", 0.9, "--seed", 7]])
@pytest.mark.parametrize("block", [2, 5])
def test_no_speculation_gives_the_same_tokens(
    run: Run, bundle: Path, sampling: list[object], block: int
) -> None:
    common = ["generate", bundle, "--prompt", "cab", "--max-tokens", 40, "--json", *sampling]
    plain = run(*common, "--no-speculation").json
    speculative = run(*common, "--block-size", block).json
    assert plain["token_ids"] == speculative["token_ids"]
    assert plain["text"] == speculative["text"]
    assert plain["drafted_tokens"] == 0 and plain["steps"] == 39
    assert plain["acceptance_length"] is None
    assert speculative["drafted_tokens"] == speculative["steps"] * (block - 1) > 0


def test_no_speculation_opens_only_the_baseline_graph(
    run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    real = pair.open_executor

    def record(*arguments: Any, **options: Any) -> Any:
        executor = real(*arguments, **options)
        opened.append(executor)
        executor.close = lambda: None  # keeps its sessions for the assertion
        return executor

    monkeypatch.setattr(pair, "open_executor", record)
    assert run("generate", bundle, "--prompt", "a", "--no-speculation").code == 0
    assert set(opened[0]._sessions) == {"target_only"}  # type: ignore[attr-defined]


def test_sampling_depends_on_the_seed_alone(run: Run, bundle: Path) -> None:
    common = ["generate", bundle, "--prompt", "cab", "--max-tokens", 30, "--json"]
    common += ["--temperature", 6]
    first, again, other = (run(*common, "--seed", seed).json["token_ids"] for seed in (3, 3, 4))
    assert first == again != other
    assert run(*common, "--seed", 2**64 - 1).code == 0
    greedy = run(*common, "--top-k", 1).json["token_ids"]
    assert greedy == [token(char) for char in "ab" * 15]


def test_text_is_the_decode_of_the_ids(run: Run, bundle: Path) -> None:
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer" / "tokenizer.json"))
    arguments = ["--max-tokens", 50, "--temperature", 9, "--ignore-eos", "--json"]
    answer = run("generate", bundle, "--prompt", "cé", *arguments).json
    assert answer["output_tokens"] == 50
    assert answer["text"] == tokenizer.decode(answer["token_ids"])


def test_text_stops_at_the_end_token(run: Run, bundle: Path) -> None:
    answer = run("generate", bundle, "--prompt", "x", "--json").json
    assert (answer["text"], answer["finish_reason"]) == ("yz", "stop")
    assert answer["token_ids"] == [token("y"), token("z"), END]
    arguments = ["--max-tokens", 5, "--ignore-eos", "--json"]
    further = run("generate", bundle, "--prompt", "x", *arguments).json
    assert further["token_ids"] == [token("y"), token("z"), END, END, END]
    assert further["finish_reason"] == "length"


def test_stop_strings_cut_the_text(run: Run, bundle: Path) -> None:
    stops = ["--stop", "no", "--stop", "56"]
    answer = run("generate", bundle, "--prompt", "1", *stops, "--json").json
    assert (answer["text"], answer["finish_reason"]) == ("234", "stop")
    assert answer["token_ids"] == [token(char) for char in "23456"]
    assert run("generate", bundle, "--prompt", "1", *stops).out == "234\n"


def test_output_ends_with_the_context(run: Run, bundle: Path) -> None:
    answer = run("generate", bundle, "--prompt", "ab", "--max-tokens", 10**9, "--json").json
    assert (answer["output_tokens"], answer["finish_reason"]) == (62, "length")
    full = run("generate", bundle, "--prompt", "a" * 63, "--json").json
    assert (full["output_tokens"], full["text"]) == (1, "b")
    # One output token has no speed.
    assert full["tokens_per_second"] is None and full["time_per_output_token_s"] is None


def test_text_on_stdout_statistics_on_stderr(run: Run, bundle: Path) -> None:
    outcome = run("generate", bundle, "--prompt", "cab", "--max-tokens", 9)
    assert outcome.code == 0
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


def test_a_file_is_one_prompt(run: Run, bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"first line\nca\n\n")
    answer = run("generate", bundle, "--prompt-file", file, "--max-tokens", 2, "--json").json
    # One trailing newline is dropped, the other is the last token.
    assert answer["prompt_tokens"] == 14
    assert answer["text"] == "\n\n"


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
    run("generate", bundle, "--prompt", "cab", "--max-tokens", 7)
    # Before each step, all that the steps before it made is flushed to the reader.
    assert seen_at_step == ["", "a", "aba", "ababa"]


def test_characters_arrive_whole(run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _Recorder()
    monkeypatch.setattr(sys, "stdout", recorder)
    run("generate", bundle, "--prompt", "é", "--max-tokens", 6, "--no-speculation")
    assert recorder.getvalue() == "ééé\n"
    assert not any("�" in text for text in recorder.seen)


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


def test_chat_template(run: Run, with_template: Callable[[str], Path]) -> None:
    folder = with_template(
        "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt and tools is none %}\n!\n9{% endif %}"
    )
    common = ["generate", folder, "--prompt", " cab", "--max-tokens", 3, "--json"]
    chat = run(*common).json
    assert chat["text"] == "012"
    # "<user>" + "cab" + one special token + "!\n9": the newline after a block belongs to it,
    # and the template's special tokens are tokens.
    assert chat["prompt_tokens"] == 6 + 3 + 1 + 3
    raw = run(*common, "--raw").json
    assert (raw["text"], raw["prompt_tokens"]) == ("aba", 4)


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        ([], ["no prompt", "--prompt TEXT"]),
        (["--prompt", ""], ["--prompt", "empty"]),
        (["--prompt", "a", "--prompt-file", "f"], ["not both"]),
        (["--prompt", "a" * 64], ["64 tokens do not fit", "context of 64", "--max-seq-len"]),
        (["--prompt", "\udcff"], ["--prompt", "not Unicode"]),
        (["--prompt", "a", "--temperature", "nan"], ["temperature", "nan"]),
        (["--prompt", "a", "--temperature", "-0.5"], ["temperature", "-0.5"]),
        (["--prompt", "a", "--temperature", "inf"], ["temperature", "inf"]),
        (["--prompt", "a", "--temperature", "warm"], ["--temperature", "warm"]),
        (["--prompt", "a", "--top-p", "0"], ["top_p", "above 0"]),
        (["--prompt", "a", "--top-p", "1.01"], ["top_p"]),
        (["--prompt", "a", "--top-p", "nan"], ["top_p"]),
        (["--prompt", "a", "--top-k", "0"], ["top_k"]),
        (["--prompt", "a", "--seed", "-1"], ["seed", "-1"]),
        (["--prompt", "a", "--seed", str(2**64)], ["seed", "2^64 - 1"]),
        (["--prompt", "a", "--seed", "1.5"], ["--seed", "1.5"]),
        (["--prompt", "a", "--max-tokens", "0"], ["--max-tokens"]),
        (["--prompt", "a", "--stop", ""], ["stop", "empty"]),
        (["--prompt", "a", "--block-size", "1"], ["--block-size"]),
        (["--prompt", "a", "--block-size", "9"], ["block_size", "9", "between 2 and 8"]),
        (["--prompt", "a", "--block-size", "4", "--no-speculation"], ["--no-speculation"]),
        (["--prompt", "a", "--view", "--json"], ["--view and --json"]),
        (["--prompt", "a", "--threads", "0"], ["--threads"]),
        (["--prompt", "a", "--threads", "100000"], ["--threads"]),
        (["--prompt", "a", "--frobnicate"], ["--frobnicate"]),
        (["--prompt", "a", "b"], ["unexpected"]),
    ],
)
def test_wrong_usage(run: Run, bundle: Path, arguments: list[str], pieces: list[str]) -> None:
    outcome = run("generate", bundle, *arguments)
    outcome.fails(2, *pieces)
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("name", "content", "pieces"),
    [
        ("none.txt", None, ["none.txt", "No such file"]),
        ("empty.txt", b"", ["empty.txt", "no prompt"]),
        ("newline.txt", b"\n", ["newline.txt", "empty"]),
        ("binary.txt", b"ok\xff\xfe\x00", ["binary.txt", "not UTF-8 at byte 2"]),
        ("empty.jsonl", b"\n\n", ["empty.jsonl", "no prompt"]),
        ("broken.jsonl", b'{"prompt": "a"}\n{"prompt": \n', ["broken.jsonl:2", "not valid JSON"]),
        ("list.jsonl", b'["a"]\n', ["list.jsonl:1", '"prompt"']),
        ("key.jsonl", b'{"prompt": "a"}\n\n{"text": "a"}\n', ["key.jsonl:3", '"prompt"']),
        ("number.jsonl", b'{"prompt": 3}\n', ["number.jsonl:1", '"prompt"']),
        ("blank.jsonl", b'{"prompt": "a"}\n{"prompt": ""}\n', ["blank.jsonl, prompt 2", "empty"]),
        ("surrogate.jsonl", b'{"prompt": "a\\ud800"}\n', ["prompt 1", "character 1"]),
        ("deep.jsonl", b"[" * 100_000, ["deep.jsonl:1", "nested"]),
        ("binary.jsonl", b"\x80\x04K\x01.", ["binary.jsonl", "not UTF-8"]),
    ],
)
def test_prompt_files_that_cannot_be_used(
    run: Run, bundle: Path, tmp_path: Path, name: str, content: bytes | None, pieces: list[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    error = run("generate", bundle, "--prompt-file", tmp_path / name).fails(2, *pieces)
    assert "download" not in error


def test_a_folder_is_no_prompt_file(run: Run, bundle: Path, tmp_path: Path) -> None:
    run("generate", bundle, "--prompt-file", tmp_path).fails(2, "is a directory")


def test_not_a_bundle(run: Run, tmp_path: Path) -> None:
    run("generate", tmp_path, "--prompt", "a").fails(2, str(tmp_path), "not a bundle")
    run("generate", tmp_path / "none", "--prompt", "a").fails(2, "none", "not a bundle")
    (tmp_path / "file").touch()
    run("generate", tmp_path / "file", "--prompt", "a").fails(2, "is a file")


def test_a_damaged_graph(run: Run, bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    graph = copy / "draft.onnx"
    graph.write_bytes(b"\0" * graph.stat().st_size)
    run("generate", copy, "--prompt", "a").fails(1, "draft.onnx", "inspect --verify")


def test_a_bundle_without_a_tokenizer(run: Run, own_pair: Path, tmp_path: Path) -> None:
    (own_pair.parent / "target" / "tokenizer.json").unlink()
    built = run("build", "--target", own_pair, "-o", tmp_path / "b")
    assert built.code == 0 and "no tokenizer.json" in built.err
    run("generate", tmp_path / "b", "--prompt", "a").fails(1, "no tokenizer", "build again")


def test_a_tokenizer_that_cannot_be_read(run: Run, own_pair: Path, tmp_path: Path) -> None:
    assert run("build", "--target", own_pair, "-o", tmp_path / "b").code == 0
    path = tmp_path / "b" / "tokenizer" / "tokenizer.json"
    path.write_text("{}".ljust(path.stat().st_size))
    run("generate", tmp_path / "b", "--prompt", "a").fails(1, "tokenizer.json", "not a readable")
