"""The layer in a target's own checkpoint that predicts one token more (arXiv 2412.19437).

Qwen3.5, 3.6 and 3.8 have one: `mtp.fc` over the norms of a token's embedding and of the target's
output, then a layer of the family's attention and MLP, then a norm. Embedding and head are the
target's. Here it is a chain's draft, as an EAGLE-3 head is (graph/eagle.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_trt.errors import DflashError
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.eagle import MAX_DRAFTS
from dflash_trt.models.families import Family, find_family, target_rules
from dflash_trt.models.folder import open_checkpoint
from dflash_trt.models.name_map import match_weights
from dflash_trt.models.quantization import stored_formats
from dflash_trt.models.quantized_weights import quantized_linears
from dflash_trt.models.relatives import read_architecture
from dflash_trt.models.sizes import DecoderSizes, DraftShape, TargetShape
from dflash_trt.models.target import expert_storage, read_target_config
from dflash_trt.models.weight_names import ExpertStorage, Rules

TOKEN_NORM, OUTPUT_NORM = "pre_fc_norm_embedding", "pre_fc_norm_hidden"
"""Roles of the norms of what `fc` takes."""
PREFIX, COUNT = "mtp.", "mtp_num_hidden_layers"
_OWN_WEIGHTS: Rules = {
    "fc": ("mtp.fc.weight", ("hidden", "two*hidden")),
    TOKEN_NORM: (f"mtp.{TOKEN_NORM}.weight", ("hidden",)),
    OUTPUT_NORM: (f"mtp.{OUTPUT_NORM}.weight", ("hidden",)),
}
OWN_SYMBOLS = {"two": 2}
"""Of a layer's rules, beside its target's."""
_DEDICATED = "mtp_use_dedicated_embeddings"


def may_hold_layer(config: ConfigFields) -> bool:
    """Whether a config is of a family whose checkpoints have such a layer."""
    family = find_family(read_architecture(config))
    return family is not None and family.is_hybrid


def layer_shape(target: TargetShape) -> DraftShape:
    """The shape of a target's layer."""
    positions = target.max_position_embeddings
    return DraftShape(**_shape(target.sizes), max_position_embeddings=positions)


def layer_rules(
    family: Family, *, attention_bias: bool = False, storage: ExpertStorage = "float"
) -> Rules:
    """The weights of the one layer in a checkpoint of `family`."""
    family = replace(family, prefix=PREFIX)
    rules = target_rules(family, attention_bias=attention_bias, tied=True, storage=storage)
    rules = {role: rule for role, rule in rules.items() if "{linear}" not in role}
    del rules["embed_tokens"]
    return {**rules, **_OWN_WEIGHTS}


def check_layer(config: ConfigFields) -> None:
    """Refuses a text model's config that states no such layer, or one that cannot be run."""
    if not _count_layers(config):
        raise _no_layer(config.where, f"no {COUNT}")


def _shape(target: DecoderSizes) -> dict[str, Any]:
    """The fields of a `DraftShape` that follow from its target's sizes."""
    last, hidden = len(target.layers) - 1, target.hidden_size
    return {
        "sizes": replace(target, layers=(target.full_layer,), features=hidden),
        "block_size": 1 + MAX_DRAFTS,
        "mask_token_id": 0,
        "target_layer_ids": (last,),
        "fuses_token": True,
    }


def _count_layers(config: ConfigFields) -> int:
    """How many a config states, 0 or 1; DflashError for what cannot be run."""
    count = config.integer(COUNT, 0, low=0)
    if count > 1:
        raise config.unsupported(COUNT, "one layer is")
    if config.flag(_DEDICATED, False):
        raise config.unsupported(_DEDICATED, "layers over their target's embedding are")
    return count


def _no_layer(where: Path, evidence: str) -> DflashError:
    fix = "pass a draft; of a converted checkpoint the original may have it: --draft-checkpoint DIR"
    return DflashError(f"has no MTP layer ({evidence})", where=where, fix=fix)


def read_layer(folder: Path) -> dict[str, Any]:
    """The layer in a target's checkpoint, as fields of `DraftSpec`; no weight is loaded.

    Raises:
        DflashError: a malformed folder, none or several such layers, or one that does not fit the
            config.
    """
    found = read_target_config(folder)
    family, stated = replace(found.family, prefix=PREFIX), found.stated
    count = _count_layers(found.text)
    checkpoint = open_checkpoint(folder)
    held = {name: one for name, one in checkpoint.tensors.items() if name.startswith(PREFIX)}
    if not count or not held:
        raise _no_layer(folder, f"no tensor {PREFIX}*" if count else f"no {COUNT}")
    storage = expert_storage(family, found.moe, replace(checkpoint, tensors=held))
    weights = match_weights(
        replace(checkpoint, tensors=held),
        layer_rules(family, attention_bias=found.attention_bias, storage=storage),
        1,
        found.weight_symbols() | OWN_SYMBOLS,
        quantization=stated["quantization"],
    )
    if not quantized_linears(weights):  # as where all the rest is
        stated["quantization"] = None
    attention_format, mlp_format = stored_formats(stated["quantization"])
    return {
        **stated,
        **_shape(found.sizes),
        "attention_format": attention_format,
        "mlp_format": mlp_format,
        "kind": "MTP",
        "num_target_layers": len(found.sizes.layers),
        "norms_last_tap": True,
        "hands_normed": True,
        "weights": weights,
        "checkpoint": checkpoint,
    }
