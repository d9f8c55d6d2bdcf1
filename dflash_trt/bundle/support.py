"""The support table: which executor and which family of models can do what, and what is said else.

`build`, `quantize`, `generate`, `targets` and `doctor` read it; docs/support-matrix.md shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dflash_trt.backends.tensorrt.library import LIBRARIES, TORCH
from dflash_trt.errors import DflashError
from dflash_trt.models.draft_kinds import TRAITS, DraftTraits
from dflash_trt.models.pair_check import Pair
from dflash_trt.models.sizes import HYBRIDS, TWO_HEADS

CPU, RTX, TENSORRT, TRTLLM = "cpu", *LIBRARIES, "trtllm"
EXECUTORS = (CPU, RTX, TENSORRT, TORCH, TRTLLM)
PLUGINS = "--plugins"


class Feature(Enum):
    """What a user can ask of an executor: its name in the table, and the options that ask."""

    PAGED_CACHES = ("paged KV caches", "--kv-layout paged")
    FP8_CACHES = ("FP8 KV caches", "--kv-dtype fp8")
    FLOAT32 = ("computing in float32", "--precision fp32")
    FLOAT16 = ("computing in float16", "--precision fp16")
    BFLOAT16 = ("computing in bfloat16", "--precision bf16")
    INT8 = ("computing products in eight bits", "--precision int8")
    QUANTIZED = ("quantised linears", "--precision fp8|nvfp4")
    ARCH = ("a GPU to build for", "--arch")
    PROFILE = ("hardware profiles", "--profile")
    KERNELS = ("this project's kernels", PLUGINS)
    HASHES = ("full hashes of weights", "--hash-weights")
    PROMPT_LOOKUP = ("drafts by prompt lookup", "--drafter prompt-lookup")
    DEPLOYMENT = ("TensorRT-LLM's arguments", "--llm-arg and the like")

    def __init__(self, title: str, option: str) -> None:
        self.title, self.option = title, option


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something is not supported and what to do; `needs` is the option with which it is.

    `{value}` in `what` stands for what was given; `shown` is the table's cell.
    """

    what: str
    fix: str
    needs: str | None = None
    shown: str = "–"

    def error(self, where: str | Path, value: object = None) -> DflashError:
        """The refusal of `value`, given at `where`."""
        what = self.what.replace("{value}", str(value))
        return DflashError(what, where=where, fix=self.fix, usage=True)


_LINEAR = Refusal(
    "TensorRT-RTX has linear caches of the compute type alone",
    "leave it out, or build with --executor tensorrt --plugins",
)
_WITH_PLUGINS = Refusal(
    "TensorRT has such caches with this project's plugins alone",
    "add --plugins",
    needs=PLUGINS,
    shown=f"with `{PLUGINS}`",
)
_OWN_CACHES = Refusal(
    "TensorRT-LLM's caches are its own, always paged",
    "leave it out; kv_cache_config in the deployment's YAML files is where they are set",
    shown="its own",
)
_NO_FLOAT32 = Refusal(
    "engines compute in bf16 or fp16, not in fp32", "choose one of bf16, fp16, fp8, nvfp4"
)
_CPU_FLOAT32 = Refusal(
    "'{value}' is for engines; the CPU executor computes in float32",
    "add --executor tensorrt-rtx, or choose fp32, int8, fp8 or nvfp4",
)
_CPU_INT8 = Refusal("int8 is what the CPU executor alone computes in", "choose fp8 or nvfp4")
_AS_PUBLISHED = Refusal(
    "'{value}' is not what TensorRT-LLM runs these checkpoints in",
    "choose fp8 or nvfp4, or leave it out",
)
_IDLE = Refusal("does nothing for a TensorRT-LLM deployment", "leave it out")
_TENSORRT_ALONE = Refusal(
    "only TensorRT takes this project's plugins", "leave it out, or build with --executor tensorrt"
)
_DEPLOYMENTS_ALONE = Refusal(
    "is for TensorRT-LLM deployments", "add --executor trtllm, or leave it out"
)
_CPU_ALONE = Refusal("{value} runs with executor cpu alone", "leave it out, or build for the CPU")

TABLE: Mapping[Feature, Mapping[str, Refusal]] = {
    Feature.PAGED_CACHES: {RTX: _LINEAR, TENSORRT: _WITH_PLUGINS, TRTLLM: _OWN_CACHES},
    Feature.FP8_CACHES: {RTX: _LINEAR, TENSORRT: _WITH_PLUGINS, TRTLLM: _OWN_CACHES},
    Feature.FLOAT32: {RTX: _NO_FLOAT32, TENSORRT: _NO_FLOAT32, TRTLLM: _AS_PUBLISHED},
    Feature.FLOAT16: {CPU: _CPU_FLOAT32, TRTLLM: _AS_PUBLISHED},
    Feature.BFLOAT16: {CPU: _CPU_FLOAT32},
    Feature.INT8: dict.fromkeys((RTX, TENSORRT, TORCH, TRTLLM), _CPU_INT8),
    Feature.QUANTIZED: {},
    Feature.ARCH: {
        CPU: Refusal(
            "'{value}' is for engines; the CPU executor runs the graphs themselves",
            "add --executor tensorrt-rtx, or leave it out",
        ),
        TORCH: Refusal(
            "'{value}' is for engines; PyTorch runs one bundle on every GPU", "leave it out"
        ),
        TRTLLM: _IDLE,
    },
    Feature.PROFILE: {
        CPU: Refusal("profiles describe GPUs; executor cpu has none", "leave it out"),
        TORCH: Refusal("PyTorch runs one bundle on every GPU, without profiles", "leave it out"),
    },
    Feature.KERNELS: {
        CPU: _TENSORRT_ALONE,
        RTX: _TENSORRT_ALONE,
        TORCH: Refusal("PyTorch's executor uses this project's kernels anyway", "leave it out"),
        TRTLLM: _IDLE,
    },
    Feature.HASHES: {TRTLLM: _IDLE},
    Feature.PROMPT_LOOKUP: dict.fromkeys((RTX, TENSORRT, TORCH, TRTLLM), _CPU_ALONE),
    Feature.DEPLOYMENT: dict.fromkeys((CPU, RTX, TENSORRT, TORCH), _DEPLOYMENTS_ALONE),
}
"""What executors cannot do; what is not named they can."""

