"""What is refused of profiles, LLM arguments, drafts and edited files, each in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.deploy.trtllm.llm_options import read_options
from dflash_trt.deploy.trtllm.schema import MtpConfig, check_arguments
from dflash_trt.deploy.trtllm.versions import DEFAULT_VERSION, VERSIONS, find_version
from dflash_trt.errors import DflashError
from dflash_trt.models.target import read_target
from tests.reference.deepspec import write_deepspec, write_speculators
from tests.trtllm.conftest import QWEN3, Run, build_deployment, own_profile

POSITIONS = 32768 + 16
LAYERS, KV_HEADS, HEAD_DIM, BF16 = 5, 8, 128, 2
SPECULATION = "speculative_config"
EIGHT = "gpus: 8, tensor_parallel: 8, expert_parallel: 8"
OLD, PINNED, NEW, LAST = "1.3.0rc27", "1.3.0rc29", "1.4.0rc1", "1.4.0rc4"
EAGLE3 = {"decoding_type": "Eagle3"}
DFLASH = {"decoding_type": "DFlash", "max_draft_len": 9, "speculative_model": "z-lab/x"}
DSPARK = {"decoding_type": "DSpark", "max_draft_len": 7, "speculative_model": "x/y"}
MTP = {"decoding_type": "MTP", "max_draft_len": 3, "use_mtp_vanilla": False}
OWN = ["--draft-checkpoint", "mtp"]
MODEL = "triton/dflash/tensorrt_llm/1/model.yaml"
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("name", "profile", "options", "pieces"),
    [
        ("qwen3-8b", "gpu: h200", ["--attention-backend", "TRTLLM"], ["choose FA4"]),
        ("qwen3-8b", "gpu: l40s, precision: nvfp4", [], ["choose fp8"]),
        ("llama-3.1-8b", "gpu: b300, max_seq_len: 65536", [], ["pass --max-seq-len 40960 or less"]),
        # 128 experts, 32 heads and 4 KV heads can be split so.
        (
            "qwen3-coder-30b-a3b",
            "gpu: b200, gpus: 16, tensor_parallel: 16, expert_parallel: 16",
            ["--block-size", 17],
            ["longest block of 16"],
        ),
        (
            "gpt-oss-120b",
            "gpu: rtx-5090",
            [],
            ["the weights take 66,737,479,680 bytes a GPU, of 32,000,000,000"],
        ),
        (
            "qwen3.5-27b",
            "gpu: h100, max_batch: 4, max_seq_len: 8192",
            [],
            # 31 states of 48 layers, in float32, and what each convolution keeps in bf16.
            [f"{4 * 31 * 48 * (4 * 48 * 128 * 128 + 2 * 3 * 10240):,} the recurrent states"],
        ),
        ("qwen3.5-27b", "gpu: h100, gpus: 32, tensor_parallel: 32", [], ["attention heads"]),
        (
            "qwen3-8b",
            "gpu: b200, max_batch: 512, max_seq_len: 32768",
            ["--attention-backend", "VANILLA"],
            [f"{(512 + 1) * POSITIONS * LAYERS * 2 * KV_HEADS * HEAD_DIM * BF16:,} bytes a GPU"],
        ),
        ("qwen3.5-35b-a3b", "gpu: h200", [], ["mixtures", "or pass --draft-checkpoint mtp"]),
        (
            "qwen3.8-27b",
            "gpu: h200",
            [],
            ["no DFlash 2;", "vLLM from 0.28.0 on or SGLang from 0.5"],
        ),
        ("qwen3.5-27b", "gpu: h200", [*OWN, "--attention-backend", "FA4"], ["the target's; leave"]),
        ("qwen3-8b", "gpu: h200", OWN, ["Qwen/Qwen3-8B: has no MTP layer: it is Qwen3ForCausalLM"]),
        ("gpt-oss-20b", "gpu: a100", [], ["no experts in mxfp4 on A100", "choose another GPU"]),
        (
            "qwen3-coder-30b-a3b",
            f"gpu: rtx-pro-6000, {EIGHT}, precision: nvfp4",
            ["--llm-arg", "moe_config.backend=CUTEDSL"],
            ["CUTEDSL on RTX PRO 6000 Blackwell (sm_120) splits no experts", "choose CUTLASS"],
        ),
        (
            "gpt-oss-20b",
            "gpu: b200, gpus: 8, tensor_parallel: 8",
            ["--llm-arg", "enable_attention_dp=true"],
            ["--llm-arg or own.yaml", "as many moe_expert_parallel_size", "8, and more than one"],
        ),
    ],
)
def test_profiles(
    run: Run, tmp_path: Path, name: str, profile: str, options: list[object], pieces: list[str]
) -> None:
    output = tmp_path / "deployment"
    target = own_profile(tmp_path, name, profile)
    build = ["build", "--executor", "trtllm", "--target", target, *options, "-o", output]
    run(*build).fails(2, *pieces)
    assert not output.exists() and not list(tmp_path.glob(".deployment*"))


@pytest.mark.parametrize(
    ("name", "gpu", "llm_args", "pieces"),
    [
        ("qwen3-8b", "b200", "trust_remote_code: true", ["checkpoint's own code"]),
        ("qwen3-8b", "b200", "print_iter_log: true", ["is not offered", "inspect"]),
        ("qwen3-8b", "b200", "stream_intervall: 2", ["nearest: 'stream_interval'"]),
        ("qwen3-8b", "b200", "stream_interval: 0", ["stream_interval", "got 0"]),
        ("qwen3-8b", "b200", "kv_cache_config: {dtype: int8}", ["dtype", "'fp8'"]),
        ("qwen3-8b", "a100", "kv_cache_config: {dtype: fp8}", ["A100", "no FP8 attention"]),
        ("qwen3-8b", "b200", "kv_cache_config: {dtype: nvfp4}", ["ModelOpt", "auto follows"]),
        ("qwen3-8b", "h100", "kv_cache_config: {tokens_per_block: 24}", ["power of two"]),
        ("qwen3-8b", "b200", "kv_cache_config: {tokens_per_block: 128}", ["16, 32, 64"]),
        ("qwen3-8b", "h100", "kv_cache_config: {tokens_per_block: 8192}", ["a page of 8192"]),
        ("qwen3-8b", "b200", "moe_config: {backend: TRTLLM}", ["this target is dense"]),
        ("gpt-oss-20b", "h100", "moe_config: {backend: TRTLLM}", ["choose CUTLASS or TRITON"]),
        ("gpt-oss-20b", "b200", "moe_config: {backend: CUTEDSL}", ["mxfp4 on B200", "TRTLLM"]),
        ("qwen3-8b", "b200", "enable_attention_dp: true", ["this target is dense"]),
        ("gpt-oss-20b", "b200", "reasoning_parser: qwen3", ["not of GptOssForCausalLM"]),
        ("qwen3-8b", "b200", "reasoning_parser: deepseek-r1", ["choose qwen3"]),
        (
            "qwen3-8b",
            "b200",
            f"guided_decoding_backend: xgrammar, {SPECULATION}: {{use_rejection_sampling: true}}",
            ["guided_decoding_backend and use_rejection_sampling exclude each other"],
        ),
        (
            "qwen3-8b",
            "b200",
            f"{SPECULATION}: {{context_recompute_tail: 4097}}",
            ["4097 is more than max_seq_len 4096"],
        ),
        ("qwen3-8b", "b200", f"{SPECULATION}: {{context_recompute_tail: 0}}", ["pass 2048"]),
        (
            "qwen3.5-27b",
            "b200",
            f"{SPECULATION}: {{context_recompute_tail: 64}}",
            ["recurrent layers does not take"],
        ),
        (
            "gpt-oss-20b",
            "b200",
            f"{SPECULATION}: {{context_recompute_tail: 64}}",
            ["sliding windows"],
        ),
    ],
)
def test_what_does_not_go_together(
    run: Run, tmp_path: Path, name: str, gpu: str, llm_args: str, pieces: list[str]
) -> None:
    target = own_profile(tmp_path, name, f"gpu: {gpu}, llm_args: {{{llm_args}}}")
    output = tmp_path / "deployment"
    build = ["build", "--executor", "trtllm", "--target", target, "-o", output]
    run(*build, "--trtllm-version", NEW).fails(2, "own.yaml, profile own", *pieces)
    assert not output.exists()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("stream_interval", ["--llm-arg", "'stream_interval' is not NAME=VALUE"]),
        ("=3", ["is not NAME=VALUE"]),
        ("stream_interval=[2", ["--llm-arg stream_interval: is not valid YAML"]),
        ("kv_cache_config=fp8", ["kv_cache_config"]),
        ("stream_interval.x=3", ["--llm-arg or qwen3-8b.yaml, prof", "stream_interval"]),
        ("kv_cache_config.tokens_per_block=33", ["--llm-arg or qwen3-8b.yaml", "33 is not a"]),
    ],
)
def test_what_the_command_line_says_of_them(
    run: Run, tmp_path: Path, text: str, pieces: list[str]
) -> None:
    run(*QWEN3, "--llm-arg", text, "-o", tmp_path / "d").fails(2, *pieces)


@given(
    st.dictionaries(st.sampled_from(["kv_cache_config", "stream_interval", "zzz"]), ANYTHING),
    st.dictionaries(st.sampled_from(["dtype", "backend", "max_concurrency", "x"]), ANYTHING),
    st.lists(st.text(max_size=20), max_size=3),
)
def test_any_options_are_one_line(
    values: dict[str, Any], fields: dict[str, Any], texts: list[str]
) -> None:
    for profile, given_texts in (
        (values, texts),
        ({SPECULATION: fields, "moe_config": fields}, []),
    ):
        try:
            read_options(profile, "own.yaml", given_texts)
        except DflashError as error:
            assert error.usage and str(error).isprintable() and len(str(error)) < 600


def test_the_batch_that_it_names_fits(run: Run, tmp_path: Path) -> None:
    target = own_profile(tmp_path, "qwen3-8b", "gpu: rtx-5090")
    own = ["build", "--executor", "trtllm", "--target", target, "-o", tmp_path / "d", "--max-batch"]
    most = int(run(*own, 1024).fails(2).split("--max-batch ")[1].split()[0])
    assert 16 < most < 128
    run(*own, most + 1).fails(2)
    run.well(*own, most)


def _check(version: str = DEFAULT_VERSION, **values: Any) -> Any:
    return check_arguments(values, find_version(version), "file.yaml").speculative_config


def test_versions_are_told_apart_by_pages() -> None:
    """Without pages of its own, one has what both its neighbours have; nobody lacks all."""
    before, between, after, last = (VERSIONS[one] for one in (OLD, PINNED, NEW, LAST))
    assert between.lacks == before.lacks | after.lacks and between.pages
    assert not before.lacks & after.lacks & last.lacks
    assert after.recomputes_tail and not (between.recomputes_tail or last.recomputes_tail)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_every_version_has(version: str) -> None:
    speculation = _check(
        version,
        model="m",
        tensor_parallel_size=8,
        moe_expert_parallel_size=8,
        print_iter_log=True,
        kv_cache_config={"dtype": "fp8", "use_uvm": False},
        cuda_graph_config={"max_batch_size": 8},
        speculative_config={**MTP, "draft_len_schedule": {4: 3, 8: 2}},
    )
    assert isinstance(speculation, MtpConfig)
    assert speculation.draft_len_schedule == {4: 3, 8: 2}
    assert _check(version, speculative_config={"decoding_type": "Eagle3"}).max_draft_len is None
    assert _check(version) is None


@pytest.mark.parametrize(
    ("version", "values", "piece"),
    [
        (NEW, {"tensor_paralel_size": 1}, "1.4.0rc1 (nearest: 'tensor_parallel_size')"),
        (
            NEW,
            {SPECULATION: {**DFLASH, "max_concurrency": 4, "draft_len_schedule": {4: 9}}},
            "max_concurrency and draft_len_schedule exclude each other",
        ),
        (OLD, {SPECULATION: {**DFLASH, "draft_len_schedule": {}}}, "at least 1 item"),
        (NEW, {SPECULATION: {**DFLASH, "max_draft_length": 1}}, "'max_draft_len'"),
        (
            OLD,
            {SPECULATION: {**DFLASH, "context_recompute_tail": -1}},
            "recompute_tail is no documented field of TensorRT-LLM 1.3.0rc27, but of 1.4.0rc1",
        ),
        (
            NEW,
            {SPECULATION: {"decoding_type": "Eagle3", "eagle_choices": []}},
            "but of 1.3.0rc27",
        ),
        (NEW, {SPECULATION: {**DFLASH, "mask_token_id": "x"}}, "mask_token_id"),
        (NEW, {SPECULATION: {"decoding_type": "SA"}}, "'DFlash', 'DSpark', 'Eagle3', 'MTP'"),
        (NEW, {SPECULATION: {**MTP, "context_recompute_tail": -1}}, "context_recompute_tail is no"),
        (OLD, {SPECULATION: {**MTP, "spec_dec_variant": 1}}, "but of 1.4.0rc1"),
        (
            OLD,
            {SPECULATION: {**DSPARK, "attention_backend": "AUTO"}},
            "AUTO is no documented value",
        ),
        (NEW, {SPECULATION: {**DSPARK, "markov_head_type": "x"}}, "markov_head_type"),
        (OLD, {SPECULATION: {**DSPARK, "moe_tactic": "x"}}, "1.3.0rc27, but of 1.4.0rc4"),
        (LAST, {SPECULATION: DFLASH}, "decoding_type DFlash is no documented value of"),
        (LAST, {SPECULATION: {**EAGLE3, "num_eagle_layers": 1}}, "rc29, 1.4.0rc1"),
        (PINNED, {SPECULATION: {**EAGLE3, "eagle_choices": []}}, "but of 1.3.0rc27"),
        (NEW, {"moe_config": {"backend": "CUTEDSL_FC12"}}, "CUTEDSL_FC12 is no documented value"),
        (NEW, {"kv_cache_config": {"disk_io_threads": 2}}, "but of 1.4.0rc4"),
        (OLD, {"cache_transceiver_config": {"agent_bounce_params": {}}}, "1.4.0rc1, 1.4.0rc4"),
        (NEW, {SPECULATION: 3}, "speculative_config"),
        (NEW, {"max_batch_size": True}, "got True"),
        (NEW, {"kv_cache_config": {"zzz": 1}}, "kv_cache_config.zzz is no field"),
        (NEW, {SPECULATION: DFLASH, "pipeline_parallel_size": 2}, "excludes speculation"),
        (
            NEW,
            {SPECULATION: DSPARK, "cache_transceiver_config": {"backend": "NIXL"}},
            "cache_transceiver_config (disaggregated serving) excludes DSpark",
        ),
        (
            NEW,
            {SPECULATION: DFLASH, "max_batch_size": 64, "max_num_tokens": 512},
            "max_num_tokens 512 is less than the 640 rows",
        ),
        (NEW, {"trust_remote_code": True}, "trust_remote_code"),
        (NEW, {SPECULATION: {**DFLASH, "target_layer_ids": [9, 1]}}, "[9, 1] do not ascend"),
    ],
)
def test_fields(version: str, values: dict[str, Any], piece: str) -> None:
    with pytest.raises(DflashError) as caught:
        _check(version, **values)
    line = str(caught.value)
    assert caught.value.usage and line.startswith("file.yaml: ") and len(line) < 400
    assert piece in line


@given(
    st.dictionaries(st.sampled_from(["kv_cache_config", "max_batch_size", "zzz"]), ANYTHING),
    st.dictionaries(st.sampled_from(["draft_len_schedule", "max_draft_len", "x"]), ANYTHING),
)
def test_any_fields_are_one_line(values: dict[str, Any], fields: dict[str, Any]) -> None:
    for one in (values, {SPECULATION: {"decoding_type": "DFlash", **fields}}):
        try:
            _check(**one)
        except DflashError as error:
            assert str(error).isprintable() and len(str(error)) < 1000


@pytest.mark.parametrize(
    ("file", "old", "new", "piece"),
    [
        ("serve/dflash.yaml", "max_draft_len: 15", "max_draft_len: 16", "a block of 17"),
        ("serve/dflash.yaml", "max_draft_len: 15", "max_draft_len: 0", "missing or 0"),
        ("serve/dflash.yaml", "max_draft_len", "max_draft_length", "nearest: 'max_draft_len'"),
        ("serve/dflash.yaml", "  context_recompute_tail: -1\n", "", "without the prompts"),
        ("serve/dflash.yaml", "seq_len: ", "seq_len: 4", "was counted for 32768"),
        ("serve/dflash.yaml", "max_seq_len: 32768\n", "", "max_seq_len missing"),
        (MODEL, "max_batch_size: 24\nmax_", "max_batch_size: 25\nmax_", "was counted for 24"),
        (MODEL, "parallel_size: 1", "parallel_size: 3", "tensor_parallel_size 3 is not 1"),
        ("serve/dflash.yaml", "  mask_token_id: 151669\n", "", "mask_token_id is missing"),
        (MODEL, "decoupled", "decoupeld", "triton_config"),
        ("serve/autoregressive.yaml", "max_seq_len", "{[", "not valid YAML"),
        ("deployment.json", '"schema_version": 2', '"schema_version": 9', "schema version 9"),
        ("deployment.json", '"max_batch": 24', '"max_batch": "x"', "max_batch"),
    ],
)
def test_edited_files(run: Run, tmp_path: Path, file: str, old: str, new: str, piece: str) -> None:
    run.well(*QWEN3, "--trtllm-version", NEW, "-o", tmp_path / "d")
    path = tmp_path / "d" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    outcome = run("inspect", tmp_path / "d")
    assert outcome.code in (1, 2)
    outcome.fails(outcome.code, file, piece)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        (
            "gpt-oss-20b",
            ["--trtllm-version", NEW],
            "a target with sliding windows does not take context_recompute_tail",
        ),
        ("qwen3-8b", ["--trtllm-version", OLD], "1.3.0rc27 has no context_recompute_tail"),
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


def test_drafts_of_deepspec(run: Run, pair: Path, tmp_path: Path) -> None:
    """DSpark lacks fields that DFlash has; a DFlash draft moved by a slot is nobody's."""
    folder = pair.parent
    table = torch.zeros(read_target(folder / "target").vocab_size, 4)
    tables = table, table.clone()
    own = ["build", "--executor", "trtllm", "--target", pair, "--profile", "one"]
    own += ["-o", tmp_path / "x", "--draft-checkpoint"]
    for name, markov, more, piece in (
        ("dspark", tables, ["--attention-backend", "FA4"], "attention_backend: Input should be"),
        (
            "dspark",
            tables,
            ["--llm-arg", f"{SPECULATION}.context_recompute_tail=64"],
            "context_recompute_tail is no field",
        ),
        ("moved", None, [], "DFlash draft moved by a slot"),
    ):
        if not (draft := tmp_path / name).exists():
            write_deepspec(draft, folder / "draft", folder / "target", markov)
        run(*own, draft, *more).fails(2, piece)
    write_speculators(draft := tmp_path / "other", folder / "draft", folder / "target")
    run(*own, draft).fails(2, "is in speculators' layout, which nothing says that TensorRT-LLM")
