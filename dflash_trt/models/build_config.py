"""Build configurations: one YAML per pair, read here; the only place with defaults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dflash_trt.core.files import resolved
from dflash_trt.core.formats import QUANTIZED
from dflash_trt.core.limits import MAX_BLOCK, PREFILL_CHUNK, Count
from dflash_trt.core.validation import validate
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.errors import DflashError, nearest, one_line

BUILTIN_PREFIX = "builtin:"
YAML_SUFFIXES = (".yaml", ".yml")

FindMistakes = Callable[[Mapping[str, Any], Path], Iterable[tuple[str, str]]]
"""Finds mistakes by key in what a YAML file at a path says."""

PrecisionName = Literal["fp32", "bf16", "fp16", "int8", "fp8", "nvfp4"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointSource(_Strict):
    """Where one checkpoint comes from.

    `checkpoint` is a folder (relative to the YAML), a Hugging Face hub name `owner/name`, or
    `builtin:PATH` for what ships with the project. A text alone is the checkpoint.
    """

    checkpoint: str
    revision: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, given: Any) -> Any:
        return {"checkpoint": given} if isinstance(given, str) else given


class HardwareProfile(_Strict):
    """GPUs to run a pair on, how its models are split over them, and what they are to hold.

    `gpus` is their number on all `nodes` together. `expert_parallel` is for mixture-of-experts
    targets. `llm_args` are TensorRT-LLM's arguments of a deployment, as its YAML files have them.
    What is left out comes from the configuration.
    """

    gpu: str
    gpus: Count = 1
    nodes: Count = 1
    tensor_parallel: Count = 1
    expert_parallel: Count | None = None
    precision: PrecisionName | None = None
    max_batch: Count | None = None
    max_seq_len: Count | None = None
    llm_args: dict[str, Any] = {}

    @model_validator(mode="after")
    def _split(self) -> HardwareProfile:
        if self.tensor_parallel != self.gpus:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} is not gpus {self.gpus}: speculation "
                "splits a model over all GPUs by tensors"
            )
        if self.gpus % self.nodes:
            raise ValueError(f"{self.gpus} gpus on {self.nodes} nodes leave some with fewer")
        if self.expert_parallel is not None and self.tensor_parallel % self.expert_parallel:
            raise ValueError(
                f"expert_parallel {self.expert_parallel} does not divide tensor_parallel "
                f"{self.tensor_parallel}"
            )
        return self


class Eagle3Source(CheckpointSource):
    """An EAGLE-3 draft of the same target, to compare with; a folder or a hub name."""

    max_draft_len: Annotated[int, Field(ge=1, le=64, strict=True)] = 3


Block = Annotated[int, Field(ge=2, le=MAX_BLOCK, strict=True)]
Window = Annotated[int, Field(ge=0, strict=True)]
ProfileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\z")]
"""A deployment's folder is called so."""


class PublishedDecoder(_Strict):
    """A decoder's sizes in elements, as its config.json has them.

    `windows` repeats over the layers, 0 is full attention; `intermediate` is the width of one
    expert where there are experts. Formats are those of the published checkpoint.
    """

    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    intermediate: Count
    windows: Annotated[tuple[Window, ...], Field(min_length=1)] = (0,)


class PublishedRecurrence(_Strict):
    """Gated DeltaNet layers: all but each `attention_interval`th, in which q has a gate."""

    key_heads: Count
    value_heads: Count
    head_dim: Count
    kernel: Annotated[int, Field(ge=2, strict=True)] = 4
    attention_interval: Count = 4


class PublishedHeads(_Strict):
    """KV heads of layers without a window, of a target whose others have other ones."""

    kv_heads: Count
    head_dim: Count
    keys_are_values: bool = False


class PublishedTarget(PublishedDecoder):
    """A target's sizes; `architecture` is the one that its config.json names.

    `shared_expert` is the width of one that all rows go through beside those that they choose.
    """

    architecture: str | None = None
    vocab: Count
    max_context: Count
    tied_embeddings: bool = False
    experts: Count | None = None
    experts_per_token: Count | None = None
    shared_expert: Count | None = None
    recurrent: PublishedRecurrence | None = None
    full: PublishedHeads | None = None
    mlp_format: Literal["bf16", "mxfp4"] = "bf16"

    @model_validator(mode="after")
    def _experts_of_some(self) -> Self:
        if (self.experts is None) != (self.experts_per_token is None):
            raise ValueError("experts and experts_per_token go together")
        if self.shared_expert is not None and self.experts is None:
            raise ValueError("a shared_expert needs experts")
        return self


