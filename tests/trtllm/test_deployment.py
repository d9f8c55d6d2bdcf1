"""What a deployment has: profiles, YAML files, weights quantised or not, nodes, sweeps."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from dflash_perf.harness.sweep_config import read_sweep_config

from dflash_trt.building.profile import on_profile
from dflash_trt.core import links
from dflash_trt.deploy.planning.known_pairs import find_pair, pair_names
from dflash_trt.deploy.trtllm.deployment_plan import DeploymentOptions, fit_batch, plan_deployment
from dflash_trt.deploy.trtllm.schema import MoeBackend
from dflash_trt.deploy.trtllm.trtllm_kernels import MOE_KERNELS, default_moe_backend, moe_backends
from dflash_trt.models.build_config import load_config
from dflash_trt.models.draft import read_draft
from dflash_trt.models.target import read_target
from tests.reference.checkpoints import write_target
from tests.reference.deepspec import write_deepspec
from tests.reference.mtp import write_mtp
from tests.trtllm.conftest import (
    QWEN3,
    Run,
    build_deployment,
    own_profile,
    serve_yaml,
    write_schedule,
)

MOUNTED = "/deployment/weights"
ROLES = ("target", "draft")


def test_every_pair_has_a_profile_of_every_gpu() -> None:
    """TensorRT-LLM has kernels for each, and none wastes memory.

    A batch reserves the draft's context, so too large a one leaves few whole sequences. Each has
    the batch that holds the most; more memory never holds fewer.
    """
    wanted = {"a100", "h100", "h200", "b200", "b300", "gb200", "rtx-pro-6000"}
    options = DeploymentOptions()
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
    assert "--container-image nvcr.io#nvidia/tensorrt-llm/release:1.3.0rc29" in readme
    assert "trtllm-llmapi-launch trtllm-serve openai/gpt-oss-120b" in readme
    arguments = serve_yaml(tmp_path / "d", "dflash")
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
    build_deployment(run, tmp_path / "dp", "--target", "gpt-oss-120b", "--profile", "b300x8-dp")
    sweep = read_sweep_config(tmp_path / "dp" / "sweep" / "dflash.yaml", prompts)
    assert max(load.concurrency or 0 for load in sweep.loads) == 8 * 28


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
    arguments = serve_yaml(tmp_path / "d", "eagle3")
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
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        run(*common).fails(1, "copying the weights needs", "0 are free")
    assert list(tmp_path.iterdir()) == []
    run.well(*common)
    run(*common).fails(2, "already exists", "--overwrite")
    run.well(*common, "--overwrite")


@pytest.mark.parametrize("version", ["1.3.0rc27", "1.4.0rc1"])
def test_a_dspark_draft_is_deployed_as_one(
    run: Run, pair: Path, tmp_path: Path, version: str
) -> None:
    folder = pair.parent
    table = torch.zeros(read_target(folder / "target").vocab_size, 4)
    markov = table, table.clone()
    draft = write_deepspec(tmp_path / "dspark", folder / "draft", folder / "target", markov)
    own = ["--target", pair, "--profile", "one", "--draft-checkpoint", draft]
    shown = build_deployment(run, tmp_path / "d", *own, "--trtllm-version", version)
    assert shown["variants"] == ["autoregressive", "dspark"]
    arguments = serve_yaml(tmp_path / "d", "dspark")
    speculation, spec = arguments["speculative_config"], read_draft(draft)
    assert speculation == {
        "decoding_type": "DSpark",
        "max_draft_len": spec.block_size - 1,
        "speculative_model": f"{MOUNTED}/draft",
        "target_layer_ids": list(spec.target_layer_ids),
        "mask_token_id": spec.mask_token_id,
        "attention_backend": "TRTLLM",
        "block_size": spec.block_size - 1,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
    }
    assert arguments["kv_cache_config"]["enable_block_reuse"] is False
    readme = (tmp_path / "d" / "README.md").read_text(encoding="utf-8")
    assert "serve/dspark.yaml" in readme and "dflash.yaml" not in readme


@pytest.mark.parametrize(
    ("name", "version"), [("qwen3.5-27b", "1.3.0rc27"), ("qwen3.5-35b-a3b", "1.4.0rc1")]
)
def test_a_targets_own_layer_is_deployed(run: Run, tmp_path: Path, name: str, version: str) -> None:
    """Its keys and values are in the target's cache, and nothing is reserved for a context."""
    own = ["--target", name, "--profile", "h200x1", "--draft-checkpoint", "mtp"]
    own += ["--block-size", "4", "--trtllm-version", version]
    own += ["--llm-arg", "speculative_config.max_concurrency=8"]
    shown = build_deployment(run, tmp_path / "d", *own)
    assert (shown["variants"], shown["draft"]) == (["autoregressive", "mtp"], None)
    assert serve_yaml(tmp_path / "d", "mtp")["speculative_config"] == {
        "decoding_type": "MTP",
        "max_draft_len": 3,
        "max_concurrency": 8,
    }
    sizes, memory = find_pair(name).target.sizes, shown["memory"]
    layers = 1 + sum(layer.recurrent is None for layer in sizes.layers)
    token = layers * 2 * sizes.full_layer.kv_heads * sizes.full_layer.head_dim * 2
    assert memory["kv_sequence"] == shown["max_seq_len"] * token
    assert memory["draft_context"] == 0 and memory["states"] > 0
    readme = (tmp_path / "d" / "README.md").read_text(encoding="utf-8")
    assert "the target's own MTP layer" in readme and "draft context" not in readme
    path = tmp_path / "d" / "serve" / "mtp.yaml"
    path.write_text(path.read_text().replace("draft_len: 3", "draft_len: 4"))
    run("inspect", tmp_path / "d").fails(2, "max_draft_len 4: memory was counted for 3")


