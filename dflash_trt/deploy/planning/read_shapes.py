"""Shapes from a checkpoint's config.json alone: weights need not be there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dflash_trt.deploy.planning.known_pairs import PairShape
from dflash_trt.errors import DflashError
from dflash_trt.models import deepspec, mtp
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.decoder import read_sizes
from dflash_trt.models.draft import read_draft_config
from dflash_trt.models.families import DRAFT_ARCHITECTURES, Family, find_family
from dflash_trt.models.folder import CONFIG_NAME, read_config
from dflash_trt.models.layers import SLIDING, read_layers, with_experts
from dflash_trt.models.moe import MAX_EXPERTS, read_expert_sizes
from dflash_trt.models.quantization import CONFIG_KEY, stored_formats
from dflash_trt.models.relatives import read_architecture
from dflash_trt.models.sizes import (
    MAX_WIDTH,
    DecoderSizes,
    DraftShape,
    ExpertSizes,
    TargetShape,
    Windows,
)
from dflash_trt.models.speculators import translated
from dflash_trt.models.target import MAX_VOCAB, text_config


def read_pair_shape(target_folder: Path, draft_folder: Path) -> PairShape:
    """The pair in two checkpoint folders; it has no published τ.

    Raises:
        DflashError: a config that is malformed, or that does not state what is needed.
    """
    target = read_target_shape(target_folder)
    return PairShape(
        name=target_folder.name,
        target=target,
        draft=read_draft_shape(draft_folder, target),
        architecture=read_architecture(_open(target_folder)),
    )


def read_target_shape(folder: Path) -> TargetShape:
    """The shape of a dense or mixture-of-experts decoder, as its config states it.

    A known family's is read as by a build, that of any other architecture by transformers' usual
    keys.
    """
    whole = _open(folder)
    architecture = read_architecture(whole)
    if architecture in DRAFT_ARCHITECTURES:
        raise DflashError("is a DFlash draft, not a target", where=whole.where, usage=True)
    family, config = find_family(architecture), whole
    if family is None:
        sizes = _guess_sizes(config)
    else:
        config = text_config(whole, family)
        family = with_experts(family, config)
        sizes = _known_sizes(config, family)
    if sizes.experts is not None:
        sizes = replace(sizes, intermediate_size=sizes.experts.intermediate_size)
    ties = whole if whole.has("tie_word_embeddings") else config
    is_tied = ties.flag("tie_word_embeddings", family is not None and family.default_tied)
    stated = whole.child(CONFIG_KEY)
    method = stated.text("quant_method", "").lower()
    algorithm = stated.text("quant_algo", "") if method == "modelopt" else method
    attention_format, mlp_format = stored_formats(algorithm)
    return TargetShape(
        sizes=sizes,
        vocab_size=config.integer("vocab_size", high=MAX_VOCAB),
        max_position_embeddings=config.integer("max_position_embeddings"),
        tie_word_embeddings=is_tied,
        attention_format=attention_format,
        mlp_format=mlp_format,
    )


def read_draft_shape(folder: Path, target: TargetShape) -> DraftShape:
    """The shape of a DFlash or DSpark draft of `target`, or of the MTP layer in its checkpoint."""
    config = translated(_open(folder))
    architecture = read_architecture(config)
    family = find_family(architecture)
    if family is not None and mtp.may_hold_layer(config):
        mtp.check_layer(text_config(config, family))
        return mtp.layer_shape(target)
    is_deepspec = architecture == deepspec.ARCHITECTURE
    if architecture not in DRAFT_ARCHITECTURES and not is_deepspec:
        what = f"is no DFlash draft ({architecture}); those are {', '.join(DRAFT_ARCHITECTURES)}"
        raise DflashError(what, where=config.where, usage=True)
    draft = read_draft_config(config, len(target.sizes.layers), is_deepspec=is_deepspec)
    if is_deepspec and not draft.markov_rank and deepspec.drafts_anchor(config):
        what = "is a DFlash draft moved by a slot (markov_rank 0), which nothing else serves"
        raise DflashError(what, where=config.where, fix="build it for --executor cpu", usage=True)
    return replace(draft, vocab_size=target.vocab_size)


def _open(folder: Path) -> ConfigFields:
    return ConfigFields(read_config(folder), folder / CONFIG_NAME)


def _known_sizes(config: ConfigFields, family: Family) -> DecoderSizes:
    sizes = read_sizes(config, family.default_head_dim, family.activation, family.mlp_key)
    experts = None if family.experts is None else read_expert_sizes(config, family.experts)
    return replace(read_layers(config, family, sizes), experts=experts)


def _guess_sizes(config: ConfigFields) -> DecoderSizes:
    sizes = read_sizes(config, None)
    experts = _guess_experts(config, sizes.intermediate_size)
    return replace(sizes.with_layers(_guess_windows(config, len(sizes.layers))), experts=experts)


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
