"""The documented fields by version, and what TensorRT-LLM's own classes add where they are."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, create_model

from dflash_trt.deploy.trtllm.deployment_rules import check_draft_length
from dflash_trt.deploy.trtllm.schema import DFlashConfig, check_arguments
from dflash_trt.deploy.trtllm.versions import (
    DEFAULT_VERSION,
    VERSIONS,
    check_natively,
    find_version,
    load_native,
)
from dflash_trt.errors import DflashError
from tests.trtllm.conftest import QWEN3

OLD, NEW = "1.3.0rc27", "1.4.0rc1"
DFLASH = {"decoding_type": "DFlash", "max_draft_len": 9, "speculative_model": "z-lab/x"}
DSPARK = {"decoding_type": "DSpark", "max_draft_len": 7, "speculative_model": "x/y"}


def _check(version: str = DEFAULT_VERSION, **values: Any) -> Any:
    return check_arguments(values, find_version(version), "file.yaml")


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
        speculative_config={**DFLASH, "draft_len_schedule": {4: 9, 8: 2}},
    )
    assert isinstance(speculation, DFlashConfig)
    assert speculation.draft_len_schedule == {4: 9, 8: 2}
    assert _check(version, speculative_config={"decoding_type": "Eagle3"}).max_draft_len is None
    assert _check(version) is None


@pytest.mark.parametrize(
    ("version", "values", "pieces"),
    [
        (NEW, {"tensor_paralel_size": 1}, ["1.4.0rc1 (nearest: 'tensor_parallel_size')"]),
        (
            NEW,
            {"speculative_config": {**DFLASH, "max_concurrency": 4, "draft_len_schedule": {4: 9}}},
            ["max_concurrency and draft_len_schedule exclude each other"],
        ),
        (
            OLD,
            {"speculative_config": {**DFLASH, "draft_len_schedule": {}}},
            ["speculative_config.draft_len_schedule: ", "at least 1 item"],
        ),
        (NEW, {"speculative_config": {**DFLASH, "max_draft_length": 1}}, ["'max_draft_len'"]),
        (
            OLD,
            {"speculative_config": {**DFLASH, "context_recompute_tail": -1}},
            ["context_recompute_tail is no field of TensorRT-LLM 1.3.0rc27; 1.4.0rc1 has it"],
        ),
        (
            NEW,
            {"speculative_config": {"decoding_type": "Eagle3", "eagle_choices": []}},
            ["no field of TensorRT-LLM 1.4.0rc1; 1.3.0rc27 has it"],
        ),
        (OLD, {"iter_perf_stats_interval": 4}, ["1.4.0rc1 has it"]),
        (NEW, {"speculative_config": {**DFLASH, "mask_token_id": "x"}}, ["mask_token_id"]),
        (NEW, {"speculative_config": {"decoding_type": "MTP"}}, ["'DFlash', 'DSpark', 'Eagle3'"]),
        (
            OLD,
            {"speculative_config": {**DSPARK, "attention_backend": "AUTO"}},
            ["AUTO is no value"],
        ),
        (
            OLD,
            {"speculative_config": {**DSPARK, "spec_dec_variant": 1}},
            ["1.4.0rc1 has it"],
        ),
        (NEW, {"speculative_config": {**DSPARK, "markov_head_type": "x"}}, ["markov_head_type"]),
        (NEW, {"speculative_config": 3}, ["speculative_config"]),
        (NEW, {"max_batch_size": True}, ["max_batch_size", "got True"]),
        (NEW, {"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, ["less than or equal"]),
        (NEW, {"kv_cache_config": {"zzz": 1}}, ["kv_cache_config.zzz is no field"]),
        (
            NEW,
            {"speculative_config": DFLASH, "pipeline_parallel_size": 2},
            ["pipeline_parallel_size 2 excludes speculation"],
        ),
        (
            NEW,
            {"speculative_config": DFLASH, "cache_transceiver_config": {"backend": "NIXL"}},
            ["cache_transceiver_config (disaggregated serving) excludes DFlash"],
        ),
        (
            OLD,
            {"speculative_config": DSPARK, "cache_transceiver_config": {"backend": "UCX"}},
            ["excludes DSpark"],
        ),
        (
            NEW,
            {"speculative_config": DFLASH, "max_batch_size": 64, "max_num_tokens": 512},
            ["max_num_tokens 512 is less than the 640 rows"],
        ),
        (NEW, {"triton_config": {"max_batch_size": 8, "decoupled": True}}, ["got 8"]),
        (NEW, {"trust_remote_code": True}, ["trust_remote_code"]),
        (NEW, {"guided_decoding_backend": "outlines"}, ["'xgrammar' or 'llguidance'"]),
        (NEW, {"enable_attention_dp": True}, ["as many moe_expert_parallel_size"]),
        (
            NEW,
            {"enable_attention_dp": True, "tensor_parallel_size": 8, "moe_expert_parallel_size": 4},
            ["tensor_parallel_size, 8"],
        ),
        (NEW, {"kv_cache_config": {"tokens_per_block": 24}}, ["24 is not a power of two"]),
        (
            NEW,
            {"speculative_config": {**DFLASH, "target_layer_ids": [9, 1]}},
            ["target_layer_ids [9, 1] do not ascend"],
        ),
    ],
)
def test_mistakes(version: str, values: dict[str, Any], pieces: list[str]) -> None:
    with pytest.raises(DflashError) as caught:
        _check(version, **values)
    line = str(caught.value)
    assert caught.value.usage and line.startswith("file.yaml: ") and len(line) < 400
    for piece in pieces:
        assert piece in line


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = ["speculative_config", "kv_cache_config", "max_batch_size", "triton_config", "zzz"]


@given(
    st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=3),
    st.dictionaries(st.sampled_from(["draft_len_schedule", "max_draft_len", "x"]), ANYTHING),
)
def test_anything_else_is_one_line(values: dict[str, Any], fields: dict[str, Any]) -> None:
    for one in (values, {"speculative_config": {"decoding_type": "DFlash", **fields}}):
        try:
            _check(**one)
        except DflashError as error:
            assert str(error).isprintable() and len(str(error)) < 1000


@pytest.mark.parametrize(
    ("fields", "piece"),
    [
        ({"max_draft_len": 10}, "max_draft_len 10 needs a block of 11, the draft was trained with"),
        ({"max_draft_len": 0}, "missing or 0"),
        ({"max_draft_len": None}, "missing or 0"),
        ({"draft_len_schedule": {4: 4, 8: 2}}, "begins with 4 drafts"),
        ({"draft_len_schedule": {4: 9, 8: 12}}, "asks for 12 drafts"),
    ],
)
def test_draft_lengths(fields: dict[str, Any], piece: str) -> None:
    with pytest.raises(DflashError, match=piece.replace("(", r"\(")):
        check_draft_length(_check(speculative_config={**DFLASH, **fields}), 10, "file.yaml")


def _stand_in(version: str) -> tuple[ModuleType, ModuleType]:
    """`tensorrt_llm` as far as it is asked: classes that forbid what they do not know."""

    class Strict(BaseModel):
        model_config = ConfigDict(extra="forbid")

    class DFlashDecodingConfig(Strict):
        decoding_type: str
        max_draft_len: int
        speculative_model: str

    class KvCacheConfig(Strict):
        enable_block_reuse: bool

    class TorchLlmArgs(Strict):
        tensor_parallel_size: int = Field(default=1, gt=0)
        kv_cache_config: KvCacheConfig
        speculative_config: DFlashDecodingConfig

    package, llmapi = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    package.__dict__["__version__"] = version
    for one in (DFlashDecodingConfig, KvCacheConfig, TorchLlmArgs):
        llmapi.__dict__[one.__name__] = one
    return package, llmapi


def test_tensorrt_llms_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    version = find_version("1.4.0rc1")
    assert load_native(version) is None  # not installed
    for installed in ("1.3.0rc27", "1.4.0rc1"):
        package, llmapi = _stand_in(installed)
        monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
        monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", llmapi)
        assert (load_native(version) is llmapi) == (installed == version.name)
    check_natively(llmapi, {"tensor_parallel_size": 8, "speculative_config": DFLASH}, "f")
    for values, piece in (
        ({"tensor_parallel": 8}, "has no field 'tensor_parallel'"),
        ({"tensor_parallel_size": 0}, "refuses tensor_parallel_size"),
        ({"kv_cache_config": {"enable_block_reuse": "?"}}, "refuses kv_cache_config"),
        ({"speculative_config": {**DFLASH, "mask_token_id": 3}}, "refuses speculative_config"),
    ):
        with pytest.raises(DflashError, match=piece) as caught:
            check_natively(llmapi, values, "f")
        assert "\n" not in str(caught.value) and "installed here" in str(caught.value)


def test_a_build_asks_them(monkeypatch: pytest.MonkeyPatch, run: Any, tmp_path: Any) -> None:
    package, llmapi = _stand_in(DEFAULT_VERSION)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", llmapi)
    output = tmp_path / "deployment"
    run(*QWEN3, "-o", output).fails(2, "the tensorrt_llm installed here has no field")
    assert not output.exists()


def test_a_build_beside_tensorrt_llm_looks_for_its_packages(
    monkeypatch: pytest.MonkeyPatch, run: Any, tmp_path: Any
) -> None:
    class Anything(BaseModel):
        model_config = ConfigDict(extra="allow")

    written = (
        "model tensor_parallel_size max_batch_size max_seq_len max_num_tokens cuda_graph_config "
        "enable_chunked_prefill kv_cache_config speculative_config"
    )
    fields: dict[str, Any] = dict.fromkeys(written.split(), (Any, None))
    package, llmapi = _stand_in(DEFAULT_VERSION)
    for name in ("DFlashDecodingConfig", "KvCacheConfig", "CudaGraphConfig"):
        llmapi.__dict__[name] = Anything
    llmapi.__dict__["TorchLlmArgs"] = create_model("TorchLlmArgs", **fields)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", llmapi)
    built = run(*QWEN3, "-o", tmp_path / "without")
    assert "note: flashinfer cannot be imported here; attention backend TRTLLM needs" in built.err
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    built = run(*QWEN3, "-o", tmp_path / "with")
    assert built.code == 0 and "and its own classes" in built.out and "note" not in built.err
