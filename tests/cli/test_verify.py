"""`verify`: passes on the truth, and says where a doctored executor departs from it.

Comparing is tested in tests/lossless/test_verification.py; options are refused in tests/frozen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import SpeculationOutput, StepCall
from dflash_trt.backends.registry import open_executor
from tests.cli.bigram import token
from tests.cli.conftest import Build, Run

Change = Callable[[int, SpeculationOutput], None]
Doctor = Callable[[Change], None]
SHORT = ["--prompt", "cab", "--max-tokens", 4, "--repeats", 0]


class _Doctored:
    """An executor whose speculative calls `change` their outputs, given the call's number."""

    def __init__(self, executor: Any, change: Change) -> None:
        self._executor, self._change = executor, change
        self._calls = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def speculate(self, call: StepCall) -> SpeculationOutput:
        output: SpeculationOutput = self._executor.speculate(call)
        number = next(self._calls)
        if output.logits is not None:
            self._change(number, output)
        return output


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    def patch(change: Change) -> None:
        monkeypatch.setattr(
            "dflash_trt.pair.open_executor",
            lambda *arguments, **options: _Doctored(open_executor(*arguments, **options), change),
        )

    return patch


def test_identical(run: Run, bundle: Path) -> None:
    outcome = run.well("verify", bundle, "--max-tokens", 12, "--repeats", 2)
    lines = outcome.out.splitlines()
    # Without prompts, those that came with the pair: "cab" and "129".
    assert lines[0] == "2 prompts against target_only, batch 1:"
    assert [line.split(": ")[0].split() for line in lines[1:4]] == [
        ["target_only,", "batch", "4", "identical"],
        ["DFlash", "block", "8,", "batch", "1", "identical"],
        ["DFlash", "block", "8,", "batch", "4", "identical"],
    ]
    # 24 tokens of 300 logits; "cab" takes 6 steps for 11 tokens, "129" takes 11.
    assert lines[2].endswith(f"24 tokens, 7,200 logits; acceptance length {22 / 17:.2f}")
    assert lines[4].startswith("speed at batch 1, 2 interleaved runs, 1 CPU thread: target_only ")
    assert len(lines) == 5


def test_json(run: Run, bundle: Path) -> None:
    arguments = ["--prompt", "cab", "--max-tokens", 5, "--block-size", "8,2", "--batch", "1,3"]
    outcome = run.well("verify", bundle, *arguments, "--repeats", 1, "--json")
    answer = outcome.json
    assert answer.keys() == {"lossless", "modes", "speed", "sets"}
    assert answer["lossless"] is True
    assert [mode["mode"] for mode in answer["modes"]] == [
        "target_only, batch 3",
        "DFlash block 2, batch 1",
        "DFlash block 2, batch 3",
        "DFlash block 8, batch 1",
        "DFlash block 8, batch 3",
    ]
    for mode in answer["modes"]:
        assert mode["identical"] is True and mode["difference"] is None
        assert (mode["tokens"], mode["logits"]) == (5, 1500)
    assert answer["modes"][3]["statistics"]["acceptance_length"] == 2.0
    speed = answer["speed"]
    assert len(speed["target_only_tokens_per_second"]) == 1
    assert len(speed["dflash_tokens_per_second"]) == 1
    ratio = speed["dflash_tokens_per_second"][0] / speed["target_only_tokens_per_second"][0]
    assert speed["speedup"] == pytest.approx(ratio)


@pytest.fixture
def sets(tmp_path: Path) -> list[str]:
    """Options of two sets, whose answers are "abab…" and "0123…"."""
    (tmp_path / "letters.jsonl").write_text('{"prompt": "b"}\n{"prompt": "xb"}\n')
    (tmp_path / "d.jsonl").write_text('{"prompt": "9", "answer": "0123"}\n')
    return [f"--prompts={tmp_path}/letters.jsonl", f"--prompts=digits={tmp_path}/d.jsonl"]


def test_figures_by_set(run: Run, bundle: Path, sets: list[str]) -> None:
    outcome = run.well("verify", bundle, *sets, "--max-tokens", 7, "--repeats", 2)
    head, titles, *rows = outcome.out.splitlines()[5:]
    assert head.startswith("by set of prompts, DFlash block 8, batch 1 (τ = ")
    assert titles.split() == ["set", *"prompts output tokens steps τ".split()] + [
        *"target_only DFlash speed-up".split()
    ]
    # "abab…" takes two tokens a step, "0123…" one.
    assert [row.split()[:5] for row in rows] == [
        ["letters", "2", "14", "6", "2.00"],
        ["digits", "1", "7", "6", "1.00"],
        ["all", "3", "21", "12", "1.50"],
    ]
    assert len({len(line) for line in [titles, *rows]}) == 1, "columns are aligned"
    for row in rows:
        assert all(float(cell.replace(",", "")) > 0 for cell in row.split()[5:])


