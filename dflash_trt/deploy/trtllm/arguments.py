"""The LLM arguments of a deployment's variants, and the models that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.bundle.memory.served import DEFAULT_FRACTION
from dflash_trt.deploy.trtllm.deployment_plan import DeploymentPlan
from dflash_trt.deploy.trtllm.deployment_record import (
    OF_BLOCKS,
    OWN_DRAFTS,
    TITLES,
    WITHOUT_DRAFTS,
    Variant,
)
from dflash_trt.deploy.trtllm.trtllm_kernels import (
    DRAFT_PACKAGES,
    GUIDED_PACKAGES,
    REJECTION_PACKAGES,
    default_moe_backend,
)

MOUNT = "/deployment"
"""Where the YAML files expect the folder: a relative path could be taken for a hub name."""
OF_OWN_DRAFT = ("context_recompute_tail", "max_concurrency")
"""What is offered of speculative_config, but for the pair's own draft alone."""
SPLIT_PORTS = {"context": 8001, "generation": 8002}
"""Where servers of the disaggregated baseline listen; its router has the port of the others."""
MIN_NUM_TOKENS = 8192
"""Tokens of one pass, TensorRT-LLM's own default: the size of a prefill chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """One model of the deployment: a folder, whose files come along, or a hub name."""

    folder: Path | None = None
    name: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The models by role.

    `eagle3` is an EAGLE-3 draft of the same target; `precision` is of those models that were
    quantised for this deployment; `drafting` is the variant of the pair's own draft, which is None
    where that is the target's own layer; `disaggregated` adds that baseline.
    """

    target: ModelSource
    draft: ModelSource | None
    eagle3: ModelSource | None = None
    eagle3_draft_len: int = 0
    precision: Mapping[str, str]
    drafting: Variant = "dflash"
    disaggregated: bool = False

    @property
    def variants(self) -> list[Variant]:
        """Those that can be written, the baseline first."""
        without = {variant for variant in OWN_DRAFTS if variant != self.drafting}
        if self.eagle3 is None:
            without.add("eagle3")
        if not self.disaggregated:
            without.add("disaggregated")
        return [variant for variant in TITLES if variant not in without]

    @property
    def locations(self) -> dict[str, str]:
        """What the YAML files call the models, by role: hub names or mounted folders."""
        return {
            role: f"{MOUNT}/weights/{role}" if source.name is None else source.name
            for role, source in self._roles().items()
        }

    @property
    def folders(self) -> dict[str, Path]:
        """Those whose files come along."""
        roles = self._roles().items()
        return {role: source.folder for role, source in roles if source.folder is not None}

    def _roles(self) -> dict[str, ModelSource]:
        roles = {"target": self.target, "draft": self.draft, "eagle3": self.eagle3}
        return {role: source for role, source in roles.items() if source is not None}


def serve_arguments(plan: DeploymentPlan, sources: Sources, variant: Variant) -> dict[str, Any]:
    """What `trtllm-serve --config` gets; the model itself is on its command line.

    The three differ in speculation and in the memory that the KV cache may take, in nothing else.
    Back ends are written out: what AUTO takes changed between versions.
    """
    profile, block, options = plan.profile, plan.max_draft_len + 1, plan.options
    arguments: dict[str, Any] = {"tensor_parallel_size": profile.tensor_parallel}
    if profile.expert_parallel is not None:
        arguments["moe_expert_parallel_size"] = profile.expert_parallel
    if profile.nodes > 1:
        arguments["gpus_per_node"] = profile.gpus // profile.nodes
    if sources.target.revision is not None:
        arguments["revision"] = sources.target.revision
    # The baseline leaves room for recurrent states too, though it needs fewer.
    counts = variant in OF_BLOCKS or plan.memory.states > 0
    arguments |= {
        "max_batch_size": plan.max_batch,
        "max_seq_len": plan.max_seq_len,
        "max_num_tokens": max(MIN_NUM_TOKENS, plan.max_batch * block),
        "enable_chunked_prefill": True,
        "cuda_graph_config": {"max_batch_size": plan.max_batch, "enable_padding": True},
        "kv_cache_config": {
            # Where a prefix-cache hit would starve the drafter, nobody reuses prefixes.
            "enable_block_reuse": plan.recompute_tail is not None,
            "free_gpu_memory_fraction": plan.memory.fraction if counts else DEFAULT_FRACTION,
            # Rounded, a state would carry each row's error to the end of the text.
            **({"mamba_ssm_cache_dtype": "float32"} if plan.pair.target.sizes.has_state else {}),
            **options.given("kv_cache_config"),
        },
        "return_perf_metrics": True,  # or nobody would count what is accepted
        **options.given_outside(),
    }
    moe, experts = options.given("moe_config"), plan.pair.target.experts_format
    if experts is not None:
        moe = {"backend": default_moe_backend(experts, plan.gpu.arch), **moe}
    if moe:
        arguments["moe_config"] = moe
    speculation = _speculation(plan, sources, variant)
    return arguments | ({} if speculation is None else {"speculative_config": speculation})


