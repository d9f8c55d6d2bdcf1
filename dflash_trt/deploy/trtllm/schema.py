"""The fields of TensorRT-LLM's LLM arguments: what its documentation lists.

What one of the versions lacks stands in `versions.py`.

Sources: the LLM-API reference of each version for DFlashDecodingConfig, DSparkDecodingConfig,
Eagle3DecodingConfig, MTPDecodingConfig, MoeConfig, KvCacheConfig and CacheTransceiverConfig; for
all versions 1.3.0rc27's DecodeCudaGraphConfig, and an undated telemetry manifest of the project for
the names of TorchLlmArgs and of the rest of KvCacheConfig; the page on disaggregated serving for
the router's file. Other fields are refused here because TensorRT-LLM's own classes refuse them only
once a GPU waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dflash_trt.core.validation import Location, StrictRecord, validate
from dflash_trt.deploy.trtllm.versions import VERSIONS, Version
from dflash_trt.errors import DflashError, nearest

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PAGE_TOKENS = 32
"""`tokens_per_block` where it is left out."""
AttentionBackend = Literal["VANILLA", "TRTLLM", "FA4"]
ATTENTION_BACKENDS: tuple[AttentionBackend, ...] = ("VANILLA", "TRTLLM", "FA4")
MoeBackend = Literal[
    "AUTO", "CUTLASS", "CUTEDSL", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "VANILLA", "TRITON",
    "MARLIN", "MEGAMOE_DEEPGEMM", "MEGAMOE_CUTEDSL",
]  # fmt: skip
AnyMoeBackend = MoeBackend | Literal["CUTEDSL_FC12"]
DSparkBackend = Literal["AUTO", "VANILLA", "TRTLLM", "CUTEDSL"]


class Section(StrictRecord):
    """Part of the arguments: unknown names and values of another type are refused.

    Names in `untyped` are known too; their values, of no interest here, are not checked.
    """

    untyped: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_untyped(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: one for name, one in values.items() if name not in cls.untyped.split()}


class Speculation(Section):
    """What every speculative_config has (DecodingBaseConfig)."""

    max_draft_len: NonNegative | None = None
    speculative_model: str | None = None
    max_concurrency: Positive | None = None
    draft_len_schedule: Annotated[dict[Positive, NonNegative], Field(min_length=1)] | None = None
    use_rejection_sampling: bool = False
    enable_penalty: bool = False
    moe_backend: AnyMoeBackend | None = None
    spec_dec_variant: Positive | None = None
    untyped: ClassVar[str] = (
        "max_total_draft_tokens load_format acceptance_rate_window_size acceptance_rate_threshold "
        "allow_advanced_sampling advanced_sampling_mode moe_tactic "
    )


class DFlashConfig(Speculation):
    """DFlashDecodingConfig.

    `context_recompute_tail` is how many prompt tokens at least are computed again after a
    prefix-cache hit, so that the drafter sees their hidden states; -1 is all of them.
    """

    decoding_type: Literal["DFlash"]
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    attention_backend: AttentionBackend = "VANILLA"
    context_recompute_tail: Annotated[int, Field(ge=-1)] | None = None
    untyped: ClassVar[str] = Speculation.untyped + "skip_ctx_buffer_budget_check"


class DSparkConfig(Speculation):
    """DSparkDecodingConfig.

    `block_size` counts the slots, each of which drafts; what is left out is read of the draft's
    config.json, where that is a folder.
    """

    decoding_type: Literal["DSpark"]
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    block_size: Positive | None = None
    markov_rank: int | None = None
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    attention_backend: DSparkBackend = "AUTO"
    untyped: ClassVar[str] = Speculation.untyped + (
        "enable_confidence_scheduling confidence_cost_table_path confidence_calibration_path "
        "confidence_min_predicted_gain enable_fused_confidence_scheduler"
    )


BlockDrafts = DFlashConfig | DSparkConfig
"""Of a draft that fills a block from tapped layers of the target."""


class Eagle3Config(Speculation):
    """Eagle3DecodingConfig."""

    decoding_type: Literal["Eagle3"]
    untyped: ClassVar[str] = Speculation.untyped + (
        "use_dynamic_tree dynamic_tree_max_topK num_eagle_layers max_non_leaves_per_layer "
        "eagle3_layers_to_capture eagle3_model_arch sa_config eagle_choices"
    )


class MtpConfig(Speculation):
    """MTPDecodingConfig: the layer in the target's own checkpoint, run once a draft."""

    decoding_type: Literal["MTP"]
    untyped: ClassVar[str] = Speculation.untyped + (
        "use_relaxed_acceptance_for_thinking relaxed_topk relaxed_delta use_mtp_vanilla "
        "use_dynamic_tree dynamic_tree_max_topK sa_config num_nextn_predict_layers "
        "begin_thinking_phase_token end_thinking_phase_token draft_lm_head_dtype draft_moe_dtype"
    )


