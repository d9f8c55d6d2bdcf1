"""`train-draft` from prompts to a proven pair, and on again after it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.config import data_folder
from dflash_trt.training.trainer import Trainer
from tests.frozen.command_line import run, run_well
from tests.training.prompts import STEPS, TARGET, command, contents, write_prompts, write_rows

Trained = tuple[Path, str, str]
"""A folder with prompts and a draft that was trained without a break; its plan and its figures."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    prompts = write_prompts(folder / "shifts.jsonl", 24)
    words = command(prompts, folder / "draft")
    plan = run_well(*words, "--plan").out
    assert not (folder / "draft").exists()
    return folder, plan, run_well(*words, "--json").out


@pytest.mark.exhaustive
def test_the_plan_comes_first(trained: Trained) -> None:
    _, plan, _ = trained
    threads, first, *_ = plan.splitlines()
    assert "CPU thread" in threads and first.startswith("plan for 0.1 h: ")
    for stage in ("answers", "features", "training", "replay", "build and proof"):
        assert f"  {stage} " in plan
    assert "mask_token_id: <|mask|>" in plan


@pytest.mark.exhaustive
def test_a_draft_is_trained_measured_built_and_proven(trained: Trained) -> None:
    folder, _, out = trained
    told = json.loads(out)
    assert told["plan"]["rows"] == 8 and told["plan"]["held_out"] == 6
    assert [one["step"] for one in told["evaluations"]] == [2, 4, 6, 8]
    assert told["proof"]["tokens"] > 0 and 1 <= told["best"]["acceptance_length"] <= 8
    assert len(told["best"]["conditional_acceptance"]) == 7
    assert told["evaluations"][-1]["loss"] < told["evaluations"][0]["loss"]

    draft = folder / "draft"
    spec = read_draft(draft)
    check_pair(read_target(TARGET), spec)
    assert spec.target_layer_ids == (1, 8, 15, 22, 29) and spec.mask_token_id == 1
    record = json.loads((draft / "training.json").read_text())
    assert record["rows"] == 8 and record["sets"] == {"shifts": 8}
    assert record["best"] == told["best"]
    lines = (draft / "epochs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == told["evaluations"]
    card = (draft / "README.md").read_text()
    assert record["hashes"]["prompts shifts"] in card and "| 7 |" in card
    assert f"{record['hours']:g} h were given, {record['machine']} |" in card
    page = (draft / "curves.html").read_text()
    assert "step 8 of 8, epoch 4.0; ended by the schedule&#39;s last step" in page
    assert "[curves.html](curves.html)" in card

    assert run_well("generate", folder / "draft-bundle", "--max-tokens", 8, "--prompt", "shift").out
    # Answers are kept, and nothing that is large.
    left = {path.name.partition("-")[0] for path in (folder / ".draft.work").iterdir()}
    assert left == {"render", "answers", "clock.json", "lock"}


@pytest.mark.exhaustive
def test_an_interrupted_training_goes_on_to_the_same_bytes(
    trained: Trained, tmp_path: Path
) -> None:
    folder, _, _ = trained
    words = command(folder / "shifts.jsonl", tmp_path / "draft")
    with _interrupted_at_step(5):
        outcome = run(*words)
    assert outcome.code == 130 and not (tmp_path / "draft").exists()
    assert list((tmp_path / ".draft.work").glob("train-*/drafts/*"))
    run_well(*words)
    assert contents(tmp_path / "draft") == contents(folder / "draft")


@pytest.mark.exhaustive
def test_a_draft_is_trained_on_from_where_it_is(trained: Trained, tmp_path: Path) -> None:
    folder, _, _ = trained
    start = folder / "draft"
    words = command(folder / "shifts.jsonl", tmp_path / "more", "--from", start, "--json")
    told = run_well(*words).json
    first = told["evaluations"][0]
    assert first["step"] == 0 and first["loss"] is None
    assert told["reasons"]["shape"] == f"that of {start}"
    # What it begins with is what the other ended with, on the same held-out prompts.
    ended = json.loads((start / "training.json").read_text())["best"]
    assert first["acceptance_length"] == ended["acceptance_length"]


@contextmanager
def _interrupted_at_step(step: int) -> Iterator[None]:
    """Ctrl-C in the training itself; the probe's steps pass."""
    update = Trainer._update

    def interrupt(self: Trainer, *given: object) -> None:
        if self.settings.steps == STEPS and self.step == step:
            raise KeyboardInterrupt
        update(self, *given)  # type: ignore[arg-type]

    with mock.patch.object(Trainer, "_update", interrupt):
        yield


@pytest.mark.exhaustive
def test_answers_of_somebody_else_are_doubted(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"shift #{4000 + i} to", "answer": "nobody would ever say this here"}
        for i in range(24)
    ]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    told = run_well(*command(prompts, tmp_path / "draft", "--given-answers", "--json")).json
    (warning,) = told["warnings"]
    assert "% of the answers' tokens are the target's own choice" in warning
    record = json.loads((tmp_path / "draft" / "training.json").read_text())
    assert record["answers"] == "given with the prompts"
    assert not (tmp_path / ".draft.work").exists()  # nothing was asked that is worth keeping