def test_a_target_brings_its_layer_along(run: Run, tmp_path: Path) -> None:
    """Once, and preflight.py looks for it in the target's config.json."""
    target = tmp_path / "target"
    write_mtp(write_target(target, "qwen3_5", vocab=300, num_layers=4, vision=True))
    own = ["--target", target, "--profile", "b200x1", "--draft-checkpoint", "mtp"]
    shown = build_deployment(run, tmp_path / "d", *own, "--max-seq-len", 128)
    assert (shown["target"], shown["draft"]) == (f"{MOUNTED}/target", None)
    assert {path.name for path in (tmp_path / "d" / "weights").iterdir()} == {"target"}
    script = (tmp_path / "d" / "preflight.py").read_text().replace(MOUNTED, str(tmp_path))
    for layers, found in ((1, False), (0, True)):
        edit = json.loads((target / "config.json").read_text())
        edit["text_config"]["mtp_num_hidden_layers"] = layers
        (target / "config.json").write_text(json.dumps(edit))
        done = subprocess.run(
            [sys.executable, "-c", script, "mtp"], capture_output=True, text=True, check=False
        )
        assert (f"has mtp_num_hidden_layers {layers}, not 1" in done.stderr) == found


def test_llm_arguments_are_written(run: Run, tmp_path: Path) -> None:
    llm_args = (
        "{enable_attention_dp: true, kv_cache_config: {dtype: fp8}, "
        "moe_config: {backend: CUTLASS}, "
        "speculative_config: {enable_penalty: true, max_concurrency: 8}}"
    )
    target = own_profile(
        tmp_path,
        "gpt-oss-120b",
        f"gpu: h200, gpus: 8, tensor_parallel: 8, expert_parallel: 8, llm_args: {llm_args}",
    )
    given = [
        "kv_cache_config.tokens_per_block=64",
        "kv_cache_config.dtype=bfloat16",
        "disable_overlap_scheduler=true",
        "guided_decoding_backend=llguidance",
        "stream_interval=4",
    ]
    options = [word for one in given for word in ("--llm-arg", one)]
    run.well(*("build", "--executor", "trtllm", "--target", target, *options, "-o", tmp_path / "d"))
    cache = {"tokens_per_block": 64, "dtype": "bfloat16"}
    for variant in ("autoregressive", "eagle3", "dflash"):
        arguments = serve_yaml(tmp_path / "d", variant)
        assert {name: arguments["kv_cache_config"][name] for name in cache} == cache
        assert arguments["moe_config"] == {"backend": "CUTLASS"}
        assert arguments["enable_attention_dp"] and arguments["disable_overlap_scheduler"]
        assert (arguments["guided_decoding_backend"], arguments["stream_interval"]) == (
            "llguidance",
            4,
        )
    eagle3, dflash = (
        serve_yaml(tmp_path / "d", name)["speculative_config"] for name in ("eagle3", "dflash")
    )
    assert eagle3["enable_penalty"] and dflash["enable_penalty"]
    assert "max_concurrency" not in eagle3 and dflash["max_concurrency"] == 8
    preflight = (tmp_path / "d" / "preflight.py").read_text()
    assert preflight.count('"llguidance": "llguidance"') == 3
    shown = run("inspect", tmp_path / "d", "--json").json
    assert shown["llm_args"]["kv_cache_config"] == cache


