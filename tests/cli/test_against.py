"""`verify --against`: acceptance against independent models, and its bounds.

The figures of a text are held to PyTorch in tests/proof/test_comparison.py.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from dflash_trt.cli.main import main
from tests.cli.bigram import token, write_tokenizer
from tests.cli.conftest import Run, write_config
from tests.reference.checkpoints import write_draft, write_target
from tests.reference.draft import ReferenceDraft
from tests.reference.generate import dflash_greedy, fit_draft, load_target

PROMPTS = ("cab", "the 129 zebras", "~")
MAX_TOKENS = 40
SIDES = [("twin", "twin"), ("twin", "bundle"), ("bundle", "twin"), ("bundle", "bundle")]


@dataclass(frozen=True)
class Twins:
    """Checkpoint folders by side, and a bundle of each."""

    checkpoints: dict[str, Path]
    bundle: Path
    twin: Path


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """A fitted pair, and the same with weights of four significant bits."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("twins")
    twin, rounded = root / "twin", root / "rounded"
    target = write_target(twin / "target", vocab=300, num_layers=5, max_positions=128)
    draft = write_draft(twin / "draft", target)
    write_tokenizer(target)
    # No end: the reference that answers are held to knows none.
    (target / "tokenizer_config.json").write_text("{}")
    prompts = [token_ids(text) for text in PROMPTS]
    fit_draft(draft, load_target(target), prompts, tokens=60, steps=100)
    lines = [json.dumps({"prompt": text}) for text in PROMPTS]
    (twin / "prompts.jsonl").write_text("\n".join(lines))
    write_config(twin, max_batch=2, max_seq_len=96, prompts="prompts.jsonl")
    shutil.copytree(twin, rounded)
    for part in ("target", "draft"):
        round_weights(rounded / part / "model.safetensors")
    for folder in (twin, rounded):
        output = str(folder / "bundle")
        assert main(["build", "--target", str(folder / "pair.yaml"), "-o", output]) == 0
    checkpoints = {"twin": twin, "bundle": rounded}
    return Twins(checkpoints, rounded / "bundle", twin / "bundle")


def round_weights(path: Path) -> None:
    """Every matrix to four significant bits."""
    tensors = {}
    for name, tensor in load_file(path).items():
        mantissa, exponent = np.frexp(tensor)
        rounded = np.ldexp(np.round(mantissa * 16) / 16, exponent).astype(np.float32)
        tensors[name] = rounded if tensor.ndim == 2 else tensor
    save_file(tensors, path)


@pytest.mark.exhaustive
def test_acceptance_is_that_of_independent_models(run: Run, twins: Twins) -> None:
    arguments = ["--against", twins.twin, "--max-tokens", MAX_TOKENS]
    answer = run.well("verify", twins.bundle, *arguments, "--json").json
    targets = {side: load_target(folder / "target") for side, folder in twins.checkpoints.items()}
    lengths, histograms = [], []
    for row, (target, draft) in zip(answer["acceptance"], SIDES, strict=True):
        assert (row["target"], row["draft"]) == (target, draft)
        folder = twins.checkpoints[draft] / "draft"
        drafter = ReferenceDraft.load(folder, targets[target])
        steps = tokens = 0
        for prompt in PROMPTS:
            ids = token_ids(prompt)
            generation = dflash_greedy(targets[target], drafter, ids, MAX_TOKENS)
            steps, tokens = steps + len(generation.steps), tokens + MAX_TOKENS - 1
        assert (row["statistics"]["steps"], row["tokens"]) == (steps, tokens), (target, draft)
        lengths.append(tokens / steps)
        histograms.append(row["statistics"]["acceptance_histogram"])
        assert row["statistics"]["acceptance_length"] == tokens / steps
        loss = 100 * (1 - lengths[-1] / lengths[0])
        assert row["loss_percent"] == pytest.approx(loss, abs=1e-9)
    assert len({str(histogram) for histogram in histograms}) >= 3, (
        "else the combinations could be mixed up"
    )


