"""LLM arguments that a profile or `--llm-arg` sets: which there are, and of what type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_trt.core.limits import MAX_COUNT
from dflash_trt.core.validation import Location, validate
from dflash_trt.core.yaml_files import parse_yaml
from dflash_trt.deploy.trtllm.schema import PAGE_TOKENS, MoeBackend, Section
from dflash_trt.errors import DflashError, nearest, one_line

Bounded = Annotated[int, Field(gt=0, le=MAX_COUNT)]
OPTION = "--llm-arg"


class KvCacheOptions(Section):
    """Of the target's KV cache; a draft's context is in bf16 whatever this says."""

    dtype: Literal["auto", "float16", "bfloat16", "fp8", "nvfp4"] = "auto"
    tokens_per_block: Bounded = PAGE_TOKENS


class MoeOptions(Section):
    """What multiplies the experts."""

    backend: MoeBackend = "AUTO"


class SpeculationOptions(Section):
    """Of both drafters, but for `max_concurrency` and `context_recompute_tail`: DFlash's alone."""

    context_recompute_tail: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    max_concurrency: Bounded | None = None
    use_rejection_sampling: bool = False
    enable_penalty: bool = False


class TransceiverOptions(Section):
    """Of disaggregated serving, whose baseline without drafts is written where this is set."""

    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE"] = "DEFAULT"
    max_tokens_in_buffer: Bounded | None = None


class LlmOptions(Section):
    """What one may set of TensorRT-LLM's arguments; what is left out has its default."""

    kv_cache_config: KvCacheOptions = KvCacheOptions()
    moe_config: MoeOptions = MoeOptions()
    speculative_config: SpeculationOptions = SpeculationOptions()
    cache_transceiver_config: TransceiverOptions | None = None
    enable_attention_dp: bool = False
    disable_overlap_scheduler: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    reasoning_parser: str | None = None
    stream_interval: Bounded = 1
    num_postprocess_workers: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    return_perf_metrics: bool = True

    def given(self, section: str) -> dict[str, Any]:
        """What was set of a section."""
        values: dict[str, Any] = self.model_dump(exclude_unset=True).get(section, {})
        return values

    def given_outside(self) -> dict[str, Any]:
        """What was set outside of the sections."""
        values = self.model_dump(exclude_unset=True).items()
        return {name: value for name, value in values if not isinstance(value, dict)}


def read_options(profile: Mapping[str, Any], where: str, texts: Sequence[str]) -> LlmOptions:
    """A profile's `llm_args` and NAME=VALUE `texts`, of which later ones count for more.

    A point in a name goes one level down.

    Raises:
        DflashError: a name that is not offered, a value of another type, a text without "="
            (usage).
    """
    values = profile
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator):
            what = f"{one_line(text, 60)!r} is not NAME=VALUE"
            raise DflashError(what, where=OPTION, usage=True)
        given = parse_yaml(value, f"{OPTION} {one_line(name, 60)}")
        for key in reversed(name.split(".")):
            given = {key: given}
        values = _merge(values, given)

    def unknown(key: str, location: Location, known: list[str]) -> str:
        if location[-1] == "trust_remote_code":
            return f"{key} would run a checkpoint's own code: it is never written"
        return f"{key} is not offered{nearest(str(location[-1]), known)}"

    fix = "other fields go into the written files, which `dflash-trt inspect` checks"
    return validate(LlmOptions, values, where, fix=fix, usage=True, unknown=unknown)


def _merge(below: Any, above: Any) -> Any:
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {**below, **{name: _merge(below.get(name), one) for name, one in above.items()}}