def test_memory_follows_pages_and_dtype_of_the_caches(run: Run, tmp_path: Path) -> None:
    """4,096 tokens and a block of 16; FP8 halves the target's cache, not the draft's context."""
    target, memory = own_profile(tmp_path, "qwen3-8b", "gpu: b200"), {}
    for value in ("tokens_per_block=16", "tokens_per_block=32", "tokens_per_block=64", "dtype=fp8"):
        folder = tmp_path / value
        option = ["--target", target, "--llm-arg", f"kv_cache_config.{value}"]
        memory[value] = build_deployment(run, folder, *option)["memory"]
    *pages, fp8 = memory.values()
    contexts = [page["draft_context"] for page in pages]
    assert [one * 257 // contexts[0] for one in contexts] == [257, 258, 260]
    assert pages[1]["kv_sequence"] == 2 * fp8["kv_sequence"]
    assert pages[1]["draft_context"] == fp8["draft_context"]


def test_automatic_moe_backends_have_kernels() -> None:
    """Wherever any back end multiplies a format, AUTO's does, but for NVFP4 before Blackwell."""
    arches = {arch for table in MOE_KERNELS.values() for found in table.values() for arch in found}
    backends: dict[tuple[str, str], list[MoeBackend]] = {}
    for experts in ("bf16", "fp8", "nvfp4", "mxfp4"):
        for arch in arches:
            backends[experts, arch] = moe_backends(experts, arch)
            if backends[experts, arch] not in ([], ["MARLIN"]):
                assert default_moe_backend(experts, arch) in backends[experts, arch]
    assert backends["mxfp4", "sm_90"] == ["CUTLASS", "TRITON"]
    assert backends["nvfp4", "sm_90"] == ["MARLIN"]


def test_inspect(run: Run, tmp_path: Path) -> None:
    build_deployment(run, tmp_path / "d", "--target", "gpt-oss-120b", "--profile", "b300x8")
    shown = run("inspect", tmp_path / "d")
    assert shown.code == 0
    for piece in ("not run", "draft context 16.3 GiB", "6 YAML files", "EAGLE-3 nvidia/"):
        assert piece in shown.out


def test_a_schedule_is_somebody_elses_measurement(run: Run, tmp_path: Path) -> None:
    path = write_schedule(tmp_path / "schedule.json", [(4, 16)], executor="c\npu")
    built = run.well(*QWEN3, "--block-schedule", path, "-o", tmp_path / "deployment")
    assert "measured on executor c pu, not with TensorRT-LLM on B200 (HGX)\n" in built.err
