"""The shape of a draft that is to be trained, and the config.json it is published with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import DflashError
from dflash_trt.models import deepspec, dflash2
from dflash_trt.models.decoder import LOGIT_CAP, DecoderSpec
from dflash_trt.models.draft import MULTIPLIER, DraftSpec
from dflash_trt.models.draft_kinds import DraftKind
from dflash_trt.models.eagle import MAX_DRAFTS
from dflash_trt.models.mtp import COUNT

DEEPSPEC_ANCHORS = 512
"""What DeepSpec's configs state for its own trainer, whose loader wants the key."""


@dataclass(frozen=True, slots=True)
class OwnLayer:
    """What an MTP layer has of its target's family.

    Args:
        rotary_dim: elements of a head that are turned.
        norm_offset: norms multiply by this + w.
        config: config.json of the target, which the layer is published with.
    """

    rotary_dim: int
    norm_offset: float
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDesign:
    """A draft's sizes. Its hidden size is the target's, whose embedding and head it uses.

    Args:
        block_size: rows that a step verifies, the anchor's included.
        markov_rank: of DSpark's head, in whose layout every slot drafts the token behind it, the
            anchor's too; 0 makes a DFlash draft.
        dflash2: of DFlash 2's additions; `logit_multiplier` and `logit_cap` are then of the scores
            that its selector weighs.
        is_chain: an EAGLE-3 head, which drafts one token after another.
        own_layer: of an MTP layer, a chain too; what it takes of the target is no tapped layer.
        target_layer_ids: target layers, from 0, whose outputs are tapped, ascending.
        windows: for each layer, how far back it sees; None sees everything.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    markov_rank: int = 0
    is_chain: bool = False
    own_layer: OwnLayer | None = None
    dflash2: dflash2.Dflash2Sizes | None = None
    logit_multiplier: float = 1.0
    logit_cap: float | None = None

    @property
    def kind(self) -> DraftKind:
        if self.is_chain:
            return "EAGLE-3" if self.own_layer is None else "MTP"
        if self.dflash2 is not None:
            return "DFlash 2"
        return "DSpark" if self.markov_rank else "DFlash"

    @property
    def slots(self) -> int:
        """Of a block: the anchor's and the masks'; of a chain its steps."""
        has_anchor = self.kind in ("DFlash", "DFlash 2")
        return self.block_size if has_anchor else self.block_size - 1

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def feature_width(self) -> int:
        """Numbers that a token's features are: the tapped streams and the last layer's, as
        `Replay.features` tells them."""
        return self.hidden_size * (len(self.target_layer_ids) + 1)

    def config(self) -> dict[str, Any]:
        """config.json in z-lab's layout, which vLLM, SGLang and TensorRT-LLM read too; of DSpark
        in DeepSpec's; of an MTP layer its target's."""
        if self.own_layer is not None:
            return dict(self.own_layer.config)
        window = next((one for one in self.windows if one is not None), None)
        inner: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if window is not None:
            inner["causal"] = False  # else readers take sliding layers for causal ones
        kinds = ["full_attention" if one is None else "sliding_attention" for one in self.windows]
        kind: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "block_size": self.block_size,
            "dflash_config": inner,
        }
        if self.dflash2 is not None:
            sizes = self.dflash2
            numbers = (dflash2.TAPS, sizes.group, sizes.rank, sizes.top_k)
            own = {MULTIPLIER: self.logit_multiplier, LOGIT_CAP: self.logit_cap or 0.0}
            default = {MULTIPLIER: 1.0, LOGIT_CAP: 0.0}
            inner |= dict(zip(dflash2.KEYS, numbers, strict=True))
            inner |= {key: value for key, value in own.items() if value != default[key]}
            kind |= {"architectures": [dflash2.ARCHITECTURE], "is_causal": False}
        if self.is_chain:
            taps = {"eagle_aux_hidden_state_layer_ids": list(self.target_layer_ids)}
            kind = {
                "architectures": ["LlamaForCausalLMEagle3"],
                "eagle_config": taps | {"use_aux_hidden_state": True},
            }
        if self.markov_rank:
            kind = inner | {
                "architectures": [deepspec.ARCHITECTURE],
                "block_size": self.slots,
                "enable_confidence_head": False,
                "markov_head_type": "vanilla",
                "markov_rank": self.markov_rank,
                "num_anchors": DEEPSPEC_ANCHORS,
            }
        return {
            **kind,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "layer_types": kinds,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "llama" if self.is_chain else "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "sliding_window": window,
            "tie_word_embeddings": False,
            "use_sliding_window": window is not None,
            "vocab_size": self.vocab_size,
        }


def shape_of(draft: DraftSpec, vocab_size: int, num_target_layers: int) -> DraftDesign:
    """The shape of a draft that exists, to go on training it.

    Raises:
        DflashError: it has what is not trained here.
    """
    if draft.kind == "MTP":
        return own_layer_shape(draft, vocab_size, num_target_layers)
    layer = draft.sizes.layers[0]
    what = None
    is_moved = draft.anchor_drafts and not draft.markov_rank
    if draft.traits.is_chain or draft.is_speculators or is_moved:
        what = f"is a {draft.kind} draft in another layout"
    elif draft.rope.scaling is not None:
        what = "has scaled rotary embeddings"
    elif any(one.is_causal for one in draft.sizes.layers):
        what = "has causal blocks"
    elif draft.own_embedding_scale is not None:
        what = "scales its target's embedding by itself (input_embedding_scale)"
    if what is not None:
        fix = "continue a draft in z-lab's layout (DFlash or DFlash 2), or DSpark's"
        what += ", which training does not know"
        raise DflashError(what, where=draft.checkpoint.path, fix=fix)
    return DraftDesign(
        hidden_size=draft.sizes.hidden_size,
        intermediate_size=draft.sizes.intermediate_size,
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        windows=draft.sizes.windows,
        block_size=draft.block_size,
        mask_token_id=draft.mask_token_id,
        target_layer_ids=draft.target_layer_ids,
        num_target_layers=num_target_layers,
        vocab_size=vocab_size,
        max_position_embeddings=draft.max_position_embeddings,
        rope_theta=draft.rope.theta,
        rms_norm_eps=draft.rms_norm_eps,
        markov_rank=draft.markov_rank,
        dflash2=draft.dflash2,
        logit_multiplier=draft.logit_multiplier if draft.dflash2 else 1.0,
        logit_cap=draft.logit_cap if draft.dflash2 else None,
    )


def own_layer_shape(model: DecoderSpec, vocab_size: int, num_target_layers: int) -> DraftDesign:
    """The shape of the MTP layer of `model`, which is a target or its layer.

    Raises:
        DflashError: it has what is not trained here.
    """
    sizes, layer = model.sizes, model.sizes.full_layer
    has = {
        "a mixture of experts": sizes.experts is not None,
        "scaled rotary embeddings": model.rope.scaling is not None,
        "a quantised MTP layer": isinstance(model, DraftSpec) and model.quantization is not None,
    }
    for what in (name for name, is_so in has.items() if is_so):
        fix = "train another kind, such as --kind dflash"
        what = f"has {what}, which training of MTP layers does not know"
        raise DflashError(what, where=model.checkpoint.path, fix=fix)
    config = {key: one for key, one in model.checkpoint.config.items() if "quantiz" not in key}
    text = config.get("text_config", config) | {COUNT: 1}
    config = config | {"text_config": text} if "text_config" in config else text
    return DraftDesign(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.mlp_size,
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        windows=(None,),
        block_size=1 + MAX_DRAFTS,
        mask_token_id=0,
        target_layer_ids=(),
        num_target_layers=num_target_layers,
        vocab_size=vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        rope_theta=model.rope.theta,
        rms_norm_eps=model.rms_norm_eps,
        is_chain=True,
        own_layer=OwnLayer(model.rotary_dim or layer.head_dim, model.norm_offset, config),
    )
