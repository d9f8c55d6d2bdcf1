"""`train-draft` from prompts to a proven pair, and on again after it was interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from demo_pair.recipe.corpus import TRAIN_STREAM, documents
from demo_pair.recipe.tokenizer import END_ID
from dflash_trt.api import Checkpoints, build
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.decoding.replay import Replay
from dflash_trt.models.build_config import data_folder
from dflash_trt.models.dflash2 import Dflash2Sizes
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.target import read_target
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.features import MOST_DIFFERENT, Teacher, difference
from dflash_trt.training.trainer import Trainer
from tests.frozen.command_line import run, run_well
from tests.reference.checkpoints import write_target
from tests.reference.mtp import grow_with_mtp, write_mtp
from tests.training.prompts import STEPS, TARGET, command, contents, write_prompts, write_rows

pytestmark = pytest.mark.exhaustive

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


def test_the_plan_comes_first(trained: Trained) -> None:
    _, plan, _ = trained
    threads, first, answers, training, *_ = plan.splitlines()
    assert "CPU thread" in threads and first == "plan for 0.1 h:"
    assert answers == "  answers and features: 8 of 18 prompts, and 6 held out"
    assert training == "  training: 8 steps, 4.0 epochs, measured every 2 steps"
    assert "mask token: 1" in plan


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

    assert run_well("generate", folder / "draft-bundle", "--max-tokens", 8, "--prompt", "shift").out
    # Answers are kept, and nothing that is large.
    left = {path.name.partition("-")[0] for path in (folder / ".draft.work").iterdir()}
    assert left == {"answers", "lock"}


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


@contextmanager
def _interrupted_at_step(step: int, of: int = STEPS) -> Iterator[None]:
    """Ctrl-C in the training itself; the probe's steps pass."""
    update = Trainer._update

    def interrupt(self: Trainer, *given: object) -> None:
        if self.settings.steps == of and self.step == step:
            raise KeyboardInterrupt
        update(self, *given)  # type: ignore[arg-type]

    with mock.patch.object(Trainer, "_update", interrupt):
        yield


def test_a_minute_is_measured_where_nothing_is_given(trained: Trained, tmp_path: Path) -> None:
    folder, _, _ = trained
    words = command(folder / "shifts.jsonl", tmp_path / "draft", "--plan", "--json", steps=None)
    first, second = run_well(*words).json["plan"], run_well(*words).json["plan"]
    assert first["rates"]["answer_s"] > 0 and first["rates"]["step_s"] > 0
    assert 0 < first["rows"] <= 18 and first["steps"] >= 20
    assert first == second  # and kept


def test_answers_of_somebody_else_are_doubted(tmp_path: Path) -> None:
    """Their features are on no disk."""
    rows = [
        {"prompt": f"shift #{4000 + i} to", "answer": "nobody would ever say this here"}
        for i in range(24)
    ]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    words = command(prompts, tmp_path / "draft", "--given-answers", "--set", "online=1", "--json")
    (warning,) = run_well(*words).json["warnings"]
    assert "% of the answers' tokens are the target's own choice" in warning
    record = json.loads((tmp_path / "draft" / "training.json").read_text())
    assert record["answers"] == "given with the prompts"
    assert not (tmp_path / ".draft.work").exists()  # nothing was asked that is worth keeping


def test_a_dspark_draft_is_trained_and_goes_on(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "shifts.jsonl", 24)
    more = ("--kind", "dspark", "--set", "markov-rank=48", "--json")
    told = run_well(*command(prompts, tmp_path / "draft", *more)).json
    assert told["proof"]["tokens"] > 0 and len(told["best"]["conditional_acceptance"]) == 7
    spec = read_draft(tmp_path / "draft")
    check_pair(read_target(TARGET), spec)  # its copies are the target's matrices
    assert (spec.kind, spec.block_size, spec.markov_rank) == ("DSpark", 8, 48)
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "A DSpark draft (arXiv 2607.05147)" in card and "DeepSpec's layout" in card
    words = command(prompts, tmp_path / "further", "--from", tmp_path / "draft")
    assert "is fixed by the draft" in run(*words, "--kind", "dspark").err
    further = run_well(*words, "--json").json
    # What it begins with is what the other ended with, on the same held-out prompts.
    first = further["evaluations"][0]
    assert first["step"] == 0 and first["loss"] is None
    assert first["acceptance_length"] == told["best"]["acceptance_length"]
    assert read_draft(tmp_path / "further").kind == "DSpark"


