"""Shapes from a checkpoint's config.json alone: weights need not be there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dflash_trt.checkpoints import deepspec
from dflash_trt.checkpoints.config_fields import ConfigFields
from dflash_trt.checkpoints.draft import (
    read_block_size,
    read_mask_token_id,
    read_target_layer_ids,
)
from dflash_trt.checkpoints.families import DRAFT_ARCHITECTURES, DRAFT_DEFAULT_HEAD_DIM, find_family
from dflash_trt.checkpoints.folder import CONFIG_NAME, read_config
from dflash_trt.checkpoints.gemma4 import read_heads_by_kind, with_experts
from dflash_trt.checkpoints.layer_types import SLIDING, read_layer_attention
from dflash_trt.checkpoints.moe import MAX_EXPERTS, read_expert_sizes
from dflash_trt.checkpoints.recurrent import read_recurrent
from dflash_trt.checkpoints.relatives import read_architecture
from dflash_trt.checkpoints.sizes import MAX_WIDTH, ExpertSizes, Windows, read_sizes
from dflash_trt.checkpoints.target import MAX_VOCAB, text_config
from dflash_trt.checkpoints.windows import read_windows
from dflash_trt.errors import DflashError
from dflash_trt.memory.shape import DFlashShape, FormatName, ModelShape
from dflash_trt.planning.known_pairs import PairShape

_WHOLE: dict[str, FormatName] = {"fp8": "fp8", "nvfp4": "nvfp4"}
_EXPERTS: dict[str, FormatName] = {"mxfp4": "mxfp4", "w4a16_nvfp4": "nvfp4"}
"""Formats of gpt-oss's experts, beside which attention stays as it is."""


def read_pair_shape(target_folder: Path, draft_folder: Path) -> PairShape:
    """The pair in two checkpoint folders; it has no published τ.

    Raises:
        DflashError: a config that is malformed, or that does not state what is needed.
    """
    target = read_target_shape(target_folder)
    draft = read_draft_shape(draft_folder, target)
    config = ConfigFields(read_config(target_folder), target_folder / CONFIG_NAME)
    return PairShape(
        name=target_folder.name,
        target=target,
        draft=draft,
        architecture=read_architecture(config),
    )


def read_target_shape(folder: Path) -> ModelShape:
    """The shape of a dense or mixture-of-experts decoder, as its config states it.

    Windows, experts and head size of a known family are read as by a build, those of any other
    architecture by transformers' usual keys.
    """
    whole = ConfigFields(read_config(folder), folder / CONFIG_NAME)
    architecture = read_architecture(whole)
    if architecture in DRAFT_ARCHITECTURES:
        raise DflashError("is a DFlash draft, not a target", where=whole.where, usage=True)
    family = find_family(architecture)
    config = whole if family is None else text_config(whole, family)
    family = None if family is None else with_experts(family, config)
    sizes = (
        read_sizes(config, None)
        if family is None
        else read_sizes(config, family.default_head_dim, family.activation, family.mlp_key)
    )
    windows: Windows = (None,) * len(sizes.layers)
    experts = None
    if family is None:
        windows = _guess_windows(config, len(sizes.layers))
        experts = _guess_experts(config, sizes.intermediate_size)
    elif not family.is_hybrid:
        windows = read_windows(config, family, len(sizes.layers))
    if family is not None and family.experts is not None:
        experts = read_expert_sizes(config, family.experts)
    ties = whole if whole.has("tie_word_embeddings") else config
    is_tied = ties.flag("tie_word_embeddings", family is not None and family.default_tied)
    sizes = sizes.with_layers(windows)
    if family is not None and family.is_hybrid:
        sizes = sizes.with_recurrence(read_recurrent(config, len(windows)))
    if family is not None and family.is_gemma4:
        sizes = read_heads_by_kind(config, sizes)
    if experts is not None:
        sizes = replace(sizes, experts=experts, intermediate_size=experts.intermediate_size)
    stated = whole.child("quantization_config")
    name = stated.text("quant_method", "").lower()
    if name == "modelopt":
        name = stated.text("quant_algo", "").lower()
    return ModelShape(
        sizes=sizes,
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        max_context=config.integer("max_position_embeddings"),
        tied_embeddings=is_tied,
        mlp_format=(_WHOLE | _EXPERTS).get(name, "bf16"),
        attention_format=_WHOLE.get(name, "bf16"),
    )


def read_draft_shape(folder: Path, target: ModelShape) -> DFlashShape:
    """The shape of a DFlash draft of `target`, or of a DSpark draft in DeepSpec's layout."""
    config = ConfigFields(read_config(folder), folder / CONFIG_NAME)
    architecture = read_architecture(config)
    is_deepspec = architecture == deepspec.ARCHITECTURE
    if architecture not in DRAFT_ARCHITECTURES and not is_deepspec:
        what = f"is no DFlash draft ({architecture}); those are {', '.join(DRAFT_ARCHITECTURES)}"
        raise DflashError(what, where=config.where, usage=True)
    inner = config.child("dflash_config")
    sizes = read_sizes(config, DRAFT_DEFAULT_HEAD_DIM)
    sizes = sizes.with_layers(read_layer_attention(config, inner, len(sizes.layers))[0])
    ids = read_target_layer_ids(config, inner, len(target.sizes.layers), len(sizes.layers))
    rank = deepspec.read_markov_rank(config) if is_deepspec else 0
    if is_deepspec and not rank:
        what = "is a DFlash draft moved by a slot (markov_rank 0), which nothing else serves"
        raise DflashError(what, where=config.where, fix="build it for --executor cpu", usage=True)
    return DFlashShape(
        model=ModelShape(
            sizes=sizes, vocab=target.vocab, max_context=config.integer("max_position_embeddings")
        ),
        block_size=(deepspec.read_block(config) if is_deepspec else read_block_size(config, inner)),
        taps=len(ids),
        target_hidden=target.sizes.hidden_size,
        target_layer_ids=ids,
        mask_token_id=read_mask_token_id(config, inner),
        markov_rank=rank,
    )


def _guess_experts(config: ConfigFields, dense_size: int) -> ExpertSizes | None:
    for key in ("num_local_experts", "num_experts"):
        if config.has(key):
            count = config.integer(key, high=MAX_EXPERTS)
            chosen = config.integer("num_experts_per_tok", high=count)
            width = config.integer("moe_intermediate_size", dense_size, high=MAX_WIDTH)
            return ExpertSizes(count, chosen, width)
    return None


def _guess_windows(config: ConfigFields, layers: int) -> Windows:
    kinds = config.values.get("layer_types") or [""] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.error("layer_types", f"must name the {layers} layers")
    window = config.integer("sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)
