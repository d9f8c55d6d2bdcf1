"""Deployments with weights, quantised or not; edited files; several nodes; sweeps; the script."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from dflash_perf.harness.sweep_config import read_sweep_config

from dflash_trt.building.profile import on_profile
from dflash_trt.core import links
from dflash_trt.deploy.planning.known_pairs import find_pair, pair_names
from dflash_trt.deploy.trtllm.deployment_plan import DeploymentOptions, fit_batch, plan_deployment
from dflash_trt.deploy.trtllm.versions import DEFAULT_VERSION, find_version
from dflash_trt.models.build_config import load_config
from dflash_trt.models.draft import read_draft
from dflash_trt.models.target import read_target
from tests.trtllm.conftest import Run, install_tensorrt_llm

MOUNTED = "/deployment/weights"
MODEL = "triton/dflash/tensorrt_llm/1/model.yaml"
ROLES = ("target", "draft")


def build_deployment(run: Run, output: Path, *options: object) -> dict[str, Any]:
    run.well("build", "--executor", "trtllm", *options, "-o", output)
    shown: dict[str, Any] = run("inspect", output, "--json").json
    return shown


def test_every_pair_has_a_profile_of_every_gpu() -> None:
    """TensorRT-LLM has kernels for each, and none wastes memory.

    A batch reserves the draft's context, so too large a one leaves few whole sequences. Each has
    the batch that holds the most; more memory never holds fewer.
    """
    wanted = {"a100", "h100", "h200", "b200", "b300", "gb200", "rtx-pro-6000"}
    options = DeploymentOptions(version=find_version(DEFAULT_VERSION))
    for pair in map(find_pair, pair_names()):
        if pair.target.sizes.unusual is not None:  # they are refused
            continue
        name, found = pair.name, set()
        config, path = load_config(name)
        held: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        for key, profile in config.profiles.items():
            limited = on_profile(config, key, path)[1]
            plan = plan_deployment(limited, path, key, pair, options)
            batch, whole = limited.max_batch, plan.whole_sequences
            assert whole >= max(2, batch // 2), (name, key)
            best = fit_batch(limited, path, key, pair, options).max_batch
            assert batch == best, (name, key)
            alike = (plan.gpu.arch, profile.gpus, plan.max_seq_len, str(profile.llm_args))
            held.setdefault(alike, []).append((plan.gpu.memory_bytes, whole))
            found.add((profile.gpu, profile.gpus))
        for sizes in held.values():
            users = [whole for _, whole in sorted(sizes)]
            assert users == sorted(users), (name, sizes)
        gpus = wanted - ({"a100"} if pair.target.mlp_format == "mxfp4" else set())
        assert {(gpu, count) for gpu in gpus for count in (1, 8)} <= found, name


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("qwen3-8b", "h100x1"), "holds 6 whole sequences of 40,960 tokens, not 8"),
        (
            ("qwen3-8b", "l40sx1", "--max-batch", 24),
            "holds 13 whole sequences of 8,192 tokens, not 24",
        ),
        (("qwen3-8b", "h100x8"), None),
        (
            ("gpt-oss-120b", "b300x8", "--max-batch", 64, "--llm-arg", "enable_attention_dp=true"),
            "each GPU holds 4 whole sequences of 131,072 tokens, not 64",
        ),
    ],
)
def test_a_build_says_how_many_are_whole(
    run: Run, tmp_path: Path, asked: tuple[object, ...], told: str | None
) -> None:
    target, profile, *options = asked
    common = ("build", "--executor", "trtllm", "--target", target, "--profile", profile)
    shown = run.well(*common, *options, "-o", tmp_path / "d").out
    assert ("whole sequences" in shown) == (told is not None)
    assert told is None or f"{told}; shorter ones share its memory" in shown


def test_a_pair_of_ones_own(run: Run, tmp_path: Path) -> None:
    """With a shape in its configuration it needs no checkpoints, and no public pair."""
    path = load_config("gpt-oss-20b")[1]
    text = path.read_text(encoding="utf-8").replace("openai/", "someone/")
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    own, public = (
        build_deployment(run, tmp_path / name, "--target", target, "--profile", "b200x1")
        for name, target in (("own", tmp_path / "own.yaml"), ("public", path))
    )
    assert (own["name"], own["target"]) == ("own", "someone/gpt-oss-20b")
    assert own["memory"] == public["memory"]


def test_a_shell_takes_what_the_readme_says(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "it's own.yaml"
    text = load_config("qwen3-8b")[1].read_text(encoding="utf-8")
    values = {**yaml.safe_load(text), "chat_template_kwargs": {"style": "it's $(false)"}}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    build_deployment(run, tmp_path / "d", "--target", path, "--profile", "b200x1")
    readme = (tmp_path / "d" / "README.md").read_text(encoding="utf-8")
    blocks = [shlex.split(block) for block in readme.split("```")[1::2]]
    found = {words[0]: words for words in blocks}
    body = json.loads(found["curl"][-1])
    assert body["chat_template_kwargs"] == values["chat_template_kwargs"]
    served = next(words for words in blocks if "trtllm-serve" in words)
    assert served[served.index("--served_model_name") + 1] == "it's own"
    # Beside the folder, which --overwrite replaces.
    assert found["dflash-trt"][-5] == "../results-it's own-b200x1"


def test_several_nodes(run: Run, tmp_path: Path) -> None:
    build_deployment(run, tmp_path / "d", "--target", "gpt-oss-120b", "--profile", "gb300x8")
    readme = (tmp_path / "d" / "README.md").read_text(encoding="utf-8")
    assert "srun --nodes 2 --ntasks 8 --ntasks-per-node 4 --mpi pmix" in readme
    assert "--container-image nvcr.io#nvidia/tensorrt-llm/release:1.4.0rc1" in readme
    assert "trtllm-llmapi-launch trtllm-serve openai/gpt-oss-120b" in readme
    arguments = yaml.safe_load((tmp_path / "d" / "serve" / "dflash.yaml").read_text())
    assert (arguments["tensor_parallel_size"], arguments["gpus_per_node"]) == (8, 4)


def test_sweeps_are_sweeps(run: Run, tmp_path: Path) -> None:
    shown = build_deployment(run, tmp_path / "d", "--target", "gpt-oss-120b", "--profile", "b300x1")
    assert shown["variants"] == ["autoregressive", "eagle3", "dflash"]
    prompts = {"input_file": "prompts.jsonl"}
    sweeps = [
        read_sweep_config(tmp_path / "d" / "sweep" / f"{variant}.yaml", prompts)
        for variant in shown["variants"]
    ]
    assert [sweep.configurations[0].name for sweep in sweeps] == shown["variants"]
    # Measured one after another into one folder: they may differ in nothing else.
    assert len({sweep.model_dump_json(exclude={"configurations"}) for sweep in sweeps}) == 1
    assert [load.concurrency for load in sweeps[0].loads] == [1, 2, 4, 8, 16, 32, 44]


@pytest.mark.parametrize(
    ("target", "profile", "most", "parameters"),
    [
        ("gpt-oss-120b", "b300x8-dp", 8 * 28, {}),
        ("qwen3-8b", "h100x1", 8, {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
)
def test_a_sweep_asks_what_the_pair_is_for(
    run: Run, tmp_path: Path, target: str, profile: str, most: int, parameters: dict[str, Any]
) -> None:
    build_deployment(run, tmp_path / "d", "--target", target, "--profile", profile)
    prompts = {"input_file": "prompts.jsonl"}
    sweep = read_sweep_config(tmp_path / "d" / "sweep" / "dflash.yaml", prompts)
    assert max(load.concurrency or 0 for load in sweep.loads) == most
    assert sweep.configurations[0].parameters == parameters


def test_weights_come_along_without_code_and_pickles(run: Run, pair: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(pair.parent, tmp_path / "pair")
    names = {role: {path.name for path in (folder / role).iterdir()} for role in ROLES}
    for name in ("modeling_x.py", "pytorch_model.bin"):
        (folder / "target" / name).write_text("boom")
    own = ["--target", folder / pair.name, "--profile", "one"]
    shown = build_deployment(run, tmp_path / "d", *own)
    assert (shown["target"], shown["draft"]) == (f"{MOUNTED}/target", f"{MOUNTED}/draft")
    for role in ROLES:
        placed = tmp_path / "d" / "weights" / role
        assert {path.name for path in placed.iterdir()} == names[role]
        assert (placed / "model.safetensors").samefile(folder / role / "model.safetensors")
    build_deployment(run, tmp_path / "copy", *own, "--copy-weights")
    copied = tmp_path / "copy" / "weights" / "draft" / "model.safetensors"
    assert not copied.samefile(folder / "draft" / "model.safetensors")


def test_an_eagle3_folder_comes_along(run: Run, pair: Path, tmp_path: Path) -> None:
    own = pair.with_name("own.yaml")

    def build(output: Path, eagle3: str) -> dict[str, Any]:
        own.write_text(f"{pair.read_text()}\neagle3: {eagle3}\n")
        return build_deployment(run, output, "--target", own, "--profile", "one")

    shown = build(tmp_path / "d", "draft")
    assert shown["eagle3"] == f"{MOUNTED}/eagle3"
    assert (tmp_path / "d" / "weights" / "eagle3" / "model.safetensors").is_file()
    arguments = yaml.safe_load((tmp_path / "d" / "serve" / "eagle3.yaml").read_text())
    assert arguments["speculative_config"]["max_draft_len"] == 3
    named = build(tmp_path / "named", "owner/eagle")
    assert named["eagle3"] == "owner/eagle"


def test_quantised_on_the_way(run: Run, pair: Path, tmp_path: Path) -> None:
    fp8 = ["--target", pair, "--profile", "one", "--precision", "fp8"]
    shown = build_deployment(run, tmp_path / "d", *fp8)
    weights = tmp_path / "d" / "weights"
    assert shown["precision"] == {"target": "FP8"}
    assert read_target(weights / "target").quantization is not None
    assert read_draft(weights / "draft").quantization is None
    assert (weights / "target" / "tokenizer.json").is_file()
    assert "target (FP8)" in (tmp_path / "d" / "README.md").read_text(encoding="utf-8")
    shown = build_deployment(run, tmp_path / "both", *fp8, "--draft-precision", "fp8")
    assert shown["precision"] == {"target": "FP8", "draft": "FP8"}
    plain = build_deployment(run, tmp_path / "plain", *fp8[:-2])
    assert shown["memory"]["weights"] < plain["memory"]["weights"]


def test_whole_or_absent(
    run: Run, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "d"
    common = ["build", "--executor", "trtllm", "--target", pair, "--profile", "one", "-o", output]
    with monkeypatch.context() as patch:
        patch.setattr(links, "link_file", lambda *_: False)
        patch.setattr(links, "clone_file", lambda *_: False)
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        run(*common).fails(1, "copying the weights needs", "0 are free")
    assert list(tmp_path.iterdir()) == []
    run.well(*common)
    run(*common).fails(2, "already exists", "--overwrite")
    run.well(*common, "--overwrite")


@pytest.mark.parametrize(
    ("file", "old", "new", "pieces"),
    [
        ("serve/dflash.yaml", "max_draft_len: 15", "max_draft_len: 16", ["a block of 17"]),
        ("serve/dflash.yaml", "max_draft_len", "max_draft_length", ["nearest: 'max_draft_len'"]),
        ("serve/dflash.yaml", "TRTLLM", "FA4", ["FA4 does not run on B200"]),
        (
            MODEL,
            "enable_block_reuse: true",
            "tokens_per_block: 128",
            ["TRTLLM has no pages of 128"],
        ),
        ("serve/dflash.yaml", "recompute_tail: -1", "recompute_tail: 0", ["without the prompts"]),
        ("serve/dflash.yaml", "  context_recompute_tail: -1\n", "", ["without the prompts"]),
        ("serve/dflash.yaml", "enable_chunk", "moe_config: {}\nenable_chunk", ["is dense"]),
        (
            "serve/dflash.yaml",
            "enable_chunk",
            "reasoning_parser: llama\nenable_chunk",
            ["choose qwen3"],
        ),
        ("serve/dflash.yaml", "seq_len: ", "seq_len: 4", ["was counted for 32768"]),
        ("serve/dflash.yaml", "max_seq_len: 32768\n", "", ["max_seq_len missing"]),
        (MODEL, "max_batch_size: 24\nmax_", "max_batch_size: 25\nmax_", ["was counted for 24"]),
        (MODEL, "parallel_size: 1", "parallel_size: 3", ["tensor_parallel_size 3 is not 1"]),
        ("serve/dflash.yaml", "  mask_token_id: 151669\n", "", ["mask_token_id is missing"]),
        (MODEL, "decoupled", "decoupeld", ["triton_config"]),
        ("serve/autoregressive.yaml", "max_batch_size: 24", "max_batch_size: -1", ["got -1"]),
        ("serve/autoregressive.yaml", "max_seq_len", "{[", ["not valid YAML"]),
        ("deployment.json", '"schema_version": 2', '"schema_version": 9', ["schema version 9"]),
        ("deployment.json", '"max_batch": 24', '"max_batch": "x"', ["max_batch"]),
    ],
)
def test_edited_files(
    run: Run, tmp_path: Path, file: str, old: str, new: str, pieces: list[str]
) -> None:
    build_deployment(run, tmp_path / "d", "--target", "qwen3-8b", "--profile", "b200x1")
    path = tmp_path / "d" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    outcome = run("inspect", tmp_path / "d")
    assert outcome.code in (1, 2)
    outcome.fails(outcome.code, file, *pieces)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("gpt-oss-20b", [], "a target with sliding windows does not take context_recompute_tail"),
        ("qwen3-8b", ["--trtllm-version", "1.3.0rc27"], "1.3.0rc27 has no context_recompute_tail"),
    ],
)
def test_prefixes_are_not_reused_where_that_starves_the_drafter(
    run: Run, tmp_path: Path, name: str, more: list[str], why: str
) -> None:
    build_deployment(run, tmp_path / "d", "--target", name, "--profile", "b200x1", *more)
    for variant, code in (("autoregressive", 0), ("dflash", 2)):
        path = tmp_path / "d" / "serve" / f"{variant}.yaml"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("block_reuse: false", "block_reuse: true"), encoding="utf-8")
        outcome = run("inspect", tmp_path / "d")
        assert outcome.code == code
    outcome.fails(2, "serve/dflash.yaml", why, "set enable_block_reuse false")


def test_inspect(run: Run, tmp_path: Path) -> None:
    build_deployment(run, tmp_path / "d", "--target", "gpt-oss-120b", "--profile", "b300x8")
    shown = run("inspect", tmp_path / "d")
    assert shown.code == 0
    for piece in ("not run", "draft context 16.3 GiB", "6 YAML files", "EAGLE-3 nvidia/"):
        assert piece in shown.out


def test_the_triton_script(run: Run, tmp_path: Path) -> None:
    build_deployment(run, tmp_path / "d", "--target", "qwen3-8b", "--profile", "b200x1")
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    launcher, ours = 'printf "%s\\n" "$@"', {**os.environ, "PATH": python}
    machine = install_tensorrt_llm(tmp_path, "# TensorRT-LLM's own\n", launcher, ours)
    (tmp_path / "llmapi" / "tensorrt_llm" / "1" / "helpers.py").touch()

    def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(tmp_path / "d" / "serve-triton.sh"), *arguments],
            env={**machine, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    done = script("autoregressive", "--http-port=9000")
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()
    assert command[0] == "tritonserver" and command[-1] == "--http-port=9000"
    assert "--http-address=127.0.0.1" in command
    repository = Path(command[1].removeprefix("--model-repository="))
    served = {path.relative_to(repository).as_posix() for path in repository.rglob("*.*")}
    assert served == {
        f"tensorrt_llm/{name}"
        for name in ("config.pbtxt", "1/model.py", "1/helpers.py", "1/model.yaml")
    }
    arguments = yaml.safe_load((repository / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert arguments["model"] == "Qwen/Qwen3-8B" and "speculative_config" not in arguments
    for outcome, piece in (
        (script("medusa"), "there is no variant 'medusa', but autoregressive, dflash"),
        (script(LLMAPI="/nowhere"), "set LLMAPI to triton_backend/all_models/llmapi"),
        (script(PATH=python), "there is no trtllm-llmapi-launch"),
    ):
        assert outcome.returncode == 1 and piece in outcome.stderr
    (Path(machine["PYTHONPATH"]) / "flashinfer.py").unlink()
    lacking = script()
    assert lacking.returncode == 1 and not lacking.stdout
    note = "note: the config.json of z-lab/Qwen3-8B-DFlash-b16 cannot be read as a draft's"
    assert [line.split(" (")[0] for line in lacking.stderr.splitlines()[1:]] == [
        "error: dflash needs flashinfer of the package flashinfer-python",
        note,
    ]
