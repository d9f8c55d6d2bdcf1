"""A draft as z-lab (arXiv 2602.06036) or DeepSpec publishes it: config, attention, weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.core.limits import MAX_BLOCK
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.models import deepspec, eagle, mtp
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.decoder import LOGIT_CAP, DecoderSpec, read_sizes
from dflash_trt.models.draft_kinds import TRAITS, DraftKind, DraftTraits
from dflash_trt.models.draft_tokens import DRAFT_TOKENS_NAME, read_draft_tokens
from dflash_trt.models.families import DRAFT_ARCHITECTURES, DRAFT_DEFAULT_HEAD_DIM, NORM_EPS
from dflash_trt.models.folder import CONFIG_NAME, open_checkpoint, read_config
from dflash_trt.models.layers import read_layer_attention
from dflash_trt.models.name_map import match_weights
from dflash_trt.models.quantization import read_quantization, stored_formats
from dflash_trt.models.quantized_weights import logical_shape
from dflash_trt.models.relatives import read_architecture, refuse_relatives
from dflash_trt.models.rope import LEAST, read_rope
from dflash_trt.models.sizes import MAX_LAYERS, DraftShape
from dflash_trt.models.weight_names import DRAFT_WEIGHTS

UNDERSTOOD_KEYS = frozenset(
    "attention_sink_bias block_size causal final_logit_softcapping input_embedding_scale "
    "mask_token_id output_multiplier projector_type swa_window_size target_layer_ids "
    "use_aux_hidden_state use_swa".split()
)
"""Keys of dflash_config that are known; any other may change what the draft computes."""


DEFAULT_BLOCK = 16
"""z-lab's, where the config is silent."""


@dataclass(frozen=True, kw_only=True)
class DraftSpec(DraftShape, DecoderSpec):
    """A block drafter over the target's features.

    `num_target_layers` is None where the config is silent. `token_ids` are what it chooses among;
    None: everything.
    `anchor_drafts`: every slot drafts the token behind its own, the anchor's too (see deepspec.py).
    `own_embedding_scale` multiplies rows of the target's embedding as it is stored; None: they are
    scaled as the target's. `norms_last_tap`: of the target's last layer the final norm's output
    is tapped.
    A chain has no masks, and an EAGLE-3 head `target_layer_ids` only with its target where its
    config names none; `carries_norm` and `hands_normed` as eagle.py has them.
    """

    num_target_layers: int | None
    token_ids: tuple[int, ...] | None = None
    anchor_drafts: bool = False
    kind: DraftKind = "DFlash"
    carries_norm: bool = False
    hands_normed: bool = False
    own_embedding_scale: float | None = None
    norms_last_tap: bool = False

    @property
    def traits(self) -> DraftTraits:
        """What follows from its kind."""
        return TRAITS[self.kind]

    @property
    def fc_input_size(self) -> int:
        """Columns of `fc` for tapped layers: these times the target's hidden size."""
        return logical_shape(self.weights["fc"])[1] - self.hidden_size * self.fuses_token


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The tapped layers where the config names none: evenly spread from 1 to N - 3.

    round(1 + i (N - 4) / (L - 1)) for i in 0 … L - 1, N // 2 for L = 1. As upstream, ties are
    rounded to even.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def read_draft(folder: str | Path) -> DraftSpec:
    """Reads and checks a draft's folder; no weight is loaded.

    Raises:
        DflashError: a malformed folder, another kind of drafter (named), a variant that is not
            supported, or weights that do not fit the config.
    """
    folder = Path(folder)
    config = ConfigFields(read_config(folder), folder / CONFIG_NAME)
    layout = eagle.find_layout(config)
    if layout is not None:
        return _read_eagle(folder, config, layout)
    if mtp.may_hold_layer(config):
        return DraftSpec(**mtp.read_layer(folder))
    is_deepspec = read_architecture(config) == deepspec.ARCHITECTURE
    _refuse_variants(config, is_deepspec)
    quantization = read_quantization(config)
    rms_norm_eps = config.number("rms_norm_eps", NORM_EPS, high=1.0)
    has_depth = config.has("num_target_layers")
    num_target_layers = config.integer("num_target_layers", high=MAX_LAYERS) if has_depth else None
    shape = read_draft_config(config, num_target_layers, is_deepspec=is_deepspec)
    markov_rank, rope = shape.markov_rank, read_rope(config, default_theta=None)

    inner, checkpoint = config.child("dflash_config"), open_checkpoint(folder)
    refuse_relatives(config, "DSpark" if is_deepspec else None, checkpoint.tensors)
    rules, symbols = DRAFT_WEIGHTS, shape.sizes.symbols()
    if markov_rank:
        rules = {**rules, **deepspec.MARKOV_WEIGHTS}
        symbols |= {"rank": markov_rank, "vocab": config.integer("vocab_size")}
    ignored = deepspec.UNUSED if is_deepspec else ()
    layers = len(shape.sizes.layers)
    weights = match_weights(checkpoint, rules, layers, symbols, ignored, quantization)
    token_ids = read_draft_tokens(folder)
    if markov_rank and token_ids is not None:
        what = "chooses among some tokens, which its Markov head does not know"
        raise DflashError(what, where=folder / DRAFT_TOKENS_NAME, fix="remove the file")
    attention_format, mlp_format = stored_formats(quantization)
    stated = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    return DraftSpec(
        **stated | {"attention_format": attention_format, "mlp_format": mlp_format},
        num_target_layers=num_target_layers,
        rms_norm_eps=rms_norm_eps,
        rope=rope,
        weights=weights,
        quantization=quantization,
        checkpoint=checkpoint,
        token_ids=token_ids,
        anchor_drafts=is_deepspec,
        logit_cap=_read_cap(_either(config, inner, LOGIT_CAP)),
        own_embedding_scale=None if is_deepspec else _read_embedding_scale(config, inner),
        norms_last_tap=not is_deepspec,
        kind="DSpark" if markov_rank else "DFlash",
    )


