"""The LLM arguments of a deployment's variants: DFlash, EAGLE-3 and autoregressive decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dflash_trt.memory.deployment import DEFAULT_FRACTION
from dflash_trt.trtllm.plan import DeploymentPlan

Variant = Literal["autoregressive", "eagle3", "dflash"]
TITLES: dict[Variant, str] = {
    "autoregressive": "autoregressive decoding",
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
}
MIN_NUM_TOKENS = 8192
"""Tokens of one pass, TensorRT-LLM's own default: the size of a prefill chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What TensorRT-LLM loads: hub names, or folders as the running server sees them.

    `eagle3` is an EAGLE-3 draft of the same target and its `eagle3_draft_len`.
    """

    target: str
    draft: str
    target_revision: str | None = None
    eagle3: str | None = None
    eagle3_draft_len: int = 0

    @property
    def variants(self) -> list[Variant]:
        """Those that can be written, the baseline first."""
        return ["autoregressive", *(["eagle3"] if self.eagle3 else []), "dflash"]  # type: ignore[list-item]


def serve_arguments(plan: DeploymentPlan, models: Models, variant: Variant) -> dict[str, Any]:
    """What `trtllm-serve --config` gets; the model itself is on its command line.

    The three differ in speculation and in the memory that the KV cache may take, in nothing else.
    """
    profile, block = plan.profile, plan.max_draft_len + 1
    arguments: dict[str, Any] = {"tensor_parallel_size": profile.tensor_parallel}
    if profile.expert_parallel is not None:
        arguments["moe_expert_parallel_size"] = profile.expert_parallel
    if profile.nodes > 1:
        arguments["gpus_per_node"] = profile.gpus // profile.nodes
    if models.target_revision is not None:
        arguments["revision"] = models.target_revision
    arguments |= {
        "max_batch_size": plan.max_batch,
        "max_seq_len": plan.max_seq_len,
        "max_num_tokens": max(MIN_NUM_TOKENS, plan.max_batch * block),
        "enable_chunked_prefill": True,
        "cuda_graph_config": {"max_batch_size": plan.max_batch, "enable_padding": True},
        "kv_cache_config": {
            # Where a prefix-cache hit would starve the drafter, nobody reuses prefixes.
            "enable_block_reuse": plan.version.recomputes_tail,
            "free_gpu_memory_fraction": (
                plan.memory.fraction if variant == "dflash" else DEFAULT_FRACTION
            ),
        },
    }
    speculation = _speculation(plan, models, variant)
    return arguments | ({} if speculation is None else {"speculative_config": speculation})


def model_arguments(plan: DeploymentPlan, models: Models, variant: Variant) -> dict[str, Any]:
    """What the Triton model's model.yaml holds: the same, the model, and its own settings."""
    return {
        "model": models.target,
        "backend": "pytorch",
        **serve_arguments(plan, models, variant),
        "triton_config": {"max_batch_size": 0, "decoupled": True},
    }


def _speculation(plan: DeploymentPlan, models: Models, variant: Variant) -> dict[str, Any] | None:
    if variant == "autoregressive":
        return None
    if variant == "eagle3":
        return {
            "decoding_type": "Eagle3",
            "max_draft_len": models.eagle3_draft_len,
            "speculative_model": models.eagle3,
        }
    speculation: dict[str, Any] = {
        "decoding_type": "DFlash",
        "max_draft_len": plan.max_draft_len,
        "speculative_model": models.draft,
        "attention_backend": plan.backend,
    }
    if plan.schedule is not None:
        speculation["draft_len_schedule"] = plan.schedule
    if plan.recompute_tail is not None:
        speculation["context_recompute_tail"] = plan.recompute_tail
    return speculation
