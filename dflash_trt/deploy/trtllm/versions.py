"""The TensorRT-LLM versions that deployments are written for."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.errors import DflashError, nearest, one_line


@dataclass(frozen=True, slots=True)
class Version:
    """One release.

    `recomputes_tail` says that its drafter can be fed again after a prefix-cache hit
    (`context_recompute_tail`); without that a hit starves it, so prefixes are not reused.
    `lacks` has the fields, and values of fields, that pages of another version document, but none
    of this one; those of a section after its name and a point, those of a speculative_config after
    its decoding_type. `pages` says whose pages, where it has none of its own.
    """

    name: str
    lacks: frozenset[str]
    pages: str = ""

    @property
    def recomputes_tail(self) -> bool:
        return not self.lacks & {"DFlash", "DFlash.context_recompute_tail"}

    @property
    def documented(self) -> str:
        """The fields that deployments are checked against, and whose pages have them."""
        if not self.pages:
            return f"the fields that TensorRT-LLM {self.name} documents"
        both = f"the fields that TensorRT-LLM {self.pages} both document"
        return f"{both} ({self.name} has no pages of its own)"

    @property
    def image(self) -> str:
        """NVIDIA's container of this release."""
        return f"nvcr.io/nvidia/tensorrt-llm/release:{self.name}"


_KINDS = ("DFlash", "DSpark", "Eagle3", "MTP")
_SINCE_1_4 = {
    *(f"{kind}.{name}" for kind in _KINDS for name in ("moe_backend", "spec_dec_variant")),
    *"iter_perf_stats_interval DFlash.context_recompute_tail "
    "DFlash.skip_ctx_buffer_budget_check DSpark.attention_backend=AUTO "
    "DSpark.attention_backend=CUTEDSL cache_transceiver_config.agent_bounce_buffer_enable "
    "cache_transceiver_config.agent_bounce_params".split(),
}
_SINCE_RC4 = {
    *(f"{kind}.moe_tactic" for kind in _KINDS),
    *"DSpark.enable_confidence_scheduling DSpark.confidence_cost_table_path "
    "DSpark.confidence_calibration_path DSpark.confidence_min_predicted_gain "
    "DSpark.enable_fused_confidence_scheduler MTP.draft_lm_head_dtype MTP.draft_moe_dtype "
    "moe_config.tactic moe_config.megamoe_fuse_shared_expert moe_config.backend=CUTEDSL_FC12 "
    "kv_cache_config.host_cache_bind_to_gpu_numa_node kv_cache_config.disk_io_threads "
    "kv_cache_config.disk_keep_copy_after_restore kv_cache_config.disk_write_through "
    "kv_cache_config.disk_protected_copy_fraction "
    "kv_cache_config.cold_tier_offload_min_priority "
    "kv_cache_config.mixed_precision_first_n".split(),
}
_CHOICES, _AROUND = {"Eagle3.eagle_choices"}, "1.3.0rc27 and 1.4.0rc1"
_ALL = (
    Version("1.3.0rc27", frozenset(_SINCE_1_4 | _SINCE_RC4)),
    Version("1.3.0rc29", frozenset(_SINCE_1_4 | _SINCE_RC4 | _CHOICES), _AROUND),
    Version("1.4.0rc1", frozenset(_SINCE_RC4 | _CHOICES)),
    # Its page of DFlashDecodingConfig could not be had.
    Version("1.4.0rc4", frozenset({"DFlash", "Eagle3.num_eagle_layers"} | _CHOICES)),
)
VERSIONS = {one.name: one for one in _ALL}
DEFAULT_VERSION = "1.3.0rc29"
"""The one that Dynamo 1.6 pins."""


def find_version(name: str) -> Version:
    """The version called `name`.

    Raises:
        DflashError: its fields are not known here; names the nearest.
    """
    if name not in VERSIONS:
        raise DflashError(
            f"the fields of TensorRT-LLM {one_line(name, 40)!r} are not known"
            f"{nearest(name, list(VERSIONS))}",
            where="--trtllm-version",
            fix=f"choose one of {', '.join(VERSIONS)}",
            usage=True,
        )
    return VERSIONS[name]