def read_draft_config(
    config: ConfigFields, num_target_layers: int | None, *, is_deepspec: bool
) -> DraftShape:
    """The shape of a DFlash or DSpark draft, as its config states it.

    `num_target_layers` counts for a config that does not name the tapped layers.
    """
    inner = config.child("dflash_config")
    sizes = read_sizes(config, DRAFT_DEFAULT_HEAD_DIM)
    max_positions = config.integer("max_position_embeddings")
    sizes = sizes.with_layers(*read_layer_attention(config, inner, len(sizes.layers)))
    block = _either(config, inner, "block_size")
    return DraftShape(
        sizes=sizes,
        max_position_embeddings=max_positions,
        block_size=deepspec.read_block(config)
        if is_deepspec
        else block.integer("block_size", DEFAULT_BLOCK, low=2, high=MAX_BLOCK),
        markov_rank=deepspec.read_markov_rank(config) if is_deepspec else 0,
        mask_token_id=_either(config, inner, "mask_token_id").integer("mask_token_id", low=0),
        target_layer_ids=_read_taps(config, inner, num_target_layers, len(sizes.layers)),
        vocab_size=config.integer("vocab_size") if config.has("vocab_size") else None,
    )


def _read_eagle(folder: Path, config: ConfigFields, layout: eagle.EagleLayout) -> DraftSpec:
    refuse_relatives(config, "EAGLE")
    head = eagle.read_eagle_config(config, layout)
    checkpoint = open_checkpoint(folder)
    refuse_relatives(config, "EAGLE", checkpoint.tensors)
    rules, symbols = eagle.eagle_rules(checkpoint, head)
    return DraftSpec(
        kind="EAGLE-3",
        block_size=1 + eagle.MAX_DRAFTS,
        mask_token_id=0,
        target_layer_ids=head.target_layer_ids,
        num_target_layers=None,
        sizes=head.sizes,
        rms_norm_eps=head.fields.number("rms_norm_eps", NORM_EPS, high=1.0),
        rope=head.rope,
        vocab_size=head.vocab_size,
        max_position_embeddings=head.fields.integer("max_position_embeddings"),
        weights=match_weights(checkpoint, rules, 1, symbols, head.ignored),
        quantization=None,
        checkpoint=checkpoint,
        token_ids=eagle.read_draft_vocabulary(checkpoint, head),
        carries_norm=head.carries_norm,
        hands_normed=head.hands_normed,
    )