class CudaGraphs(Section):
    """DecodeCudaGraphConfig."""

    batch_sizes: list[Positive] | None = None
    max_batch_size: NonNegative = 0
    enable_padding: bool = False
    mode: Literal["decode"] = "decode"


class Moe(Section):
    """MoeConfig."""

    backend: AnyMoeBackend = "AUTO"
    untyped: ClassVar[str] = (
        "max_num_tokens load_balancer disable_finalize_fusion use_low_precision_moe_combine "
        "tactic megamoe_fuse_shared_expert"
    )


class KvCache(Section):
    """KvCacheConfig."""

    enable_block_reuse: bool = True
    free_gpu_memory_fraction: Fraction | None = 0.9
    dtype: Literal["auto", "float16", "bfloat16", "float32", "fp8", "fp8_ds_mla", "nvfp4"] = "auto"
    tokens_per_block: Positive = PAGE_TOKENS
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    untyped: ClassVar[str] = (
        "enable_partial_reuse max_tokens host_cache_size "
        "attention_dp_events_gather_period_ms avg_seq_len block_reuse_config copy_on_partial_reuse "
        "cross_kv_cache_fraction disk_cache_path disk_cache_size disk_prefetch_num_reqs "
        "enable_kv_pool_rebalance enable_swa_scratch_reuse event_buffer_max_size "
        "fp8_context_mla_kv_len_cap iteration_stats_interval kv_cache_event_hash_algo "
        "kv_events_config kv_pool_rebalance_check_interval kv_pool_rebalance_cooldown_secs "
        "kv_pool_rebalance_min_sampled_kv_caches kv_pool_rebalance_moving_average_decay "
        "kv_pool_rebalance_ratio_threshold kv_pool_rebalance_target_ratio_update_interval "
        "mamba_ssm_philox_rounds mamba_ssm_stochastic_rounding "
        "mamba_state_cache_interval mamba_state_config max_attention_window max_gpu_total_bytes "
        "max_util_for_resume pool_ratio secondary_offload_min_priority sink_token_length "
        "use_kv_cache_manager_v2 use_uvm host_cache_bind_to_gpu_numa_node disk_io_threads "
        "disk_keep_copy_after_restore disk_write_through disk_protected_copy_fraction "
        "cold_tier_offload_min_priority mixed_precision_first_n"
    )


class Transceiver(Section):
    """CacheTransceiverConfig: how a context server's KV cache gets to a generation server."""

    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    max_tokens_in_buffer: Positive | None = None
    untyped: ClassVar[str] = (
        "transceiver_runtime kv_transfer_timeout_ms kv_transfer_sender_future_timeout_ms "
        "kv_transfer_poll_interval_ms kv_cache_bounce_size_mb enable_pipelined_transfer "
        "agent_bounce_buffer_enable agent_bounce_params"
    )


class _TritonConfig(Section):
    """What the Triton model reads of model.yaml itself."""

    max_batch_size: Literal[0]
    decoupled: bool
    untyped: ClassVar[str] = "cancellation_check_period_ms"