def model_arguments(plan: DeploymentPlan, sources: Sources, variant: Variant) -> dict[str, Any]:
    """What the Triton model's model.yaml holds: the same, the model, and its own settings."""
    arguments = serve_arguments(plan, sources, variant)
    # Only trtllm-serve tells such workers where the tokenizer is.
    arguments.pop("num_postprocess_workers", None)
    return {
        "model": sources.locations["target"],
        "backend": "pytorch",
        **arguments,
        "triton_config": {"max_batch_size": 0, "decoupled": True},
    }


def split_arguments(plan: DeploymentPlan, sources: Sources) -> list[dict[str, Any]]:
    """What a context server and a generation server of the baseline get, as `yaml_files` has them.

    Context servers have no overlap scheduler (TensorRT-LLM's page on disaggregated serving).
    """
    common = serve_arguments(plan, sources, "autoregressive")
    common["cache_transceiver_config"] = {
        "backend": "DEFAULT",
        **plan.options.given("cache_transceiver_config"),
    }
    return [common | {"disable_overlap_scheduler": True}, common]


def router_file() -> dict[str, Any]:
    """What `trtllm-serve disaggregated -c` gets: one server of each kind, on this machine."""
    servers = {
        f"{role}_servers": {"num_instances": 1, "urls": [f"localhost:{port}"]}
        for role, port in SPLIT_PORTS.items()
    }
    return {"hostname": "localhost", "port": 8000, "backend": "pytorch", **servers}


def packages(plan: DeploymentPlan, variant: Variant) -> dict[str, str]:
    """What a variant imports besides TensorRT-LLM itself: modules, and where they come from."""
    options, found = plan.options, dict[str, str]()
    if plan.backend is not None and variant in OF_BLOCKS:
        found |= DRAFT_PACKAGES[plan.backend]
    if options.speculative_config.use_rejection_sampling and variant not in WITHOUT_DRAFTS:
        found |= REJECTION_PACKAGES
    if options.guided_decoding_backend is not None:
        found |= GUIDED_PACKAGES[options.guided_decoding_backend]
    return found


def _speculation(plan: DeploymentPlan, sources: Sources, variant: Variant) -> dict[str, Any] | None:
    if variant in WITHOUT_DRAFTS:
        return None
    given = plan.options.given("speculative_config")
    own = {name: given.pop(name, None) for name in OF_OWN_DRAFT}
    if variant == "eagle3":
        return {
            "decoding_type": "Eagle3",
            "max_draft_len": sources.eagle3_draft_len,
            "speculative_model": sources.locations["eagle3"],
            **given,
        }
    draft = plan.pair.draft
    speculation: dict[str, Any] = {
        "decoding_type": "MTP" if variant == "mtp" else "DFlash",
        "max_draft_len": plan.max_draft_len,
    }
    if variant in OF_BLOCKS:
        speculation |= {
            "speculative_model": sources.locations["draft"],
            "target_layer_ids": list(draft.target_layer_ids),
            "mask_token_id": draft.mask_token_id,
            "attention_backend": plan.backend,
        }
    speculation |= given
    if draft.markov_rank:
        speculation |= {
            "decoding_type": "DSpark",
            "block_size": draft.block_size - 1,  # of slots, as the checkpoint has it
            "markov_rank": draft.markov_rank,
            "markov_head_type": "vanilla",
        }
    if own["max_concurrency"] is not None:
        speculation["max_concurrency"] = own["max_concurrency"]
    if plan.schedule is not None:
        speculation["draft_len_schedule"] = plan.schedule
    if plan.recompute_tail is not None:
        speculation["context_recompute_tail"] = plan.recompute_tail
    return speculation