@pytest.mark.exhaustive
def test_a_quantised_target_is_trained_for_as_it_is_served(tmp_path: Path) -> None:
    quantised = tmp_path / "fp8"
    calibration = data_folder("demo_pair") / "prompts.jsonl"
    words = ["--precision", "fp8", "--calibration", calibration, "-o", quantised]
    run_well("quantize", "--checkpoint", TARGET, *words)
    bundle = tmp_path / "bundle"
    run_well("build", "--target", "demo", "--target-checkpoint", quantised, "-o", bundle)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 24)
    words = command(prompts, tmp_path / "draft", "--target", bundle)
    assert "linears in FP8" in run_well("inspect", bundle).out
    run_well(*words)
    assert "linears in FP8" in run_well("inspect", tmp_path / "draft-bundle").out


@pytest.mark.exhaustive
def test_features_that_are_computed_online_train_the_same_draft(
    trained: Trained, tmp_path: Path
) -> None:
    folder, _, _ = trained
    run_well(*command(folder / "shifts.jsonl", tmp_path / "draft", "--online"))
    weights = [path / "draft" / "model.safetensors" for path in (folder, tmp_path)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.exhaustive
def test_a_dspark_draft_is_trained_and_goes_on(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "shifts.jsonl", 24)
    told = json.loads(
        run_well(
            *command(prompts, tmp_path / "draft"),
            *("--kind", "dspark", "--markov-rank", "48", "--json"),
        ).out
    )
    assert told["proof"]["tokens"] > 0 and len(told["best"]["conditional_acceptance"]) == 7
    spec = read_draft(tmp_path / "draft")
    check_pair(read_target(TARGET), spec)  # its copies are the target's matrices
    assert (spec.kind, spec.block_size, spec.markov_rank) == ("DSpark", 8, 48)
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "A DSpark draft (arXiv 2607.05147)" in card and "DeepSpec's layout" in card
    shown = run_well(
        "verify", tmp_path / "draft-bundle", "--quick", "--prompts", f"a={prompts}"
    ).out
    assert "DSpark block 8, batch 1" in shown and "  DSpark  speed-up" in shown
    words = command(prompts, tmp_path / "further")
    start = ("--from", tmp_path / "draft")
    assert "is fixed by the draft" in run(*words, *start, "--kind", "dspark").err
    assert json.loads(run_well(*words, *start, "--json").out)["proof"]["tokens"] > 0
    assert read_draft(tmp_path / "further").kind == "DSpark"
    refused = run(*command(prompts, tmp_path / "no"), "--kind", "dspark", "--draft-tokens", "9")
    assert "a Markov head has all tokens" in refused.err


@pytest.mark.exhaustive
def test_an_eagle3_head_is_trained(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "shifts.jsonl", 24)
    words = [*command(prompts, tmp_path / "draft"), "--kind", "eagle3"]
    told = json.loads(run_well(*words, "--draft-tokens", "300", "--json").out)
    assert told["proof"]["tokens"] > 0 and len(told["best"]["conditional_acceptance"]) == 7
    spec = read_draft(tmp_path / "draft")
    pair = check_pair(read_target(TARGET), spec)
    assert spec.kind == "EAGLE-3" and 0 < len(spec.token_ids or ()) <= 300
    assert pair.draft.target_layer_ids == (1, 15, 28)
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "A EAGLE-3 draft" not in card and "(arXiv 2503.01840)" in card
    again = command(prompts, tmp_path / "no")
    assert "is one layer" in run(*again, "--kind", "eagle3", "--layers", "2").err
    assert "2 … 8, for a chain" in run(*again, "--kind", "eagle3", "--block-size", "9").err
    assert "training does not know" in run(*again, "--from", tmp_path / "draft").err