def test_answers_that_loop_are_not_in_the_figures(run: Run, bundle: Path, sets: list[str]) -> None:
    options = ["--max-tokens", 24, "--repeats", 1, "--batch", 1]
    outcome = run.well("verify", bundle, *sets, *options)
    *_, letters, digits, everything, note = outcome.out.splitlines()
    assert letters.split()[1:] == ["0", "0", "0", "–", "–", "–", "–"]
    # Ten digits in turn: of eight in a row none comes three times in 24.
    assert digits.split()[1:5] == ["1", "24", "23", "1.00"]
    assert everything.split()[1:5] == ["1", "24", "23", "1.00"]
    assert note.startswith("looping: 2 answers of letters, τ 1.92, not in the figures (")
    sets_json = run.well("verify", bundle, *sets, *options, "--json").json["sets"]
    assert [one["name"] for one in sets_json] == ["letters", "digits", "all"]
    assert sets_json[0]["looping"] == {"answers": 2, "acceptance_length": pytest.approx(46 / 24)}
    assert sets_json[0]["acceptance_length"] is sets_json[0]["speedup"] is None
    assert sets_json[1]["looping"] == {"answers": 0, "acceptance_length": None}
    for one in sets_json[1:]:
        rates = one["dflash_tokens_per_second"], one["target_only_tokens_per_second"]
        assert one["speedup"] == pytest.approx(rates[0] / rates[1])


def test_low_acceptance_points_to_diagnose(run: Run, bundle: Path, slow_drafts: Path) -> None:
    untimed = ["--max-tokens", 48, "--batch", 1, "--repeats", 0]
    assert "break-even" not in run.well("verify", bundle, "--prompt", "9", *untimed).err
    known = run.well("verify", slow_drafts, "--prompt", "9", *untimed, "--json")
    (note,) = [line for line in known.err.splitlines() if "break-even" in line]
    assert note.startswith("note: acceptance length 1.00 stays below break-even 1.70")
    assert note.endswith(f"faster, `dflash-trt diagnose {slow_drafts} --prompts FILE` says why")
    assert "break-even" not in run.well("verify", slow_drafts, "--prompt", "b", *untimed).err


def test_one_wrong_bit(run: Run, bundle: Path, doctor: Doctor) -> None:
    def flip(number: int, output: SpeculationOutput) -> None:
        if number == 1 and output.logits is not None:
            output.logits.view(np.uint32)[0, 1, 17] ^= np.uint32(1 << 31)

    # "cab" → a | ba | ba | ba: row 1 of the second step is the logits of output token 4.
    doctor(flip)
    arguments = ["--prompt", "cab", "--max-tokens", 7, "--batch", 1, "--repeats", 0]
    outcome = run("verify", bundle, *arguments)
    assert outcome.code == 1
    assert "DFlash block 8, batch 1      DIFFERENT: 7 tokens" in outcome.out
    last = outcome.out.splitlines()[-1]
    assert last.startswith(
        "first difference, DFlash block 8, batch 1: prompt 0, output token 4: logit 17 is "
    )
    a = token("a")
    assert last.endswith(f"(tokens {a} and {a})")
    outcome = run("verify", bundle, *arguments, "--json")
    assert outcome.code == 1
    assert outcome.json["lossless"] is False
    difference = outcome.json["modes"][0]["difference"]
    assert (difference["prompt"], difference["position"]) == (0, 4)
    assert difference["vocabulary_id"] == 17
    assert difference["actual_logit"] == -difference["expected_logit"]
    assert difference["expected_token"] == difference["actual_token"] == a


def test_a_wrong_token_with_right_logits(run: Run, bundle: Path, doctor: Doctor) -> None:
    def choose(number: int, output: SpeculationOutput) -> None:
        if number == 0:
            output.choice_ids[0, 0] = token("!")

    doctor(choose)
    outcome = run("verify", bundle, *SHORT, "--batch", 1)
    assert outcome.code == 1
    assert outcome.out.splitlines()[-1] == (
        "first difference, DFlash block 8, batch 1: prompt 0, output token 1: "
        f"token {token('!')}, the baseline has {token('b')}"
    )


def test_no_prompts_anywhere(run: Run, build: Build, own_pair: Path) -> None:
    lines = own_pair.read_text().splitlines()
    own_pair.write_text("\n".join(line for line in lines if not line.startswith("prompts")))
    build.well(own_pair)
    run("verify", build.folder).fails(2, "no prompt", "--prompts FILE")
