"""LLM arguments of a profile or of `--llm-arg`: what is written, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.deploy.trtllm.llm_options import read_options
from dflash_trt.deploy.trtllm.schema import MoeBackend
from dflash_trt.deploy.trtllm.trtllm_kernels import MOE_KERNELS, default_moe_backend, moe_backends
from dflash_trt.errors import DflashError
from dflash_trt.models.build_config import load_config
from tests.trtllm.conftest import Run

SPECULATION = "speculative_config"
EIGHT = "gpus: 8, tensor_parallel: 8, expert_parallel: 8"
REJECTION = f"{SPECULATION}: {{use_rejection_sampling: true}}"


def _own(tmp_path: Path, name: str, profile: str) -> Path:
    """A copy of a shipped configuration with one profile of its own."""
    values = yaml.safe_load(load_config(name)[1].read_text(encoding="utf-8"))
    values["profiles"] = {"own": {"max_seq_len": 4096, **yaml.safe_load(f"{{{profile}}}")}}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def _serve(folder: Path, variant: str) -> dict[str, Any]:
    path = folder / "serve" / f"{variant}.yaml"
    arguments: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return arguments


def test_they_are_written(run: Run, tmp_path: Path) -> None:
    llm_args = (
        "{enable_attention_dp: true, kv_cache_config: {dtype: fp8}, "
        "moe_config: {backend: CUTLASS}, "
        f"{SPECULATION}: {{enable_penalty: true, max_concurrency: 8}}}}"
    )
    target = _own(tmp_path, "gpt-oss-120b", f"gpu: h200, {EIGHT}, llm_args: {llm_args}")
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
        arguments = _serve(tmp_path / "d", variant)
        assert {name: arguments["kv_cache_config"][name] for name in cache} == cache
        assert arguments["moe_config"] == {"backend": "CUTLASS"}
        assert arguments["enable_attention_dp"] and arguments["disable_overlap_scheduler"]
        assert (arguments["guided_decoding_backend"], arguments["stream_interval"]) == (
            "llguidance",
            4,
        )
    eagle3, dflash = (_serve(tmp_path / "d", name)[SPECULATION] for name in ("eagle3", "dflash"))
    assert eagle3["enable_penalty"] and dflash["enable_penalty"]
    assert "max_concurrency" not in eagle3 and dflash["max_concurrency"] == 8
    preflight = (tmp_path / "d" / "preflight.py").read_text()
    assert preflight.count('"llguidance": "llguidance"') == 3
    shown = run("inspect", tmp_path / "d", "--json").json
    assert shown["llm_args"]["kv_cache_config"] == cache


def test_a_drafts_context_fills_whole_pages(run: Run, tmp_path: Path) -> None:
    target, context = _own(tmp_path, "qwen3-8b", "gpu: b200"), {}
    for page in (16, 32, 64):
        folder = tmp_path / str(page)
        option = ["--llm-arg", f"kv_cache_config.tokens_per_block={page}"]
        run.well("build", "--executor", "trtllm", "--target", target, *option, "-o", folder)
        context[page] = run("inspect", folder, "--json").json["memory"]["draft_context"]
    # 4,096 tokens and a block of 16.
    assert [context[page] * 257 // context[16] for page in context] == [257, 258, 260]


def test_a_cache_in_fp8_holds_twice_as_much(run: Run, tmp_path: Path) -> None:
    target = _own(tmp_path, "qwen3-8b", "gpu: h100")
    memory = []
    for dtype in ("bfloat16", "fp8"):
        folder = tmp_path / dtype
        option = ["--llm-arg", f"kv_cache_config.dtype={dtype}"]
        run.well("build", "--executor", "trtllm", "--target", target, *option, "-o", folder)
        memory.append(run("inspect", folder, "--json").json["memory"])
    assert memory[0]["kv_sequence"] == 2 * memory[1]["kv_sequence"]
    assert memory[0]["draft_context"] == memory[1]["draft_context"]


@pytest.mark.parametrize(
    ("name", "profile", "llm_args", "pieces"),
    [
        ("qwen3-8b", "gpu: b200", "trust_remote_code: true", ["checkpoint's own code"]),
        ("qwen3-8b", "gpu: b200", "print_iter_log: true", ["is not offered", "inspect"]),
        ("qwen3-8b", "gpu: b200", "stream_intervall: 2", ["nearest: 'stream_interval'"]),
        ("qwen3-8b", "gpu: b200", "stream_interval: 0", ["stream_interval", "got 0"]),
        ("qwen3-8b", "gpu: b200", "guided_decoding_backend: outlines", ["'xgrammar'"]),
        ("qwen3-8b", "gpu: b200", "kv_cache_config: {dtype: int8}", ["dtype", "'fp8'"]),
        ("qwen3-8b", "gpu: a100", "kv_cache_config: {dtype: fp8}", ["A100", "no FP8 attention"]),
        ("qwen3-8b", "gpu: b200", "kv_cache_config: {dtype: nvfp4}", ["ModelOpt", "auto follows"]),
        ("qwen3-8b", "gpu: h100", "kv_cache_config: {tokens_per_block: 24}", ["power of two"]),
        ("qwen3-8b", "gpu: b200", "kv_cache_config: {tokens_per_block: 128}", ["16, 32, 64"]),
        ("qwen3-8b", "gpu: h100", "kv_cache_config: {tokens_per_block: 8192}", ["a page of 8192"]),
        ("qwen3-8b", "gpu: b200", "moe_config: {backend: TRTLLM}", ["this target is dense"]),
        ("gpt-oss-20b", "gpu: h100", "moe_config: {backend: TRTLLM}", ["choose CUTLASS or TRITON"]),
        ("gpt-oss-20b", "gpu: b200", "moe_config: {backend: CUTEDSL}", ["mxfp4 on B200", "TRTLLM"]),
        ("gpt-oss-20b", "gpu: b200", "moe_config: {backend: VANILLA}", ["choose CUTLASS or"]),
        ("gpt-oss-20b", "gpu: a100", "", ["no experts in mxfp4 on A100", "choose another GPU"]),
        ("qwen3-8b", "gpu: b200", "enable_attention_dp: true", ["this target is dense"]),
        ("gpt-oss-20b", "gpu: b200", "enable_attention_dp: true", ["is for several GPUs"]),
        (
            "gpt-oss-20b",
            "gpu: b200, gpus: 8, tensor_parallel: 8",
            "enable_attention_dp: true",
            ["over all 8 GPUs", "set expert_parallel 8"],
        ),
        (
            "qwen3-coder-30b-a3b",
            f"gpu: rtx-pro-6000, {EIGHT}, precision: nvfp4",
            "moe_config: {backend: CUTEDSL}",
            ["CUTEDSL on RTX PRO 6000 Blackwell (sm_120) splits no experts", "choose CUTLASS"],
        ),
        ("gpt-oss-20b", "gpu: b200", "reasoning_parser: qwen3", ["not of GptOssForCausalLM"]),
        ("qwen3-8b", "gpu: b200", "reasoning_parser: deepseek-r1", ["choose qwen3"]),
        (
            "qwen3-8b",
            "gpu: b200",
            f"guided_decoding_backend: xgrammar, {REJECTION}",
            ["guided_decoding_backend and use_rejection_sampling exclude each other"],
        ),
        (
            "qwen3-8b",
            "gpu: b200",
            f"{SPECULATION}: {{context_recompute_tail: 4097}}",
            ["4097 is more than max_seq_len 4096"],
        ),
        ("qwen3-8b", "gpu: b200", f"{SPECULATION}: {{context_recompute_tail: 0}}", ["pass 2048"]),
        (
            "qwen3.5-27b",
            "gpu: b200",
            f"{SPECULATION}: {{context_recompute_tail: 64}}",
            ["recurrent layers does not take"],
        ),
        (
            "gpt-oss-20b",
            "gpu: b200",
            f"{SPECULATION}: {{context_recompute_tail: 64}}",
            ["sliding windows"],
        ),
    ],
)
def test_what_does_not_go_together(
    run: Run, tmp_path: Path, name: str, profile: str, llm_args: str, pieces: list[str]
) -> None:
    target = _own(tmp_path, name, f"{profile}, llm_args: {{{llm_args}}}")
    output = tmp_path / "deployment"
    build = ["build", "--executor", "trtllm", "--target", target, "-o", output]
    run(*build).fails(2, "own.yaml, profile own", *pieces)
    assert not output.exists()


@pytest.mark.parametrize(
    ("texts", "pieces"),
    [
        (["stream_interval"], ["--llm-arg", "'stream_interval' is not NAME=VALUE"]),
        (["=3"], ["is not NAME=VALUE"]),
        (["stream_interval=2", "stream_interval=3"], ["is given twice"]),
        (["stream_interval=2", "stream_interval.x=3"], ["is given twice"]),
        (["stream_interval=[2"], ["--llm-arg stream_interval: is not valid YAML"]),
        (["reasoning_parser=" + "[" * 9999], ["is not valid YAML"]),
        (["kv_cache_config=fp8"], ["kv_cache_config"]),
        (["reasoning_parser=llama"], ["--llm-arg: reasoning_parser llama", "choose qwen3"]),
        (["kv_cache_config.tokens_per_block=33"], ["--llm-arg: attention backend TRTLLM"]),
        (["kv_cache_config={tokens_per_block: 33}"], ["--llm-arg: attention backend TRTLLM"]),
        (["enable_attention_dp=true"], ["--llm-arg: enable_attention_dp is"]),
        ([f"{SPECULATION}.context_recompute_tail=50000"], ["--llm-arg or qwen3-8b.yaml, prof"]),
    ],
)
def test_what_the_command_line_says_of_them(
    run: Run, tmp_path: Path, texts: list[str], pieces: list[str]
) -> None:
    options = [word for one in texts for word in ("--llm-arg", one)]
    build = ["build", "--executor", "trtllm", "--target", "qwen3-8b", "--profile", "b200x1"]
    run(*build, *options, "-o", tmp_path / "d").fails(2, *pieces)


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


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
SECTIONS = ["kv_cache_config", "moe_config", SPECULATION]
NAMES = [*SECTIONS, "stream_interval", "reasoning_parser", "trust_remote_code", "zzz"]


@given(
    st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=3),
    st.dictionaries(st.sampled_from(["dtype", "backend", "max_concurrency", "x"]), ANYTHING),
    st.lists(st.text(max_size=20), max_size=3),
)
def test_anything_else_is_one_line(
    values: dict[str, Any], fields: dict[str, Any], texts: list[str]
) -> None:
    for profile, given_texts in ((values, texts), (dict.fromkeys(SECTIONS, fields), [])):
        try:
            read_options(profile, "own.yaml", given_texts)
        except DflashError as error:
            assert error.usage and str(error).isprintable() and len(str(error)) < 600
