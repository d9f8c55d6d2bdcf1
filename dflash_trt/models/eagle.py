"""EAGLE-3 heads (arXiv 2503.01840): one decoder layer over a token's embedding and a feature.

Layouts: SafeAILab's and SpecForge's `midlayer.*`, ModelOpt's `layers.0.*`, speculators' nested
config, DeepSpec's Qwen3 layer. What a config does not state is the published default.
EAGLE 3.1 norms the taps before `fc`, and what one step hands to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dflash_trt.errors import DflashError
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.decoder import read_sizes
from dflash_trt.models.families import DRAFT_DEFAULT_HEAD_DIM
from dflash_trt.models.folder import Checkpoint
from dflash_trt.models.layers import SLIDING
from dflash_trt.models.relatives import SPECULATORS_EAGLE, SPECULATORS_KIND, read_architecture
from dflash_trt.models.rope import RopeSpec, read_rope
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

INPUT_NORM, FC_NORM = "input_norm", "fc_norm.{}"
"""Roles of the norm of all taps together, and of the norm of one."""

_OFF = ("parallel_draft", "attention_bias", "mlp_bias")
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"
_LLAMA, _QWEN3 = "llama", "qwen3"
_OTHER_IDS = "aux_hidden_state_layer_ids"
SPECULATORS_LAYER = "transformer_layer_config"
VERIFIERS = ("verifier_norm.weight", "verifier_lm_head.weight")
_AMBIGUOUS = {
    False: "SpecForge up to 0.2.0 trains such a head without the norm before lm_head, all others "
    "keep it: remove the key if yours was trained with that norm",
    True: "servers hand the normed output to the next step, SpecForge up to 0.2.0 trains without "
    "that: remove the key if yours was trained so",
}
"""Of `norm_output`, which says two things in configs that look alike."""


@dataclass(frozen=True, slots=True)
class EagleLayout:
    """Where a checkpoint says what.

    `nested` is the key of the object with the layer's sizes; `taps` says which key has the tapped
    layers and what to take from them for the index of a layer whose output it is.
    `is_speculators`: the layer is a Llama's or a Qwen3's, as its `model_type` says. `zeros_count`
    as in `read_rope`.
    """

    has_qk_norm: bool = False
    nested: str = ""
    taps: tuple[str, int] = (_AUX_IDS, 0)
    default_head_dim: int | None = None
    is_speculators: bool = False
    zeros_count: bool = False


LAYOUTS = {
    "LlamaForCausalLMEagle3": EagleLayout(zeros_count=True),
    "Eagle3Speculator": EagleLayout(
        nested=SPECULATORS_LAYER, taps=(_AUX_IDS, 1), is_speculators=True
    ),
    "Qwen3Eagle3Model": EagleLayout(
        has_qk_norm=True, taps=("target_layer_ids", 0), default_head_dim=DRAFT_DEFAULT_HEAD_DIM
    ),
}
"""By the architecture that config.json names."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """A head's config. `target_layer_ids` are empty where it names none.

    `carries_norm`: the layer adds to the normed feature, not to the feature (speculators'
    `norm_before_residual`). `hands_normed`: a step's output goes to the next one normed.
    `norms_each`, `norms_all`: each tap is normed before `fc`, or all of them as one row.
    """

    fields: ConfigFields
    sizes: DecoderSizes
    rope: RopeSpec
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    carries_norm: bool
    has_qk_norm: bool
    hands_normed: bool
    norms_each: bool
    norms_all: bool
    is_speculators: bool

    @property
    def ignored(self) -> tuple[str, ...]:
        """Tensors that a checkpoint may hold beside its weights."""
        return (D2T, T2D, EMBEDDING, *(VERIFIERS if self.is_speculators else ()))


def find_layout(config: ConfigFields) -> EagleLayout | None:
    """The layout of a head's config; None where it is no head's."""
    if config.values.get(SPECULATORS_KIND) == SPECULATORS_EAGLE:
        return LAYOUTS["Eagle3Speculator"]
    return LAYOUTS.get(read_architecture(config))


def read_eagle_config(config: ConfigFields, layout: EagleLayout) -> EagleConfig:
    """Sizes and choices; `fields` of the result has norms and positions.

    Raises:
        DflashError: a malformed config, or a variant that computes something else.
    """
    fields = config.child(layout.nested) if layout.nested else config
    eagle = config.child("eagle_config")
    places = (config, fields, eagle)
    for place in places:
        for key in _OFF:
            if place.flag(key, False):
                raise place.unsupported(key, "heads without it are")
        if not place.flag("use_aux_hidden_state", True):
            raise place.unsupported("use_aux_hidden_state", "EAGLE-3 takes three layers")
        if place.has("norm_output") and not layout.is_speculators:
            raise place.unsupported("norm_output", _AMBIGUOUS[place.flag("norm_output", False)])
    if config.values.get("quantization_config"):
        raise config.unsupported("quantization_config", "heads as trained are")
    norms_each, norms_all = (
        any(place.flag(key, False) for place in places) for key in ("fc_norm", "norm_before_fc")
    )
    if norms_each and norms_all:
        raise config.unsupported("fc_norm", "norm_before_fc is true as well, which excludes it")
    has_qk_norm, head_dim = layout.has_qk_norm, layout.default_head_dim
    if layout.is_speculators and fields.has("model_type"):
        kind = fields.text("model_type")
        if kind not in (_LLAMA, _QWEN3):
            raise fields.unsupported("model_type", f"{_LLAMA} and {_QWEN3} layers are")
        has_qk_norm = kind == _QWEN3
        head_dim = DRAFT_DEFAULT_HEAD_DIM if has_qk_norm else None
    sizes = read_sizes(fields, head_dim)
    if len(sizes.layers) != 1:
        raise fields.unsupported("num_hidden_layers", "heads of one layer are")
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list) and kinds[:1] == [SLIDING]:
        raise fields.unsupported("layer_types", "heads that see everything before them are")
    if sizes.hidden_size % 2:
        raise fields.error("hidden_size", "must be even")
    for place in (config, eagle):
        if place.values.get("target_hidden_size") not in (None, sizes.hidden_size):
            raise place.unsupported("target_hidden_size", "heads as wide as their target are")
    vocab_size = fields.integer("vocab_size", high=MAX_WIDTH)
    return EagleConfig(
        fields=fields,
        sizes=replace(sizes, features=sizes.hidden_size),
        rope=read_rope(fields, zeros_count=layout.zeros_count),
        vocab_size=vocab_size,
        draft_vocab_size=config.integer("draft_vocab_size", vocab_size, high=vocab_size),
        target_layer_ids=_read_taps(config, eagle, layout),
        carries_norm=config.flag("norm_before_residual", False),
        has_qk_norm=has_qk_norm,
        hands_normed=layout.is_speculators and config.flag("norm_output", False),
        norms_each=norms_each,
        norms_all=norms_all,
        is_speculators=layout.is_speculators,
    )


def _read_taps(config: ConfigFields, eagle: ConfigFields, layout: EagleLayout) -> tuple[int, ...]:
    """The tapped layers that a config names; empty where it names none."""
    key, shift = layout.taps
    named = eagle if eagle.has(key) else config
    if layout.is_speculators and not named.has(key):
        key = _OTHER_IDS
    return read_taps(named, key, shift) if named.has(key) else ()


def read_taps(named: ConfigFields, key: str, shift: int) -> tuple[int, ...]:
    """The tapped layers under `key`, which counts from `shift`: 1 where 0 is the embedding."""
    ids = named.integers(key, 0, MAX_LAYERS - 1 + shift, MAX_LAYERS)
    if min(ids) < shift:
        raise named.unsupported(key, "0 is the embedding, and only outputs of layers are tapped")
    return tuple(one - shift for one in ids)


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
    taps = len(config.target_layer_ids) or TAPS
    if config.is_speculators and EMBEDDING in checkpoint.tensors:  # the target's, or its own
        rules["embed_tokens"] = (EMBEDDING, ("vocab", "hidden"))
    if config.norms_all:
        rules[INPUT_NORM] = (f"{INPUT_NORM}.weight", ("taps*hidden",))
    if config.norms_each:
        each = (FC_NORM.format(at) for at in range(taps))
        rules |= {role: (f"{role}.weight", ("hidden",)) for role in each}
    for role, (name, shape) in layer.items():
        if role.endswith(("q_proj", "k_proj", "v_proj")):
            shape = (shape[0], "two*hidden")  # the embedding beside the feature
        rules[role.format(i=0)] = (name.replace("layers.{i}", place), shape)
    counts = {"two": 2, "taps": taps, "draft_vocab": config.draft_vocab_size}
    counts["vocab"] = config.vocab_size
    return rules, config.sizes.symbols() | counts


def read_draft_vocabulary(
    checkpoint: Checkpoint, size: int, vocab_size: int
) -> tuple[int, ...] | None:
    """The target's token of each of a draft's `size` tokens; None where they are the same.

    Raises:
        DflashError: no `d2t` where one is needed, or one that names no token of the target.
    """
    entry, what = checkpoint.tensors.get(D2T), None
    if entry is None:
        if size == vocab_size:
            return None
        what = f"has no d2t, which says what its {size:,} tokens are of {vocab_size:,}"
    elif entry.dtype != "I64" or entry.shape != (size,):
        what = f"d2t is {entry.dtype} {list(entry.shape)}, not I64 [{size}]"
    else:
        offsets = np.memmap(entry.file, np.int64, "r", entry.offset, (size,))
        # Offsets near the ends of int64 would wrap around.
        wild = np.abs(np.array(offsets, np.float64)) > vocab_size
        tokens = np.arange(size) + np.where(wild, -(size + 1), offsets)
        outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        if len(outside):
            moved = f"d2t moves token {outside[0]} by {int(offsets[outside[0]])}"
            what = f"{moved}, outside a vocabulary of {vocab_size:,}"
        elif len(np.unique(tokens)) < size:
            what = "d2t names a token twice"
    if what is not None:
        raise DflashError(what, where=checkpoint.path, fix="download the draft again")
    return tuple(tokens.tolist())


def default_taps(num_target_layers: int) -> tuple[int, ...]:
    """The layers whose outputs are the inputs of layers 2, N/2 and N - 3."""
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)
