"""Drafts in speculators' layout, said in the words of DeepSpec's, or DFlash 2's in z-lab's.

The decoder's fields lie in an object of their own, taps are counted from the embedding's output,
and `sample_from_anchor` says whether the anchor's slot drafts. Drafts may choose among fewer
tokens, `d2t` apart from their own numbers, by a head of their own, and embed tokens themselves.
Which kind a draft is, one key alone says: configs have fields of other kinds too.
Source: vllm-project/speculators.
"""

from __future__ import annotations

from dflash_trt.core.limits import MAX_BLOCK
from dflash_trt.models import deepspec, dflash2, eagle
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.folder import Checkpoint
from dflash_trt.models.quantization import CONFIG_KEY
from dflash_trt.models.relatives import SPECULATORS_DRAFTS, SPECULATORS_KIND
from dflash_trt.models.sizes import MAX_WIDTH
from dflash_trt.models.weight_names import Rules, Shape

IGNORED = (eagle.D2T, eagle.T2D, *eagle.VERIFIERS)
"""Tensors that a checkpoint may hold beside its weights: the vocabulary's, and of training."""

_AUX_IDS = "aux_hidden_state_layer_ids"
_SHAPES: dict[str, Shape] = {"embed_tokens": ("vocab", "hidden"), "lm_head": ("tokens", "hidden")}


def is_speculators(config: ConfigFields) -> bool:
    """Whether a config, as published or as `translated`, is of a draft in this layout."""
    return config.values.get(SPECULATORS_KIND) in SPECULATORS_DRAFTS


def translated(config: ConfigFields) -> ConfigFields:
    """What a config of speculators' says, as others would say it; any other as it is.

    Raises:
        DflashError: malformed fields, or a variant that computes something else.
    """
    if not is_speculators(config):
        return config
    kind = config.text(SPECULATORS_KIND)
    layer = config.child(eagle.SPECULATORS_LAYER)
    if config.text("projector_type", "dflash") != "dflash":  # Domino's, in some versions
        raise config.unsupported("projector_type", "only plain DFlash drafts are")
    width, vocab = layer.integer("hidden_size"), layer.integer("vocab_size", high=MAX_WIDTH)
    if config.values.get("target_hidden_size") not in (None, width):
        raise config.unsupported("target_hidden_size", "drafts as wide as their target are")
    drafts_anchor = config.flag("sample_from_anchor", kind == "dspark")
    first, is_walk = int(drafts_anchor), kind == "dflash2"
    if is_walk and drafts_anchor:
        raise config.unsupported(deepspec.DRAFTS_ANCHOR, "DFlash 2 walks behind its anchor")
    if is_walk and config.text("draft_ffn_type", "dense") != "dense":
        raise config.unsupported("draft_ffn_type", "dense layers are")
    stated = {
        **{key: config.values.get(key) for key in dflash2.KEYS if is_walk},
        SPECULATORS_KIND: kind,
        CONFIG_KEY: config.values.get(CONFIG_KEY),
        "architectures": [dflash2.ARCHITECTURE if is_walk else deepspec.ARCHITECTURE],
        "block_size": config.integer("block_size", low=2 - first, high=MAX_BLOCK - first),
        deepspec.DRAFTS_ANCHOR: drafts_anchor,
        "mask_token_id": config.integer("mask_token_id", low=0),
        "markov_rank": deepspec.read_markov_rank(config) if kind == "dspark" else 0,
        "draft_vocab_size": config.integer("draft_vocab_size", vocab, high=vocab),
        # Full layers see their block both ways, whatever those that slide do.
        "is_causal": False if config.flag("sliding_window_non_causal", is_walk) else None,
    }
    if config.has(_AUX_IDS):
        stated["target_layer_ids"] = list(eagle.read_taps(config, _AUX_IDS, 1))
    return ConfigFields({**layer.values, **stated}, config.where)


def own_rules(checkpoint: Checkpoint, *, needs_head: bool) -> Rules:
    """The embedding and the head of a draft, where its checkpoint has them."""
    held = {role for role, name in deepspec.COPIES.items() if name in checkpoint.tensors}
    held |= {"lm_head"} if needs_head else set()
    return {role: (deepspec.COPIES[role], _SHAPES[role]) for role in sorted(held)}
