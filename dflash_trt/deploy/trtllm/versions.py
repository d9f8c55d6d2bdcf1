"""The TensorRT-LLM versions that deployments are written for, and the one installed here."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import TypeAdapter

from dflash_trt.errors import DflashError, nearest, one_line

_DECODING = {name: f"{name}DecodingConfig" for name in ("DFlash", "DSpark", "Eagle3")}
_SECTIONS = {
    "kv_cache_config": "KvCacheConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "moe_config": "MoeConfig",
}


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
    "Eagle3.moe_backend Eagle3.spec_dec_variant"
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


def load_native(version: Version) -> Any | None:
    """`tensorrt_llm.llmapi` of exactly `version`, None where it is not installed or cannot start.

    Importing it needs libcuda, which machines that only build have not.
    """
    try:
        package = importlib.import_module("tensorrt_llm")
        if getattr(package, "__version__", None) != version.name:
            return None
        return importlib.import_module("tensorrt_llm.llmapi")
    except (ImportError, OSError):
        return None


def absent(modules: Iterable[str]) -> Iterator[str]:
    """Those that cannot be imported here, as TensorRT-LLM will."""
    for module in modules:
        try:
            importlib.import_module(module)
        except (ImportError, OSError):
            yield module


def check_natively(llmapi: Any, values: Mapping[str, Any], where: str) -> None:
    """Lets TensorRT-LLM's classes judge each of the LLM arguments, by name, type and limits.

    Not all of them together: that looks for the model and for GPUs.

    Raises:
        DflashError: what they say.
    """
    fields = llmapi.TorchLlmArgs.model_fields
    for name, value in values.items():
        if name in ("backend", "triton_config"):
            continue
        if name not in fields:
            raise _refusal(f"has no field {name!r}", where)
        kind = _SECTIONS.get(name)
        if name == "speculative_config":
            kind = _DECODING[value["decoding_type"]]
        try:
            if kind is None:
                adapter: Any = TypeAdapter  # a type that is known only now
                adapter(Annotated[fields[name].annotation, fields[name]]).validate_python(value)
            else:
                getattr(llmapi, kind)(**value)
        except Exception as error:
            raise _refusal(f"refuses {name} ({one_line(error, 200)})", where) from error


def _refusal(what: str, where: str) -> DflashError:
    return DflashError(f"the tensorrt_llm installed here {what}", where=where, usage=True)