class PublishedAdditions(_Strict):
    """What a DFlash 2 draft has beyond a DFlash draft (see Dflash2Sizes)."""

    group: Count
    rank: Count
    top_k: Count


class PublishedDraft(PublishedDecoder):
    """A DFlash draft's sizes: its trained block, anchor included, and what feeds it.

    `target_layer_ids` are the layers that it taps, from 0, `mask_token_id` the token at positions
    to draft. `max_context` is the target's where it is left out. With `dflash2` it is a DFlash 2
    draft.
    """

    block_size: Block
    target_layer_ids: Annotated[tuple[Window, ...], Field(min_length=1)]
    mask_token_id: Window
    max_context: Count | None = None
    dflash2: PublishedAdditions | None = None

    @model_validator(mode="after")
    def _groups_of_channels(self) -> Self:
        if self.dflash2 is not None and self.hidden % self.dflash2.group:
            raise ValueError(f"dflash2.group {self.dflash2.group} does not divide {self.hidden}")
        return self


Tau = Annotated[float, Field(ge=1)]
BlockKind = Literal["DFlash", "DFlash 2", "DSpark", "MTP"]
"""A drafter whose draft is a pair's own; EAGLE-3's is compared with it."""


class PublishedAcceptance(_Strict):
    """Acceptance lengths (tokens per verify step, bonus included) that one `source` states.

    By drafter and workload. `drafts` is how many tokens all but EAGLE-3 drafted, None where it
    was the whole block. EAGLE-3's `tree` is [depth, width, verified rows]: the DFlash paper states
    trees of 60 rows, their depth and width are assumed.
    """

    source: str
    dflash: dict[str, Tau] = {}
    eagle3: dict[str, Tau] = {}
    dspark: dict[str, Tau] = {}
    dflash2: dict[str, Tau] = {}
    mtp: dict[str, Tau] = {}
    drafts: Count | None = None
    tree: tuple[Count, Count, Count] | None = None

    @property
    def by_kind(self) -> dict[BlockKind, dict[str, float]]:
        """All that need no tree, by workload."""
        return {
            "DFlash": self.dflash,
            "DFlash 2": self.dflash2,
            "DSpark": self.dspark,
            "MTP": self.mtp,
        }

    @model_validator(mode="after")
    def _tree_of_eagle3(self) -> Self:
        if (self.tree is None) == bool(self.eagle3):
            raise ValueError("eagle3 and tree go together")
        return self


class PublishedPair(_Strict):
    """What is public of a pair without its weights: sizes and acceptance lengths."""

    target: PublishedTarget
    draft: PublishedDraft
    acceptance: tuple[PublishedAcceptance, ...]

    @model_validator(mode="after")
    def _draft_of_target(self) -> Self:
        ids, mask = self.draft.target_layer_ids, self.draft.mask_token_id
        if max(ids) >= self.target.layers:
            raise ValueError(f"target_layer_ids {list(ids)} of {self.target.layers} layers")
        if mask >= self.target.vocab:
            raise ValueError(f"mask_token_id {mask} is outside a vocabulary of {self.target.vocab}")
        return self