class Arguments(Section):
    """TorchLlmArgs, and the Triton model's own settings."""

    model: str | None = None
    backend: Literal["pytorch"] = "pytorch"
    revision: str | None = None
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    moe_expert_parallel_size: Positive | None = None
    gpus_per_node: Positive | None = None
    max_batch_size: Positive | None = None
    max_seq_len: Positive | None = None
    max_num_tokens: Positive | None = None
    enable_chunked_prefill: bool = False
    enable_attention_dp: bool = False
    disable_overlap_scheduler: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    reasoning_parser: str | None = None
    stream_interval: Positive = 1
    trust_remote_code: Literal[False] = False
    num_postprocess_workers: NonNegative = 0
    return_perf_metrics: bool = False
    cache_transceiver_config: Transceiver | None = None
    cuda_graph_config: CudaGraphs | None = None
    kv_cache_config: KvCache | None = None
    moe_config: Moe | None = None
    speculative_config: (
        Annotated[
            DFlashConfig | DSparkConfig | Eagle3Config | MtpConfig,
            Field(discriminator="decoding_type"),
        ]
        | None
    ) = None
    triton_config: _TritonConfig | None = None
    untyped: ClassVar[str] = (
        "allreduce_strategy attention_dp_config attn_backend batch_wait_max_tokens_ratio "
        "batch_wait_timeout_iters batch_wait_timeout_ms batched_logits_processor "
        "moe_tensor_parallel_size checkpoint_format checkpoint_io_policy context_parallel_size "
        "cp_config custom_tokenizer disable_mm_encoder dwdp_config "
        "enable_autotuner enable_early_first_token_response "
        "enable_encoder_decoder_mixed_cuda_graph enable_energy_metrics enable_in_graph_sampling "
        "enable_iter_perf_stats enable_iter_req_stats enable_layerwise_nvtx_marker "
        "enable_lm_head_tp_in_adp enable_lora enable_low_latency_host_dispatch enable_min_latency "
        "enable_mla_skip_correction enable_resource_governor enable_speculative_beam_history_d2h "
        "encode_only encoder_cuda_graph_config encoder_max_batch_size encoder_max_num_tokens "
        "force_dynamic_quantization garbage_collection_gen0_threshold gather_generation_logits "
        "generation_config gms_config iter_perf_stats_interval iter_stats_max_iterations "
        "kv_cache_compression_config kv_connector_config layer_wise_benchmarks_config load_format "
        "lora_config max_beam_width max_input_len max_stats_len mla_skip_correction_threshold "
        "mm_encoder_only model_kwargs moe_cluster_parallel_size multimodal_config mx_config "
        "num_serve_frontends nvfp4_gemm_config orchestrator_type "
        "peft_cache_config perf_metrics_max_requests post_processor_hook postprocess_tokenizer_dir "
        "pp_partition prefill_capture_num_tokens prefill_cuda_graph_backend print_iter_log "
        "prometheus_metrics_config ray_placement_config reorder_policy_config "
        "request_stats_max_iterations sampler_force_async_worker "
        "scheduler_config skip_tokenizer_init sparse_attention_config telemetry_config tokenizer "
        "tokenizer_mode tokenizer_revision torch_compile_config "
        "use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm use_cute_dsl_blockscaling_bmm "
        "use_cute_dsl_blockscaling_mm use_fine_grained_sync"
    )


class Servers(Section):
    """The servers of one role: where they listen, as host:port."""

    num_instances: Positive
    urls: list[Annotated[str, Field(pattern=r"^[^:/ ]+:\d{1,5}\z")]]
    untyped: ClassVar[str] = "router"

    @model_validator(mode="after")
    def _each_has_an_address(self) -> Self:
        if len(self.urls) != self.num_instances:
            raise ValueError(f"{len(self.urls)} urls for num_instances {self.num_instances}")
        return self


class Router(Section):
    """What `trtllm-serve disaggregated -c` reads: its own address and its servers."""

    hostname: str = "localhost"
    port: Annotated[int, Field(gt=0, lt=1 << 16)] = 8000
    backend: Literal["pytorch"] = "pytorch"
    context_servers: Servers
    generation_servers: Servers
    untyped: ClassVar[str] = (
        "max_retries perf_metrics_max_requests conditional_disagg_config disagg_cluster"
    )