def token_ids(text: str) -> list[int]:
    return [token("Ġ" if char == " " else char) for char in text]


def test_the_table(run: Run, twins: Twins) -> None:
    common = ["--against", twins.twin, "--max-tokens", 12, "--temperature", 0.5]
    outcome = run.well("verify", twins.bundle, *common)
    lines = outcome.out.splitlines()
    assert lines[0] == "15 predicted tokens, bundle beside its twin:"
    assert [line.split()[0] for line in lines[1:4]] == ["same", "KL(twin", "perplexity"]
    assert lines[4] == "acceptance length over 3 prompts, greedy:"
    assert lines[5].split() == ["target", "draft", "length", "loss", "steps", "tokens"]
    assert [tuple(line.split()[:2]) for line in lines[6:10]] == SIDES
    assert all(line.split()[3].endswith("%") and line.endswith("    33") for line in lines[6:10])
    assert lines[10] == "acceptance length over 3 prompts, temperature 0.5:"
    assert len(lines) == 16


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_precisions_may_differ(run: Run, twins: Twins, tmp_path: Path, precision: str) -> None:
    pair, built = twins.checkpoints["bundle"] / "pair.yaml", tmp_path / "built"
    run.well("build", "--target", pair, "--precision", precision, "-o", built)
    outcome = run.well("verify", built, "--against", twins.bundle, "--max-tokens", 12, "--json")
    text = outcome.json["text"]
    assert text["tokens"] == 15 and 1e-9 < text["mean_kl"] < 0.05


def test_bounds(run: Run, twins: Twins) -> None:
    common = ["verify", twins.bundle, "--against", twins.twin]
    common += ["--max-tokens", MAX_TOKENS]
    figures = run(*common, "--json").json
    agreement = figures["text"]["agreement"]
    assert 0.5 < agreement < 1
    run.well(*common, "--fail-below-agreement", agreement)
    outcome = run(*common, "--fail-below-agreement", 0.9999)
    assert outcome.code == 1
    assert outcome.out.splitlines()[-1] == f"FAILED: agreement {agreement:.6f} is below 0.9999"
    loss = figures["acceptance"][3]["loss_percent"]
    assert loss > 0, "the draft got worse by rounding"
    run.well(*common, "--max-tau-loss", loss + 0.1)
    outcome = run(*common, "--max-tau-loss", loss - 0.01, "--json")
    assert outcome.code == 1
    assert outcome.json["failures"] == [
        f"the acceptance length is {loss:.2f} % below the twin's (greedy), more than "
        f"{loss - 0.01:g} %"
    ]


def test_bundles_that_are_no_twins(run: Run, twins: Twins, bundle: Path, tmp_path: Path) -> None:
    run("verify", twins.bundle, "--against", bundle).fails(
        2,
        str(twins.bundle),
        f"is not a twin of {bundle}",
        "target num_layers 5 versus 6, ",
        "and 4 more",
    )
    pair = twins.checkpoints["bundle"] / "pair.yaml"
    run.well("build", "--target", pair, "--block-size", 5, "-o", tmp_path / "five")
    run("verify", tmp_path / "five", "--against", twins.twin).fails(
        2, "block size limit 5 versus 8"
    )
    other = tmp_path / "other"
    shutil.copytree(twins.checkpoints["bundle"], other, ignore=shutil.ignore_patterns("bundle"))
    config = other / "draft" / "config.json"
    changed = json.loads(config.read_text())
    changed["dflash_config"]["mask_token_id"] = 7
    config.write_text(json.dumps(changed))
    tokenizer = other / "target" / "tokenizer.json"
    fields = json.loads(tokenizer.read_text())
    fields["added_tokens"][0]["content"] = "<fin>"
    tokenizer.write_text(json.dumps(fields))
    run.well("build", "--target", other / "pair.yaml", "-o", other / "bundle")
    run("verify", other / "bundle", "--against", twins.twin).fails(
        2, "draft mask_token_id 7 versus 299, the tokenizers differ;"
    )