PRECISIONS = {
    "fp32": Feature.FLOAT32,
    "bf16": Feature.BFLOAT16,
    "fp16": Feature.FLOAT16,
    "int8": Feature.INT8,
    "fp8": Feature.QUANTIZED,
    "nvfp4": Feature.QUANTIZED,
}
"""What each name of a precision asks for."""


def find_refusal(feature: Feature, executor: str, *, plugins: bool = False) -> Refusal | None:
    """Why `executor` has no `feature`; None where it has, `plugins` counted in."""
    found = TABLE[feature].get(executor)
    return None if found is None or (plugins and found.needs == PLUGINS) else found


def needing_plugins() -> list[str]:
    """The features that TensorRT has with this project's kernels alone."""
    rows = ((feature, row.get(TENSORRT)) for feature, row in TABLE.items())
    return [feature.title for feature, found in rows if found and found.needs == PLUGINS]


def check_executor(
    feature: Feature,
    executor: str,
    value: object,
    *,
    where: str | None = None,
    plugins: bool = False,
) -> None:
    """Refuses the option of `feature` where it has a `value` and `executor` does not support it.

    Raises:
        DflashError: at `where`, or else at the feature's option (usage).
    """
    if value is None or value is False or value == ():
        return
    refusal = find_refusal(feature, executor, plugins=plugins)
    if refusal is not None:
        raise refusal.error(where or feature.option, value)


class PairFeature(Enum):
    """What depends on the kinds of draft and target: as the refusal names it, and a way out."""

    ENGINES = ("engines", "build it for --executor cpu, or pass another draft")
    KERNEL_CACHES = ("engines with paged or FP8 caches", "leave out --kv-layout and --kv-dtype")
    QUANTIZING = ("quantising the pair", "quantize the target first, build that")
    FP8_CACHES = ("FP8 KV caches", "leave it out: the CPU executor runs the pair as it is")
    DIAGNOSIS = ("`diagnose`", None)

    def __init__(self, title: str, fix: str | None) -> None:
        self.title, self.fix = title, fix


def draft_lacks(traits: DraftTraits) -> list[PairFeature]:
    """What no pair of such a draft can have yet."""
    have = {
        PairFeature.ENGINES: traits.has_engines,
        PairFeature.KERNEL_CACHES: traits.has_kernel_caches,
        PairFeature.QUANTIZING: traits.is_quantised,
        PairFeature.DIAGNOSIS: traits.is_diagnosed,
    }
    return [feature for feature, has in have.items() if not has]


def check_pair_features(pair: Pair, wanted: Iterable[PairFeature]) -> None:
    """Refuses what has no graph for the kind of draft or target; DflashError (usage)."""
    lacking = draft_lacks(pair.draft.traits)
    unusual = pair.target.sizes.unusual
    for feature in wanted:
        if feature in lacking:
            title, spec = pair.draft.traits.title, pair.draft.checkpoint.path
        elif feature is PairFeature.FP8_CACHES and unusual is not None:
            title, spec = unusual, pair.target.checkpoint.path
        else:
            continue
        what = f"is {title}, for which {feature.title} cannot be built yet"
        raise DflashError(what, where=spec, fix=feature.fix, usage=True)


def render() -> Iterator[str]:
    """The table as lines of Markdown: features by executor, then kinds of models by feature."""
    yield f"| feature | option | {' | '.join(EXECUTORS)} |"
    yield f"|---|---{'|---' * len(EXECUTORS)}|"
    for feature in Feature:
        refusals = (find_refusal(feature, executor) for executor in EXECUTORS)
        cells = ["yes" if found is None else found.shown for found in refusals]
        option = feature.option.replace("|", r"\|")
        yield f"| {feature.title} | `{option}` | {' | '.join(cells)} |"
    yield ""
    yield f"| kind | {' | '.join(one.title for one in PairFeature)} |"
    yield f"|---{'|---' * len(PairFeature)}|"
    for traits in TRAITS.values():
        yield _kind_row(traits.title, draft_lacks(traits))
    for kind in (HYBRIDS, TWO_HEADS):
        yield _kind_row(kind, [PairFeature.FP8_CACHES])


def _kind_row(title: str, lacks: list[PairFeature]) -> str:
    cells = ["–" if feature in lacks else "yes" for feature in PairFeature]
    return f"| {title} | {' | '.join(cells)} |"