def test_a_dflash2_draft_is_trained_and_goes_on(tmp_path: Path) -> None:
    """Cut, on again to the same bytes, and continued: what the walk accepts is what is measured."""
    prompts = write_prompts(tmp_path / "shifts.jsonl", 24)
    more = ("--kind", "dflash2", "--set", "selector-top-k=4", "--set", "draft-tokens=200")
    words = command(prompts, tmp_path / "draft", *more)
    told = run_well(*words, "--json").json
    best = told["best"]
    assert told["proof"]["tokens"] > 0 and 0 < best["candidate_recall"][0] < 1
    product = best["candidate_recall"][0] * best["selector_accuracy"][0]
    assert product == pytest.approx(best["conditional_acceptance"][0])
    assert best["recall_at_16"] == best["candidate_recall"], "no more than 4 can be chosen"
    spec = read_draft(tmp_path / "draft")
    assert check_pair(read_target(TARGET), spec).draft.dflash2 == Dflash2Sizes(16, 64, 4)
    assert 0 < len(spec.token_ids or ()) <= 200
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "A DFlash 2 draft" in card and '"num_speculative_tokens": 7}' in card
    again = command(prompts, tmp_path / "again", *more)
    with _interrupted_at_step(5):
        assert run(*again).code == 130
    assert "among the candidates" in run_well(*again).out
    for name in ("model.safetensors", "config.json", "epochs.jsonl"):
        assert contents(tmp_path / "again")[name] == contents(tmp_path / "draft")[name]
    further = command(prompts, tmp_path / "further", "--from", tmp_path / "draft", "--json")
    first = run_well(*further, "--set", "draft-tokens=200").json["evaluations"][0]
    assert first["step"] == 0 and first["acceptance_length"] == best["acceptance_length"]
    assert read_draft(tmp_path / "further").kind == "DFlash 2"


def test_a_dflash_draft_goes_on_as_dflash2(trained: Trained, tmp_path: Path) -> None:
    folder, _, out = trained
    start = ("--from", folder / "draft", "--kind", "dflash2")
    words = command(folder / "shifts.jsonl", tmp_path / "draft", *start)
    assert "--set taps: is fixed by" in run(*words, "--set", "taps=1,2").err
    first = run_well(*words, "--set", "selector-rank=16", "--json").json["evaluations"][0]
    assert first["acceptance_length"] == json.loads(out)["best"]["acceptance_length"]
    assert read_draft(tmp_path / "draft").dflash2 == Dflash2Sizes(16, 16, 16)


def test_an_eagle3_head_is_trained_for_a_quantised_target(tmp_path: Path) -> None:
    """For the target as it is served: its features come from the graphs of the bundle."""
    calibration = data_folder("demo_pair") / "prompts.jsonl"
    words = ["--precision", "fp8", "--calibration", calibration, "-o", tmp_path / "fp8"]
    run_well("quantize", "--checkpoint", TARGET, *words)
    bundle = tmp_path / "bundle"
    run_well("build", "--target", "demo", "--target-checkpoint", tmp_path / "fp8", "-o", bundle)
    prompts = write_prompts(tmp_path / "shifts.jsonl", 24)
    words = command(prompts, tmp_path / "draft", "--target", bundle, "--kind", "eagle3")
    told = run_well(*words, "--set", "draft-tokens=300", "--json").json
    assert told["proof"]["tokens"] > 0 and len(told["best"]["conditional_acceptance"]) == 7
    assert "linears in FP8" in run_well("inspect", tmp_path / "draft-bundle").out
    spec = read_draft(tmp_path / "draft")
    assert spec.kind == "EAGLE-3" and 0 < len(spec.token_ids or ()) <= 300
    assert check_pair(read_target(TARGET), spec).draft.target_layer_ids == (1, 15, 28)
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "A EAGLE-3 draft" not in card and "(arXiv 2503.01840)" in card
    refused = run(*command(prompts, tmp_path / "no"), "--from", tmp_path / "draft")
    assert "training does not know" in refused.err


