"""The TensorRT-LLM versions that deployments are written for."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.errors import DflashError, nearest, one_line


@dataclass(frozen=True, slots=True)
class Version:
    """One release.

    `recomputes_tail` says that its drafter can be fed again after a prefix-cache hit
    (`context_recompute_tail`); without that a hit starves it, so prefixes are not reused.
    `lacks` has the fields, and values of fields, that only another version documents; those of a
    speculative_config with its decoding_type before them.
    """

    name: str
    lacks: frozenset[str]

    @property
    def recomputes_tail(self) -> bool:
        return "DFlash.context_recompute_tail" not in self.lacks

    @property
    def image(self) -> str:
        """NVIDIA's container of this release."""
        return f"nvcr.io/nvidia/tensorrt-llm/release:{self.name}"


_NEW_IN_1_4 = (
    "iter_perf_stats_interval DFlash.moe_backend DFlash.spec_dec_variant "
    "DFlash.context_recompute_tail DFlash.skip_ctx_buffer_budget_check DSpark.moe_backend "
    "DSpark.spec_dec_variant DSpark.attention_backend=AUTO DSpark.attention_backend=CUTEDSL "
    "Eagle3.moe_backend Eagle3.spec_dec_variant MTP.moe_backend MTP.spec_dec_variant"
)
VERSIONS = {
    "1.3.0rc27": Version("1.3.0rc27", frozenset(_NEW_IN_1_4.split())),
    "1.4.0rc1": Version("1.4.0rc1", frozenset({"Eagle3.eagle_choices"})),
}
DEFAULT_VERSION = "1.4.0rc1"


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
