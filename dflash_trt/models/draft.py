"""A draft as z-lab (arXiv 2602.06036) and others publish it: config, attention, weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.core.limits import MAX_BLOCK
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.models import deepspec, dflash2, eagle, mtp, speculators
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
from dflash_trt.models.relatives import SPECULATORS_KIND, read_architecture, refuse_relatives
from dflash_trt.models.rope import LEAST, read_rope
from dflash_trt.models.sizes import MAX_LAYERS, DraftShape
from dflash_trt.models.weight_names import DRAFT_WEIGHTS

UNDERSTOOD_KEYS = frozenset(
    "attention_sink_bias block_size causal final_logit_softcapping input_embedding_scale "
    "mask_token_id output_multiplier projector_type swa_window_size target_layer_ids "
    "use_aux_hidden_state use_swa".split()
)
"""Keys of dflash_config that are known; any other may change what the draft computes."""


MULTIPLIER = "output_multiplier"
"""Of logits, which changes no argmax: in DFlash 2 it weighs them against a token's neighbours."""
_TAPS = "target_layer_ids"
_SAY_TAPS = "pass `build` --target-layer-ids with those that it was trained on"
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
    is tapped. `taps_by_rule`: its config does not name the tapped layers, and nobody else does.
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
    taps_by_rule: bool = False

    @property
    def traits(self) -> DraftTraits:
        """What follows from its kind."""
        return TRAITS[self.kind]

    @property
    def owned(self) -> tuple[str, ...]:
        """What of its own it has instead of the target's, by role; EAGLE-3's head is always so."""
        roles = ["embed_tokens"] if self.traits.owns_head else deepspec.COPIES
        return tuple(role for role in roles if role in self.weights)

    @property
    def is_speculators(self) -> bool:
        """Whether its checkpoint is in speculators' layout."""
        return SPECULATORS_KIND in self.checkpoint.config

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


def read_draft(folder: str | Path, target_layer_ids: tuple[int, ...] | None = None) -> DraftSpec:
    """Reads and checks a draft's folder; no weight is loaded.

    `target_layer_ids` are the tapped layers of a draft whose config names none.

    Raises:
        DflashError: a malformed folder, another kind of drafter (named), a variant that is not
            supported, weights that do not fit the config, or other layers than that names (usage).
    """
    folder = Path(folder)
    config = ConfigFields(read_config(folder), folder / CONFIG_NAME)
    layout = eagle.find_layout(config)
    if layout is not None:
        return _read_eagle(folder, config, layout, target_layer_ids)
    if mtp.may_hold_layer(config):
        layer = DraftSpec(**mtp.read_layer(folder))
        _refuse_other_taps(config, layer.target_layer_ids, target_layer_ids)
        return layer
    config = speculators.translated(config)
    is_speculators = speculators.is_speculators(config)
    is_deepspec = read_architecture(config) == deepspec.ARCHITECTURE
    known = "DSpark" if is_deepspec else dflash2.NAME if dflash2.is_stated(config) else None
    _refuse_variants(config, known)
    quantization = read_quantization(config)
    rms_norm_eps = config.number("rms_norm_eps", NORM_EPS, high=1.0)
    has_depth = config.has("num_target_layers")
    inner = config.child("dflash_config")
    is_silent = not config.either(inner, _TAPS).has(_TAPS)
    if is_silent and target_layer_ids:  # what they are by rule does not matter
        config = ConfigFields({**config.values, _TAPS: list(target_layer_ids)}, config.where)
        has_depth = False
    num_target_layers = config.integer("num_target_layers", high=MAX_LAYERS) if has_depth else None
    shape = read_draft_config(config, num_target_layers, is_deepspec=is_deepspec)
    markov_rank, rope = shape.markov_rank, read_rope(config, default_theta=None)

    _refuse_other_taps(config, shape.target_layer_ids, target_layer_ids)
    checkpoint = open_checkpoint(folder)
    refuse_relatives(config, known, checkpoint.tensors)
    rules, symbols = DRAFT_WEIGHTS, shape.sizes.symbols()
    if markov_rank:
        rules = {**rules, **deepspec.MARKOV_WEIGHTS}
        symbols["rank"] = markov_rank
    if shape.dflash2 is not None:
        rules = {**rules, **dflash2.WEIGHTS}
        symbols |= shape.dflash2.symbols(shape.sizes.hidden_size)
        symbols["vocab"] = config.integer("vocab_size")
    if is_deepspec or is_speculators:
        vocab = config.integer("vocab_size")
        tokens = config.integer("draft_vocab_size", vocab) if is_speculators else vocab
        symbols |= {"vocab": vocab, "tokens": tokens}
    ignored = deepspec.UNUSED if is_deepspec else ()
    if is_speculators:
        rules = {**rules, **speculators.own_rules(checkpoint, needs_head=tokens != vocab)}
        ignored += speculators.IGNORED
    layers = len(shape.sizes.layers)
    weights = match_weights(checkpoint, rules, layers, symbols, ignored, quantization)
    token_ids = None if is_speculators else read_draft_tokens(folder)
    if is_speculators and tokens != vocab:
        token_ids = eagle.read_draft_vocabulary(checkpoint, tokens, vocab)
    elif markov_rank and token_ids is not None:
        what = "chooses among some tokens, which its Markov head does not know"
        raise DflashError(what, where=folder / DRAFT_TOKENS_NAME, fix="remove the file")
    scale = None if is_deepspec else _read_embedding_scale(config, inner)
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
        anchor_drafts=is_deepspec and deepspec.drafts_anchor(config),
        logit_multiplier=1.0
        if is_deepspec
        else config.either(inner, MULTIPLIER).number(MULTIPLIER, 1.0),
        logit_cap=_read_cap(config.either(inner, LOGIT_CAP)),
        own_embedding_scale=1.0 if is_speculators else scale,  # which trains over it as stored
        norms_last_tap=not (is_deepspec or is_speculators),
        taps_by_rule=is_silent and not target_layer_ids,
        kind="DSpark" if markov_rank else "DFlash 2" if shape.dflash2 else "DFlash",
    )