class BuildConfig(_Strict):
    """What `build` needs to know about a pair.

    `max_seq_len` counts cache positions per sequence, prompt and output together;
    `block_size` may be smaller than the draft's trained block, never larger.

    `precision` is the target's, and the draft's without a `draft_precision` of its own; int8 is
    for the CPU alone: engines that nobody asks for another compute in bf16. `exclude`
    has patterns of modules that fp8 and nvfp4 leave as they are. `calibration` is a .jsonl of
    texts, relative to the YAML; without it the `prompts` serve. `profiles` are hardware, by the
    names that `build --profile` takes; `shape` is what plans and deployments need to know of a pair
    whose checkpoints are not here. `chat_template_kwargs` are what a chat must tell the target's
    template, because the draft was trained on such answers alone.
    """

    description: str = ""
    target: CheckpointSource
    draft: CheckpointSource
    max_batch: Count = 8
    max_seq_len: Count = 2048
    block_size: Block | None = None
    prefill_chunk: Count = PREFILL_CHUNK
    verified: str = "not run yet"
    prompts: str | None = None
    precision: PrecisionName | None = None
    draft_precision: PrecisionName | None = None
    calibration: str | None = None
    exclude: tuple[str, ...] = ()
    profiles: dict[ProfileName, HardwareProfile] = {}
    eagle3: Eagle3Source | None = None
    shape: PublishedPair | None = None
    chat_template_kwargs: dict[str, bool | str] = {}

    @field_validator("exclude")  # not of the whole, which is looked at only once all fields fit
    @classmethod
    def _exclude_from_something(
        cls, exclude: tuple[str, ...], info: ValidationInfo
    ) -> tuple[str, ...]:
        known = {info.data.get(key, key) for key in ("precision", "draft_precision")}
        if exclude and known <= {None, *get_args(PrecisionName)} - set(QUANTIZED):
            raise ValueError(f"exclude does nothing without precision {' or '.join(QUANTIZED)}")
        return exclude


def data_folder(name: str) -> Path:
    """A folder that ships with the project: in the wheel's `data/`, or in the checkout."""
    packaged = Path(str(files("dflash_trt"))) / "data" / name
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / name


def target_names() -> list[str]:
    """Names that `build --target` accepts besides a YAML file."""
    return sorted(path.stem for path in data_folder("build_configs").glob("*.yaml"))


def advise_draft(folder: Path, *names: str | None) -> str | None:
    """How to get the draft of a target, if a configuration has a model of one of its names."""
    place = "".join(resolved(folder).parts[-3:])  # of a hub's snapshot the first has the name
    called = [_letters(one) for one in (place, *names) if one]
    found = [("", "")]
    for name in target_names():
        config, _ = load_config(name)
        model, draft = config.target.checkpoint, config.draft.checkpoint
        known = _letters(Path(model).name)
        if not model.startswith(BUILTIN_PREFIX) and any(known in one for one in called):
            draft = "the draft that ships" if draft.startswith(BUILTIN_PREFIX) else draft
            how = f"`dflash-trt build --target {name} --target-checkpoint {folder}`"
            found.append((known, f"{how} takes {draft} for {model}"))
    return max(found, key=lambda one: len(one[0]))[1] or None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def targets_not_yet() -> dict[str, str]:
    """Targets with public drafts that cannot be built yet, and why."""
    return _read_shipped(data_folder("build_configs") / "not_yet" / "targets.yaml")


@cache
def _read_shipped(path: Path) -> dict[str, Any]:
    """A YAML that ships with the project, read once; nobody may change the mapping."""
    return read_yaml(path)


def load_config(target: str, find_more: FindMistakes | None = None) -> tuple[BuildConfig, Path]:
    """Reads a configuration by name or by YAML path; returns it with its file.

    Raises:
        DflashError: unknown name (with the nearest) or not supported yet, unreadable YAML,
            unknown or invalid keys together with all that `find_more` finds.
    """
    path = Path(target)
    is_name = path.suffix not in YAML_SUFFIXES
    if is_name:
        path = data_folder("build_configs") / f"{target}.yaml"
        if target in targets_not_yet():
            raise DflashError(
                f"{target} is not supported yet: {targets_not_yet()[target]}",
                where="--target",
                usage=True,
            )
        if target not in target_names():
            raise DflashError(
                f"no target is called {one_line(target, 60)!r}{nearest(target, target_names())}",
                where="--target",
                fix="`dflash-trt targets` lists them; a path must be a folder's or end in .yaml",
                usage=True,
            )
    raw = _read_shipped(path) if is_name else read_yaml(path)
    more = {} if find_more is None else dict(find_more(raw, path))
    return validate(BuildConfig, raw, path, more=more, usage=True), path


def resolve_file(name: str, config_path: Path) -> Path:
    """A file that a configuration names: `builtin:…`, or relative to its YAML."""
    return resolve_builtin(name) or config_path.parent / name


def resolve_builtin(name: str) -> Path | None:
    """The path of something that ships with the project (`builtin:…`), None for other names."""
    if not name.startswith(BUILTIN_PREFIX):
        return None
    folder, _, inner = name.removeprefix(BUILTIN_PREFIX).partition("/")
    return data_folder(folder) / inner
