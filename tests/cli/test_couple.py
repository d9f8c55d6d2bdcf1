"""`couple`, and `build --coupling`: drafts that share the noise of sampled draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.sampling.coupling import LIKELIEST
from dflash_trt.speculation.coupling import Coupling
from tests.cli.conftest import Run, edit_manifest

PROMPTS = "".join(json.dumps({"prompt": text * 3}) + "\n" for text in "abcdefgh")


@pytest.fixture
def quick(tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    return ["--prompt-file", str(tmp_path / "prompts.jsonl"), "--max-tokens", "12"]


def coupling_file(folder: Path, drafts: int) -> Path:
    file = folder / "coupling.json"
    sharpness = [1.5] * (drafts - 1) + [LIKELIEST]
    file.write_text(json.dumps({"schema_version": 1, "pair": "x", "sharpness": sharpness}))
    return file


def test_what_does_not_gain_is_not_written(
    run: Run, bundle: Path, quick: list[str], tmp_path: Path
) -> None:
    """The pair's every second draft is right already, and no other can be."""
    output = tmp_path / "coupling.json"
    shown = run.well("couple", bundle, *quick, "--temperature", "0.05", "-o", output)
    assert "(+0.0 %; 8 answers)" in shown.out and "nothing written" in shown.out
    assert not output.exists()
    run("couple", bundle, *quick, "--limit-prompts", "7").fails(2, "7 answers", "give 8 prompts")


def test_a_bundle_of_coupled_drafts(run: Run, bigram_config: Path, tmp_path: Path) -> None:
    """It is built, shown and proven; and refused where the file or the engine does not fit."""
    file = coupling_file(tmp_path, 7)
    bundle = tmp_path / "bundle"
    run.well("build", "--target", bigram_config, "--coupling", file, "-o", bundle)
    shown = run.well("inspect", bundle, "--verify").out
    assert "sharing the noise of sampled draws: 1.5, 1.5, 1.5" in shown
    proof = run.well("verify", bundle, "--temperature", "1", "--max-tokens", "20").out
    assert proof.count("identical") == 3
    edit_manifest(bundle, lambda one: one["draft"].update(sharpness=[1.0, 1.0]))
    run("inspect", bundle).fails(1, "draft.sharpness is not one for each draft")
    build = ("build", "--target", bigram_config, "-o", tmp_path / "other", "--coupling")
    short = coupling_file(tmp_path, 3)
    run(*build, short).fails(2, "is for blocks of 4", "the draft's has 8")
    engines = ("--executor", "tensorrt-rtx", "--arch", "sm_120")
    run(*build, coupling_file(tmp_path, 7), *engines).fails(2, "kernels alone")
    assert not (tmp_path / "other").exists()


@pytest.mark.exhaustive
def test_the_demo_pair_gains(run: Run, tmp_path: Path) -> None:
    bundle, file = tmp_path / "bundle", tmp_path / "coupling.json"
    run.well("build", "--target", "demo", "-o", bundle)
    found = run.well("couple", bundle, "--max-tokens", "96", "-o", file, "--json").json
    coupling = Coupling.read(file)
    assert coupling.model_dump() == found["coupling"]
    assert all(one.gain > 0.01 and one.answers == 32 for one in coupling.measured)
    lengths = []
    for options in ([], ["--coupling", file]):
        run.well("build", "--target", "demo", *options, "--overwrite", "-o", bundle)
        proof = run.well(
            "verify", bundle, "--temperature", "1", "--max-tokens", "96", "--repeats", "0", "--json"
        )
        lengths.append(proof.json["modes"][1]["statistics"]["acceptance_length"])
    assert lengths[1] > lengths[0]
