"""The checkpoints whose graphs are frozen: tiny, random, of every family and storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash_trt.models.draft import read_draft
from dflash_trt.models.draft_kinds import DraftKind
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.target import read_target
from tests.frozen.command_line import run_well
from tests.reference.checkpoints import write_draft, write_target
from tests.reference.deepspec import write_deepspec
from tests.reference.dflash2 import write_dflash2
from tests.reference.eagle import write_eagle
from tests.reference.mtp import write_mtp
from tests.reference.quantized import quantize_folder

_TARGET = {"hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 64, "vocab": 97, "num_layers": 2}
_MIXTURE = {**_TARGET, "experts": 4, "chosen": 2}
_DRAFT = {
    "num_layers": 2,
    "target_layer_ids": [1, 0],
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 20,
}
_YARN = {"rope": "yarn", "dtype": "bfloat16"}
_ON_CPU = ("fp32-linear-compute", "fp32-paged-compute")
_OF_ENGINES = (
    *_ON_CPU,
    "bf16-linear-compute",
    "bf16-linear-compute-draws",
    "bf16-paged-compute-draws",
)
_MARKOV_RANK = 8
_SEVERAL_SHARDS = {"shards": 3}


@dataclass(frozen=True, slots=True)
class FrozenPair:
    """Keywords of the writers of tests/reference, and what becomes of the checkpoints then.

    `quantize` are keywords of `quantize_folder` by model; `experts` is the precision that the
    command line converts a target's experts to; `kind` writes the draft anew as another one, and
    `forms` are those of its graphs, all where there are none.
    """

    family: Any = "qwen3"
    target: Mapping[str, Any] = field(default_factory=dict)
    draft: Mapping[str, Any] = field(default_factory=dict)
    quantize: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    experts: str | None = None
    kind: DraftKind = "DFlash"
    forms: tuple[str, ...] = ()


PAIRS = {
    "qwen3": FrozenPair(),
    "llama": FrozenPair(
        "llama",
        {"dtype": "bfloat16", "tie": True, "attention_bias": True, "rope": "llama3"}
        | _SEVERAL_SHARDS,
        {"dtype": "float16", "layer_types": None, "sliding_window": None, "rope_theta": 5e3},
    ),
    "qwen3_fp8": FrozenPair(
        quantize={
            "target": {"algorithm": "FP8", "kv_cache": True},
            "draft": {"algorithm": "FP8", "form": "nested"},
        }
    ),
    "qwen3_nvfp4": FrozenPair(
        quantize={"target": {"algorithm": "NVFP4", "exclude": ()}, "draft": {"algorithm": "FP8"}}
    ),
    "gpt_oss": FrozenPair("gpt_oss", _YARN),
    "gpt_oss_mxfp4": FrozenPair("gpt_oss", {**_YARN, "mxfp4": True}),
    "gpt_oss_nvfp4": FrozenPair("gpt_oss", {**_YARN, "mxfp4": True}, experts="nvfp4"),
    "gpt_oss_bf16": FrozenPair("gpt_oss", {**_YARN, "mxfp4": True}, experts="bf16"),
    "qwen3_moe": FrozenPair("qwen3_moe", {"dtype": "float16", **_SEVERAL_SHARDS}),
    "qwen3_5": FrozenPair("qwen3_5", {"num_layers": 4}, forms=_OF_ENGINES),
    "gemma4": FrozenPair(
        "gemma4",
        {"kv_heads": 2, "head_dim": 256, "num_layers": 3, "tie": True},
        forms=_OF_ENGINES,
    ),
    "dflash2": FrozenPair(kind="DFlash 2", forms=(*_ON_CPU, "bf16-linear-compute")),
    "dspark": FrozenPair(kind="DSpark", forms=(*_ON_CPU, "bf16-linear-compute")),
    "mtp": FrozenPair("qwen3_5", {"num_layers": 4}, kind="MTP", forms=_ON_CPU),
    "eagle3": FrozenPair(kind="EAGLE-3", forms=(*_ON_CPU, "bf16-linear-compute")),
}


def write_pair(name: str, folder: Path) -> Pair:
    """The pair PAIRS[name], written below `folder` and read again."""
    pair = PAIRS[name]
    is_mixture = pair.family in ("gpt_oss", "qwen3_moe")
    base = _MIXTURE if is_mixture else _TARGET
    target = write_target(folder / "target", pair.family, **{**base, **pair.target})
    draft = _write_draft(pair, folder, target)
    for owner, options in pair.quantize.items():
        quantize_folder(folder / owner, **options)
    if pair.experts is not None:
        target, source = folder / "converted", target
        words = ["quantize", "--checkpoint", source, "--precision", pair.experts, "-o", target]
        run_well(*words)
    return check_pair(read_target(target), read_draft(draft))


def _write_draft(pair: FrozenPair, folder: Path, target: Path) -> Path:
    if pair.kind == "MTP":
        return write_mtp(target)
    if pair.kind == "EAGLE-3":
        return write_eagle(folder / "draft", target, taps=(0, 1), draft_vocab=48)
    if pair.kind == "DFlash":
        return write_draft(folder / "draft", target, **{**_DRAFT, **pair.draft})
    plain = write_draft(folder / "plain", target, **{**_DRAFT, **pair.draft})
    if pair.kind == "DFlash 2":
        return write_dflash2(folder / "draft", plain)
    tables = torch.ones(2, _TARGET["vocab"], _MARKOV_RANK)
    return write_deepspec(folder / "draft", plain, target, (tables[0], tables[1]))