def _read_taps(
    config: ConfigFields, inner: ConfigFields, num_target_layers: int | None, num_layers: int
) -> tuple[int, ...]:
    """The tapped layers, as the config names them or by default."""
    fields = _either(config, inner, "target_layer_ids")
    if fields.has("target_layer_ids"):
        return fields.integers("target_layer_ids", low=0, high=MAX_LAYERS - 1, limit=MAX_LAYERS)
    if num_target_layers is None:
        what = "has neither dflash_config.target_layer_ids nor num_target_layers"
        raise DflashError(what, where=config.where, fix="add one of them")
    ids = default_target_layer_ids(num_target_layers, num_layers)
    if min(ids) < 0:
        what = f"the default tapped layers of a {num_target_layers}-layer target are {list(ids)}"
        raise DflashError(what, where=config.where, fix="add dflash_config.target_layer_ids")
    return ids


def _read_embedding_scale(config: ConfigFields, inner: ConfigFields) -> float | None:
    """z-lab's factor of the rows' embedding; None where it is not stated."""
    # No argmax depends on this one, if it is positive; its reader takes it where logits are made.
    _either(config, inner, "output_multiplier").number("output_multiplier", 1.0)
    key = "input_embedding_scale"
    fields = _either(config, inner, key)
    return fields.number(key, low=LEAST) if fields.has(key) else None


def _read_cap(fields: ConfigFields) -> float | None:
    """A cap of logits; z-lab has none where it is not above 0."""
    stated = fields.number(LOGIT_CAP, 0.0, low=-1e18)
    return stated if stated > 0 else None


def _refuse_variants(config: ConfigFields, is_deepspec: bool) -> None:
    refuse_relatives(config, "DSpark" if is_deepspec else None)
    architecture = read_architecture(config)
    if not is_deepspec and architecture not in DRAFT_ARCHITECTURES:
        what = f"architecture {quoted(architecture)} is not a DFlash draft"
        fix = f"pass a draft with architecture {DRAFT_ARCHITECTURES[0]}"
        raise DflashError(what, where=config.where, fix=fix)
    inner = config.child("dflash_config")
    if config.flag("attention_bias", False):
        raise config.unsupported("attention_bias", "DFlash drafts have no biases")
    sinks = ((inner, ""), (config, ""), (config, "add_swa_"))
    for fields, prefix in sinks:
        key = f"{prefix}attention_sink_bias"
        if fields.flag(key, False):
            raise fields.unsupported(key, "drafts with attention sinks cannot be run yet")
    if not inner.flag("use_aux_hidden_state", True):
        raise inner.unsupported("use_aux_hidden_state", "the draft must take the target's layers")
    if inner.text("projector_type", "dflash").lower() != "dflash":
        raise inner.unsupported("projector_type", "only plain DFlash drafts are")
    for key, value in inner.values.items():
        if key not in UNDERSTOOD_KEYS and value is not None:
            fix = "it may change what the draft computes; remove it if it does not"
            raise inner.unsupported(key, fix)


def _either(config: ConfigFields, inner: ConfigFields, key: str) -> ConfigFields:
    """Whichever of the two places states `key`; both may when they agree."""
    if not inner.has(key):
        return config
    if config.has(key) and config.values[key] != inner.values[key]:
        raise inner.error(key, f"must equal the top level's {quoted(config.values[key])}")
    return inner