def test_transformers_features_are_the_graphs_and_another_taps_are_not(tmp_path: Path) -> None:
    taps = (1, 8, 15, 22, 29)
    ids = list(range(2, 130))
    bundle = build("demo", tmp_path / "bundle", checkpoints=Checkpoints())
    teacher = Teacher(TARGET, taps, "cpu")
    with Replay(bundle) as replay:
        features = teacher.features(ids)
        assert features.shape == (128, 6 * 64) and features.dtype == np.float32
        assert difference(teacher, replay.features, ids) <= MOST_DIFFERENT
        shifted = Teacher(TARGET, tuple(tap + 1 for tap in taps), "cpu")
        assert difference(shifted, replay.features, ids) > 3 * MOST_DIFFERENT


GROWN = {"num_layers": 4, "vocab": 464, "heads": 2, "kv_heads": 1, "head_dim": 32, "tie": True}
GROWN |= {"linear": (2, 2, 32), "intermediate": 192, "logit_gain": 1.0, "eos_token_id": END_ID}


def test_an_mtp_layer_goes_on_beside_a_dflash_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a Qwen3.5 that was trained with it, in a model that sees and bfloat16 as published."""
    target, usual = tmp_path / "target", ("--target", tmp_path / "target", "--threads", 1)
    write_target(target, "qwen3_5", "bfloat16", vision=True, **GROWN)
    shutil.copy(TARGET / "tokenizer.json", target)
    encode = BundleTokenizer(TARGET).encode
    texts = [torch.tensor([*encode(text), END_ID]) for text in documents(0, TRAIN_STREAM, 200)]
    grow_with_mtp(write_mtp(target), torch.cat(texts), 150)
    prompts = write_prompts(tmp_path / "shifts.jsonl", 24)
    words = command(prompts, tmp_path / "mtp", *usual, "--kind", "mtp", steps=12)
    with _interrupted_at_step(5, of=12):
        assert run(*words).code == 130
    told = run_well(*words, "--json").json
    first, second, *_, last = told["evaluations"]
    assert (first["step"], first["loss"]) == (0, None) and last["loss"] < second["loss"]
    assert told["best"]["acceptance_length"] > first["acceptance_length"] > 1.5
    more = ("--set", "rows=18", "--set", "answer-tokens=64")
    run_well(*command(prompts, tmp_path / "dflash", *usual, *more, steps=100))
    tau: dict[str, list[float]] = {"mtp": [], "dflash": []}
    for kind, temperature in product(tau, (0, 0.7)):
        words = ["verify", str(tmp_path / f"{kind}-bundle"), "--max-tokens", "64", "--repeats", "0"]
        modes = run_well(*words, "--temperature", temperature, "--json").json["modes"]
        assert [mode["identical"] for mode in modes] == [True] * 3
        tau[kind].append(round(modes[1]["statistics"]["acceptance_length"], 2))
    with capsys.disabled():
        print(f"\nacceptance lengths, greedy and at 0.7: {tau}")
    assert tau["mtp"][0] > 1.5

    with Replay(open_bundle(tmp_path / "mtp-bundle")) as replay:
        output = replay.features(range(2, 130))[:, -64:]
    apart = difference(Teacher(target, (), "cpu"), lambda _: output, range(2, 130))
    assert apart <= MOST_DIFFERENT
    words = command(prompts, tmp_path / "on", *usual, "--from", tmp_path / "mtp", steps=1)
    again = run_well(*words, "--json").json["evaluations"][0]
    assert again["acceptance_length"] == told["best"]["acceptance_length"]
    # Put back it is the target's own; without one another begins.
    file, trained = target / "model.safetensors", load_file(tmp_path / "mtp/model.safetensors")
    save_file((own := load_file(file)) | trained, file, metadata={"format": "pt"})
    run_well("build", *usual[:2], "--draft-checkpoint", "mtp", "-o", tmp_path / "own")
    save_file({name: own[name] for name in own.keys() - trained}, file, metadata={"format": "pt"})
    words = command(prompts, tmp_path / "new", *usual, "--kind", "mtp", steps=1)
    assert "has no MTP layer: one begins anew" in run_well(*words).err
