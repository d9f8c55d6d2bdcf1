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


class LlmOptions(Section):
    """What one may set of TensorRT-LLM's arguments; what is left out has its default."""

    kv_cache_config: KvCacheOptions = KvCacheOptions()
    moe_config: MoeOptions = MoeOptions()
    speculative_config: SpeculationOptions = SpeculationOptions()
    enable_attention_dp: bool = False
    disable_overlap_scheduler: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    reasoning_parser: str | None = None
    stream_interval: Bounded = 1

    def given(self, section: str) -> dict[str, Any]:
        """What was set of a section."""
        values: dict[str, Any] = self.model_dump(exclude_unset=True).get(section, {})
        return values

    def given_outside(self) -> dict[str, Any]:
        """What was set outside of the sections."""
        values = self.model_dump(exclude_unset=True).items()
        return {name: value for name, value in values if not isinstance(value, dict)}


def read_options(profile: Mapping[str, Any], where: str, texts: Sequence[str]) -> LlmOptions:
    """A profile's `llm_args`, which `where` names, and NAME=VALUE `texts`, which count for more.

    Raises:
        DflashError: a name that is not offered, a value of another type, a text without "=" or
            a name that is given twice (usage).
    """
    _validate(profile, where)
    given = _parse(texts)
    _validate(given, OPTION)
    return _validate(_merge(profile, given), where)


def _parse(texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE texts as a tree; a point in a name goes one level down."""
    tree: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        *outer, last = name.split(".")
        what = None if separator and last else "is not NAME=VALUE"
        level = tree
        for key in outer:
            level = level.setdefault(key, {}) if isinstance(level, dict) else level
        if what is None and (not isinstance(level, dict) or last in level):
            what = "is given twice"
        if what is not None:
            raise DflashError(f"{one_line(text, 60)!r} {what}", where=OPTION, usage=True)
        level[last] = parse_yaml(value, f"{OPTION} {one_line(name, 60)}")
    return tree


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, Mapping) else value
    return merged


def _validate(values: Mapping[str, Any], where: str) -> LlmOptions:
    def unknown(key: str, location: Location, known: list[str]) -> str:
        if location[-1] == "trust_remote_code":
            return f"{key} would run a checkpoint's own code: it is never written"
        return f"{key} is not offered{nearest(str(location[-1]), known)}"

    fix = "other fields go into the written files, which `dflash-trt inspect` checks"
    return validate(LlmOptions, values, where, fix=fix, usage=True, unknown=unknown)