def read_draft_config(
    config: ConfigFields, num_target_layers: int | None, *, is_deepspec: bool
) -> DraftShape:
    """The shape of a DFlash, DFlash 2 or DSpark draft, as its config states it.

    `num_target_layers` counts for a config that does not name the tapped layers.
    """
    inner = config.child("dflash_config")
    sizes = read_sizes(config, DRAFT_DEFAULT_HEAD_DIM)
    max_positions = config.integer("max_position_embeddings")
    sizes = sizes.with_layers(*read_layer_attention(config, inner, len(sizes.layers)))
    block = config.either(inner, "block_size")
    return DraftShape(
        sizes=sizes,
        max_position_embeddings=max_positions,
        block_size=deepspec.read_block(config)
        if is_deepspec
        else block.integer("block_size", DEFAULT_BLOCK, low=2, high=MAX_BLOCK),
        markov_rank=deepspec.read_markov_rank(config) if is_deepspec else 0,
        dflash2=dflash2.read_dflash2(config, sizes.hidden_size)
        if dflash2.is_stated(config) and not is_deepspec
        else None,
        mask_token_id=config.either(inner, "mask_token_id").integer("mask_token_id", low=0),
        target_layer_ids=_read_taps(config, inner, num_target_layers, len(sizes.layers)),
        vocab_size=config.integer("vocab_size") if config.has("vocab_size") else None,
    )


def _read_eagle(
    folder: Path, config: ConfigFields, layout: eagle.EagleLayout, taps: tuple[int, ...] | None
) -> DraftSpec:
    refuse_relatives(config, "EAGLE")
    head = eagle.read_eagle_config(config, layout)
    if taps and not head.target_layer_ids:
        head = dataclasses.replace(head, target_layer_ids=taps)
    _refuse_other_taps(config, head.target_layer_ids, taps)
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
        token_ids=eagle.read_draft_vocabulary(checkpoint, head.draft_vocab_size, head.vocab_size),
        carries_norm=head.carries_norm,
        hands_normed=head.hands_normed,
    )


def _read_taps(
    config: ConfigFields, inner: ConfigFields, num_target_layers: int | None, num_layers: int
) -> tuple[int, ...]:
    """The tapped layers, as the config names them or by default."""
    fields = config.either(inner, _TAPS)
    if fields.has(_TAPS):
        return fields.integers(_TAPS, low=0, high=MAX_LAYERS - 1, limit=MAX_LAYERS)
    if num_target_layers is None:
        what = "has neither target_layer_ids nor num_target_layers, by which they follow"
        raise DflashError(what, where=config.where, fix=_SAY_TAPS)
    ids = default_target_layer_ids(num_target_layers, num_layers)
    if min(ids) < 0:
        what = f"the default tapped layers of a {num_target_layers}-layer target are {list(ids)}"
        raise DflashError(what, where=config.where, fix=_SAY_TAPS)
    return ids


def _refuse_other_taps(
    config: ConfigFields, named: tuple[int, ...], given: tuple[int, ...] | None
) -> None:
    if given and given != named:
        what = f"the draft takes layers {', '.join(map(str, named))} ({config.where})"
        raise DflashError(what, where="--target-layer-ids", fix="leave it out", usage=True)


def _read_embedding_scale(config: ConfigFields, inner: ConfigFields) -> float | None:
    """z-lab's factor of the rows' embedding; None where it is not stated."""
    key = "input_embedding_scale"
    fields = config.either(inner, key)
    return fields.number(key, low=LEAST) if fields.has(key) else None


def _read_cap(fields: ConfigFields) -> float | None:
    """A cap of logits; z-lab has none where it is not above 0."""
    stated = fields.number(LOGIT_CAP, 0.0, low=-1e18)
    return stated if stated > 0 else None


def _refuse_variants(config: ConfigFields, known: str | None) -> None:
    refuse_relatives(config, known)
    architecture = read_architecture(config)
    if known is None and architecture not in DRAFT_ARCHITECTURES:
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
    projectors, known_keys = {"dflash"}, UNDERSTOOD_KEYS
    if known == dflash2.NAME:
        projectors, known_keys = {"dflash", "dflash2"}, UNDERSTOOD_KEYS.union(dflash2.KEYS)
    if inner.text("projector_type", "dflash").lower() not in projectors:
        raise inner.unsupported("projector_type", "only plain DFlash drafts are")
    for key, value in inner.values.items():
        if key not in known_keys and value is not None:
            fix = "it may change what the draft computes; remove it if it does not"
            raise inner.unsupported(key, fix)
