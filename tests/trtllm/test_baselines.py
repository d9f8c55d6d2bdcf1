"""What a deployment is compared with: the disaggregated baseline, and other engines."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from dflash_trt.cli.main import main
from dflash_trt.deploy.trtllm.arguments import SPLIT_PORTS
from tests.trtllm.conftest import Run, build_deployment, serve_yaml

SPLIT = ["--llm-arg", "cache_transceiver_config.backend=NIXL"]
MTP = ["--draft-checkpoint", "mtp"]
EIGHT = ["--target", "gpt-oss-120b", "--profile", "b300x8"]


def commands(folder: Path) -> list[list[str]]:
    """The words of every command in a deployment's README."""
    blocks = (folder / "README.md").read_text(encoding="utf-8").split("```")[1::2]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deployment with the disaggregated baseline, that no test changes."""
    folder = tmp_path_factory.mktemp("split") / "d"
    assert main(["build", "--executor", "trtllm", *EIGHT, *SPLIT, "-o", str(folder)]) == 0
    return folder


def test_two_servers_differ_in_the_overlap_alone(split: Path) -> None:
    context, generation = (
        yaml.safe_load((split / "disaggregated" / f"{role}.yaml").read_text())
        for role in SPLIT_PORTS
    )
    assert context.pop("disable_overlap_scheduler") and context == generation
    assert context.pop("cache_transceiver_config") == {"backend": "NIXL"}
    assert context == serve_yaml(split, "autoregressive")
    assert "cache_transceiver_config" not in serve_yaml(split, "dflash")
    assert not (split / "triton" / "disaggregated").exists()


def test_the_router_finds_what_the_readme_starts(split: Path) -> None:
    router = yaml.safe_load((split / "disaggregated" / "router.yaml").read_text())
    served = {
        value(words, "--config").rpartition("/")[2]: int(value(words, "--port"))
        for words in commands(split)
        if "--config" in words and "trtllm-serve" in words
    }
    for role in SPLIT_PORTS:
        assert router[f"{role}_servers"]["urls"] == [f"localhost:{served[f'{role}.yaml']}"]
    assert router["port"] == served["dflash.yaml"]
    assert any(words[-4:-1] == ["trtllm-serve", "disaggregated", "-c"] for words in commands(split))
    sweep = yaml.safe_load((split / "sweep" / "disaggregated.yaml").read_text())
    (one,) = sweep["configurations"]
    assert (one["gpus"], one["hardware"]) == (16, "16 × B300 (HGX)")


@pytest.mark.parametrize(
    ("file", "old", "new", "piece"),
    [
        ("router", "num_instances: 1", "num_instances: 2", "1 urls for num_instances 2"),
        ("router", "localhost:8001", "http://localhost:8001", "urls"),
        ("generation", "tensor_parallel_size: 8", "tensor_parallel_size: 4", "4 is not 8"),
        ("generation", "backend: NIXL", "backend: UCX", "or not the context server's"),
        ("generation", "enable_block_reuse:", "tokens_per_block: 64\n  enable_block_reuse:", "64"),
    ],
)
def test_what_is_edited_is_checked(
    run: Run, split: Path, tmp_path: Path, file: str, old: str, new: str, piece: str
) -> None:
    shutil.copytree(split, tmp_path / "d")
    path = tmp_path / "d" / "disaggregated" / f"{file}.yaml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(old, new), encoding="utf-8")
    assert old in text
    run("inspect", tmp_path / "d").fails(2, f"disaggregated/{file}.yaml", piece)


def test_recurrent_states_stay(run: Run, tmp_path: Path) -> None:
    own = ["--target", "qwen3.5-27b", "--profile", "h200x1", *SPLIT, "-o", tmp_path / "d"]
    run("build", "--executor", "trtllm", *own).fails(2, "recurrent states over", "leave it out")


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        ([*EIGHT, "--block-size", 8], {"method": "dflash", "model": "z-lab/gpt-oss-120b-DFlash"}),
        (["--target", "qwen3.5-27b", "--profile", "h200x8", *MTP], {"method": "mtp"}),
    ],
)
def test_the_same_pair_elsewhere(
    run: Run, tmp_path: Path, own: list[object], asked: dict[str, str]
) -> None:
    shown = build_deployment(run, tmp_path / "d", *own, "--llm-arg", "kv_cache_config.dtype=fp8")
    vllm, sglang = commands(tmp_path / "d")[-2:]
    assert vllm[:3] == ["vllm", "serve", value(sglang, "--model-path")]
    drafts = json.loads(value(vllm, "--speculative-config"))
    assert drafts == {**asked, "num_speculative_tokens": shown["max_draft_len"]}
    assert value(sglang, "--speculative-num-draft-tokens") == str(shown["max_draft_len"] + 1)
    limits = [str(shown[name]) for name in ("max_seq_len", "max_batch")]
    for words, named, cache in (
        (vllm, ("--max-model-len", "--max-num-seqs"), "fp8"),
        (sglang, ("--context-length", "--max-running-requests"), "fp8_e4m3"),
    ):
        assert [value(words, name) for name in named] == limits
        assert value(words, "--kv-cache-dtype") == cache
    # Where hits would starve the drafter nobody reuses prefixes, and sweeps read /metrics.
    assert vllm[-3] == "--no-enable-prefix-caching"
    assert {"--disable-radix-cache", "--enable-metrics"} <= set(sglang)
    names = {path.stem for path in (tmp_path / "d" / "sweep").iterdir()}
    assert names == {*shown["variants"], "vllm", "sglang"}


def test_what_others_are_not_known_to_split(run: Run, tmp_path: Path) -> None:
    for profile in ("gb300x8", "b300x8-dp"):
        build_deployment(run, tmp_path / profile, "--target", "gpt-oss-120b", "--profile", profile)
        readme = (tmp_path / profile / "README.md").read_text(encoding="utf-8")
        assert "vllm" not in readme and not (tmp_path / profile / "sweep" / "vllm.yaml").exists()


def test_every_variant_is_served_alike(split: Path) -> None:
    """The files say the rest; programmatic dependent launch is on in all that start one."""
    text = (split / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    starts = [line for line in text.splitlines() if re.match(r".*trtllm-serve \S+ --host", line)]
    assert len(starts) == 3 and all("TRTLLM_ENABLE_PDL=1" in line for line in starts)
    assert "export TRTLLM_ENABLE_PDL=" in (split / "serve-triton.sh").read_text()