def check_arguments(values: Mapping[str, Any], version: Version, where: str | Path) -> Arguments:
    """Checks LLM arguments against what `version` documents; returns them.

    Raises:
        DflashError: an unknown field, with the nearest or the version that has it; a value that
            the field does not take; fields that exclude each other (usage).
    """

    def unknown(key: str, location: Location, known: list[str]) -> str:
        hint = nearest(str(location[-1]), known)
        return f"{key} is no field of TensorRT-LLM {version.name}{hint}"

    checked = validate(Arguments, values, where, usage=True, unknown=unknown)
    for mistake in (*_of_another_version(values, version), *_mistakes(checked)):
        raise DflashError(mistake, where=where, usage=True)
    return checked


def _of_another_version(values: Mapping[str, Any], version: Version) -> Iterator[str]:
    """Fields, and values of fields, that only pages of another version document."""
    stated = {name: name for name in values}
    for section, fields in values.items():
        if not isinstance(fields, Mapping):
            continue
        prefix = section
        if section == "speculative_config":
            prefix = str(fields.get("decoding_type"))
            stated[prefix] = f"{section}.decoding_type {prefix}"
        for name, value in fields.items():
            stated[f"{prefix}.{name}"] = f"{section}.{name}"
            stated[f"{prefix}.{name}={value}"] = f"{section}.{name} {value}"
    for name in sorted(version.lacks & stated.keys()):
        others = ", ".join(one.name for one in VERSIONS.values() if name not in one.lacks)
        shown = "value" if " " in stated[name] else "field"
        not_of = f"is no documented {shown} of TensorRT-LLM {version.name}"
        yield f"{stated[name]} {not_of}, but of {others}"


def _mistakes(arguments: Arguments) -> Iterator[str]:
    """Values that do not go together, with speculation or without."""
    cache = arguments.kv_cache_config
    page = PAGE_TOKENS if cache is None else cache.tokens_per_block
    if page & (page - 1):
        yield f"tokens_per_block {page} is not a power of two"
    ways, experts = arguments.tensor_parallel_size, arguments.moe_expert_parallel_size
    if arguments.enable_attention_dp and (ways == 1 or experts != ways):
        yield (
            f"enable_attention_dp needs as many moe_expert_parallel_size as tensor_parallel_size, "
            f"{ways}, and more than one"
        )
    if (speculation := arguments.speculative_config) is None:
        return
    # By TensorRT-LLM's feature matrix and its own checks.
    if arguments.pipeline_parallel_size > 1:
        yield f"pipeline_parallel_size {arguments.pipeline_parallel_size} excludes speculation"
    transceiver = arguments.cache_transceiver_config
    if transceiver is not None and isinstance(speculation, BlockDrafts):
        # TensorRT-LLM issue 19352: the generation server never gets the drafter's context, and
        # almost nothing that it drafts is accepted.
        yield (
            f"cache_transceiver_config (disaggregated serving) excludes {speculation.decoding_type}"
            ": the drafter's context stays on the context server"
        )
    rows = (arguments.max_batch_size or 0) * ((speculation.max_draft_len or 0) + 1)
    if arguments.max_num_tokens is not None and rows > arguments.max_num_tokens:
        yield (
            f"max_num_tokens {arguments.max_num_tokens} is less than the {rows} rows of a verify "
            "step (max_batch_size × (max_draft_len + 1))"
        )
    if speculation.max_concurrency is not None and speculation.draft_len_schedule is not None:
        yield "max_concurrency and draft_len_schedule exclude each other"
    if speculation.use_rejection_sampling and arguments.guided_decoding_backend is not None:
        yield "guided_decoding_backend and use_rejection_sampling exclude each other"
    tail = getattr(speculation, "context_recompute_tail", None)
    if tail is not None and arguments.max_seq_len is not None and tail > arguments.max_seq_len:
        yield f"context_recompute_tail {tail} is more than max_seq_len {arguments.max_seq_len}"
    ids = getattr(speculation, "target_layer_ids", None)
    if ids is not None and sorted(set(ids)) != ids:
        # TensorRT-LLM hands the layers over in ascending order, whatever the draft was trained on.
        yield f"target_layer_ids {ids} do not ascend"
