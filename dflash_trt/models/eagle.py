"""EAGLE-3 heads (arXiv 2503.01840): one decoder layer over a token's embedding and a feature.

Layouts: SafeAILab's and SpecForge's `midlayer.*`, ModelOpt's `layers.0.*`, speculators' nested
config, DeepSpec's Qwen3 layer. What a config does not state is the published default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dflash_trt.errors import DflashError
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.decoder import read_sizes
from dflash_trt.models.families import DRAFT_DEFAULT_HEAD_DIM
from dflash_trt.models.folder import Checkpoint
from dflash_trt.models.sizes import MAX_LAYERS, MAX_WIDTH, DecoderSizes
from dflash_trt.models.weight_names import (
    LAYER_WEIGHTS,
    QK_NORM_WEIGHTS,
    Rules,
    Shape,
    of_layer,
)

MAX_DRAFTS = 7
"""Tokens of a chain: as many as heads are trained and measured with."""

D2T, T2D = "d2t", "t2d"
EMBEDDING = "embed_tokens.weight"
TAPS = 3

_OFF = ("norm_output", "fc_norm", "norm_before_fc", "parallel_draft", "attention_bias", "mlp_bias")
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class EagleLayout:
    """Where a checkpoint says what.

    `nested` is the key of the object with the layer's sizes; `taps` says which key has the tapped
    layers and what to take from them for the index of a layer whose output it is.
    """

    has_qk_norm: bool = False
    nested: str = ""
    taps: tuple[str, int] = (_AUX_IDS, 0)
    default_head_dim: int | None = None


LAYOUTS = {
    "LlamaForCausalLMEagle3": EagleLayout(),
    "Eagle3Speculator": EagleLayout(nested="transformer_layer_config", taps=(_AUX_IDS, 1)),
    "Qwen3Eagle3Model": EagleLayout(
        has_qk_norm=True, taps=("target_layer_ids", 0), default_head_dim=DRAFT_DEFAULT_HEAD_DIM
    ),
}
"""By the architecture that config.json names."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """A head's config. `target_layer_ids` are empty where it names none.

    `carries_norm`: the layer adds to the normed feature, not to the feature (speculators'
    `norm_before_residual`).
    """

    fields: ConfigFields
    sizes: DecoderSizes
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    carries_norm: bool
    has_qk_norm: bool


def read_eagle_config(config: ConfigFields, layout: EagleLayout) -> EagleConfig:
    """Sizes and choices; `fields` of the result has RoPE, norms and positions.

    Raises:
        DflashError: a malformed config, or a variant that computes something else.
    """
    fields = config.child(layout.nested) if layout.nested else config
    eagle = config.child("eagle_config")
    for place in (config, fields, eagle):
        for key in _OFF:
            if place.flag(key, False):
                raise place.unsupported(key, "heads without it are")
        if not place.flag("use_aux_hidden_state", True):
            raise place.unsupported("use_aux_hidden_state", "EAGLE-3 takes three layers")
    if config.values.get("quantization_config"):
        raise config.unsupported("quantization_config", "heads as trained are")
    sizes = read_sizes(fields, layout.default_head_dim)
    if len(sizes.layers) != 1:
        raise fields.unsupported("num_hidden_layers", "heads of one layer are")
    if sizes.hidden_size % 2:
        raise fields.error("hidden_size", "must be even")
    for place in (config, eagle):
        if place.values.get("target_hidden_size") not in (None, sizes.hidden_size):
            raise place.unsupported("target_hidden_size", "heads as wide as their target are")
    vocab_size = fields.integer("vocab_size", high=MAX_WIDTH)
    key, shift = layout.taps
    named = eagle if eagle.has(key) else config
    last = MAX_LAYERS - 1 + shift
    ids = named.integers(key, shift, last, MAX_LAYERS) if named.has(key) else ()
    return EagleConfig(
        fields=fields,
        sizes=replace(sizes, features=sizes.hidden_size),
        vocab_size=vocab_size,
        draft_vocab_size=config.integer("draft_vocab_size", vocab_size, high=vocab_size),
        target_layer_ids=tuple(one - shift for one in ids),
        carries_norm=config.flag("norm_before_residual", False),
        has_qk_norm=layout.has_qk_norm,
    )


def eagle_rules(checkpoint: Checkpoint, config: EagleConfig) -> tuple[Rules, dict[str, int]]:
    """The weights of a head, and the values of their shapes' symbols."""
    is_named = any(one.startswith("midlayer.") for one in checkpoint.tensors)
    place = "midlayer" if is_named else "layers.0"
    layer = {**of_layer("input_layernorm hidden\nhidden_norm hidden"), **LAYER_WEIGHTS}
    if config.has_qk_norm:
        layer |= QK_NORM_WEIGHTS
    rules: dict[str, tuple[str, Shape]] = {
        "fc": ("fc.weight", ("hidden", "?")),
        "norm": ("norm.weight", ("hidden",)),
        "lm_head": ("lm_head.weight", ("draft_vocab", "hidden")),
    }
    for role, (name, shape) in layer.items():
        if role.endswith(("q_proj", "k_proj", "v_proj")):
            shape = (shape[0], "two*hidden")  # the embedding beside the feature
        rules[role.format(i=0)] = (name.replace("layers.{i}", place), shape)
    return rules, config.sizes.symbols() | {"two": 2, "draft_vocab": config.draft_vocab_size}


def read_draft_vocabulary(checkpoint: Checkpoint, config: EagleConfig) -> tuple[int, ...] | None:
    """The target's token of each of the head's tokens; None where they are the same.

    Raises:
        DflashError: no `d2t` where one is needed, or one that names no token of the target.
    """
    size, entry = config.draft_vocab_size, checkpoint.tensors.get(D2T)
    what = None
    if entry is None:
        if size == config.vocab_size:
            return None
        what = f"has no d2t, which says what its {size:,} tokens are of {config.vocab_size:,}"
    elif entry.dtype != "I64" or entry.shape != (size,):
        what = f"d2t is {entry.dtype} {list(entry.shape)}, not I64 [{size}]"
    else:
        offsets = np.memmap(entry.file, np.int64, "r", entry.offset, (size,))
        # Offsets near the ends of int64 would wrap around.
        wild = np.abs(np.array(offsets, np.float64)) > config.vocab_size
        tokens = np.arange(size) + np.where(wild, -(size + 1), offsets)
        outside = np.flatnonzero((tokens < 0) | (tokens >= config.vocab_size))
        if len(outside):
            moved = f"d2t moves token {outside[0]} by {int(offsets[outside[0]])}"
            what = f"{moved}, outside a vocabulary of {config.vocab_size:,}"
        elif len(np.unique(tokens)) < size:
            what = "d2t names a token twice"
    if what is not None:
        raise DflashError(what, where=checkpoint.path, fix="download the head again")
    return tuple(tokens.tolist())


def default_taps(num_target_layers: int) -> tuple[int, ...]:
    """The layers whose outputs are the inputs of layers 2, N/2 and N - 3."""
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)
