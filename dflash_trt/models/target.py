"""A target model: what its config says, and which tensor plays which role."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_trt.core.files import exists, open_file
from dflash_trt.core.strict_json import quoted, read_json_object
from dflash_trt.errors import DflashError
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.decoder import DecoderSpec, read_logit_cap, read_sizes
from dflash_trt.models.families import (
    DRAFT_ARCHITECTURES,
    FAMILIES,
    FOREIGN_KEYS,
    NORM_EPS,
    REFUSED_FAMILIES,
    Family,
    find_family,
    target_rules,
)
from dflash_trt.models.folder import CONFIG_NAME, Checkpoint, open_checkpoint, read_config
from dflash_trt.models.layers import read_layers, refuse_relatives, with_experts
from dflash_trt.models.moe import MoeSpec, read_moe
from dflash_trt.models.name_map import match_weights
from dflash_trt.models.quantization import read_quantization, stored_formats
from dflash_trt.models.relatives import read_architecture
from dflash_trt.models.rope import (
    GEMMA4_TURNED,
    LEAST,
    read_partial_rope,
    read_rope,
    read_ropes_by_kind,
)
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.sizes import DecoderSizes, TargetShape
from dflash_trt.models.weight_names import ExpertStorage

GENERATION_CONFIG_NAME = "generation_config.json"
MAX_VOCAB = 2**24
GEMMA_QUERY_SCALAR = 256
UNSCALED = 1.0
"""What queries are multiplied by where they are taken as they are."""
EOS = "eos_token_id"
TIED_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class TargetSpec(TargetShape, DecoderSpec):
    """A decoder of a known family.

    The roles of its `weights` are in weight_names.py; a quantised linear's scales lie beside it
    ("layers.{i}.q_proj.weight_scale" …, see quantized_weights.py). `eos_token_ids` may be empty.
    """

    family: str
    qk_norm: bool
    attention_bias: bool
    eos_token_ids: tuple[int, ...]

    @property
    def has_sinks(self) -> bool:
        return any(layer.has_sinks for layer in self.sizes.layers)

    @property
    def moe(self) -> MoeSpec | None:
        """The experts; None for a dense model."""
        experts = self.sizes.experts
        assert experts is None or isinstance(experts, MoeSpec)
        return experts


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """What a target's config says: `text` is its part on the text model, `stated` what of it are
    fields of any decoder's spec."""

    whole: ConfigFields
    text: ConfigFields
    family: Family
    moe: MoeSpec | None
    sizes: DecoderSizes
    attention_bias: bool
    stated: dict[str, Any]

    def weight_symbols(self) -> dict[str, int]:
        """The names that weight shapes are written in."""
        moe = self.moe.symbols(self.sizes.hidden_size) if self.moe else {}
        return self.sizes.symbols() | moe | {"vocab": self.stated["vocab_size"]}


def read_target_config(folder: Path) -> TargetConfig:
    """Reads a target's config.json; DflashError where it is malformed or not supported."""
    whole = ConfigFields(read_config(folder), folder / CONFIG_NAME)
    family = _find_family(whole)
    config = text_config(whole, family)
    family = with_experts(family, config)
    _refuse_variants(config, family)
    experts = family.experts
    has_packed_experts = experts is not None and "MXFP4" in experts.experts
    quantization = read_quantization(whole, has_packed_experts=has_packed_experts)
    sizes = read_sizes(config, family.default_head_dim, family.activation, family.mlp_key)
    stated: dict[str, Any] = {
        "rms_norm_eps": config.number("rms_norm_eps", NORM_EPS, high=1.0),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "vocab_size": config.integer("vocab_size", high=MAX_VOCAB),
        "quantization": quantization,
        "norm_offset": family.norm_offset,
        "activation": family.activation,
    }
    moe = read_moe(config, family, sizes.hidden_size, quantization)
    attention_bias = config.flag("attention_bias", family.default_attention_bias)
    if family.is_hybrid:
        stated["rope"], stated["rotary_dim"] = read_partial_rope(config, sizes.layer.head_dim)
    elif family.is_gemma:
        turned = GEMMA4_TURNED if family.is_gemma4 else None
        stated["rope"], stated["local_rope"] = read_ropes_by_kind(config, turned)
    else:
        stated["rope"] = read_rope(config)
    if family.is_gemma4:
        stated |= {"query_scale": UNSCALED, "logit_cap": read_logit_cap(config)}
    elif family.is_gemma:
        scalar = config.number("query_pre_attn_scalar", GEMMA_QUERY_SCALAR, low=LEAST)
        stated["query_scale"] = scalar**-0.5
    sizes = replace(read_layers(config, family, sizes), experts=moe)
    return TargetConfig(whole, config, family, moe, sizes, attention_bias, stated)


def read_target(folder: str | Path) -> TargetSpec:
    """Reads and checks a target's folder; no weight is loaded.

    Raises:
        DflashError: a malformed folder, an architecture or variant that is not supported, or
            weights that do not fit the config.
    """
    folder = Path(folder)
    found = read_target_config(folder)
    whole, config, sizes, stated = found.whole, found.text, found.sizes, found.stated
    ties = whole if whole.has("tie_word_embeddings") else config
    tied = ties.flag("tie_word_embeddings", found.family.default_tied)
    vocab_size = stated["vocab_size"]
    eos_token_ids = _read_eos_token_ids(folder, whole if whole.has(EOS) else config)
    if any(token_id >= vocab_size for token_id in eos_token_ids):
        what = f"eos_token_id {list(eos_token_ids)} is outside the vocabulary of {vocab_size}"
        fix = "correct generation_config.json or config.json"
        raise DflashError(what, where=folder, fix=fix)

    checkpoint = open_checkpoint(folder)
    family = _as_named(found.family, checkpoint)
    weights = match_weights(
        checkpoint,
        target_rules(
            family,
            attention_bias=found.attention_bias,
            tied=tied,
            storage=expert_storage(family, found.moe, checkpoint),
            keys_are_values=sizes.full_layer.keys_are_values,
        ),
        len(sizes.layers),
        found.weight_symbols(),
        # Some exporters also write the tied head; it must equal the embedding and is not used.
        (family.head_name,) if tied else (),
        stated["quantization"],
        linear_layers=[i for i, layer in enumerate(sizes.layers) if layer.recurrent is not None],
        sliding_layers=[i for i, layer in enumerate(sizes.layers) if layer.window is not None],
        unused=family.unused,
    )
    if tied and family.head_name in checkpoint.tensors:
        _check_tied_head(checkpoint, family.head_name, weights["embed_tokens"])
    if family.is_gemma:  # √hidden in the type that the table is stored in, as they were trained
        embedding = weights["embed_tokens"]
        narrow = {"BF16": ml_dtypes.bfloat16, "F16": np.float16}.get(embedding.dtype, np.float32)
        exact = np.float32(math.sqrt(embedding.shape[1]))
        stated["embedding_scale"] = float(exact.astype(narrow))
    attention_format, mlp_format = stored_formats(stated["quantization"])
    return TargetSpec(
        **stated,
        family=family.name,
        sizes=sizes,
        qk_norm=family.qk_norm,
        attention_bias=found.attention_bias,
        tie_word_embeddings=tied,
        eos_token_ids=eos_token_ids,
        weights=weights,
        attention_format=attention_format,
        mlp_format=mlp_format,
        checkpoint=checkpoint,
    )


def expert_storage(family: Family, moe: MoeSpec | None, checkpoint: Checkpoint) -> ExpertStorage:
    """How the experts of a first layer below the family's prefix are stored."""
    if moe is None or family.experts is None:
        return "float"
    if "separate" in family.experts.experts:  # which are known in two ways
        first = f"{family.prefix}layers.0.mlp.experts.0."
        if any(name.startswith(first) for name in checkpoint.tensors):
            return "separate"
    return moe.storage


def text_config(config: ConfigFields, family: Family) -> ConfigFields:
    """The part of a config that describes the text model, with what its family is silent about."""
    if family.text_key is not None:
        if not config.has(family.text_key):
            raise config.error(family.text_key, "must be the text model's config")
        config = config.child(family.text_key)
    return replace(config, values={**family.silent, **config.values})


def _as_named(family: Family, checkpoint: Checkpoint) -> Family:
    """`family` with that prefix of its own that the tensors have."""
    named = (one for one in family.other_prefixes if f"{one}norm.weight" in checkpoint.tensors)
    return replace(family, prefix=next(named, family.prefix))


def _find_family(config: ConfigFields) -> Family:
    architecture = read_architecture(config)
    if (family := find_family(architecture)) is not None:
        return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    if architecture in DRAFT_ARCHITECTURES:
        what = f"is a DFlash draft ({architecture}), not a target"
        raise DflashError(what, where=config.where, fix="pass it as the draft checkpoint")
    what = f"architecture {quoted(architecture)} is not supported as a target"
    if architecture in REFUSED_FAMILIES:
        name, reason = REFUSED_FAMILIES[architecture]
        what = f"is a {name} model (architecture {quoted(architecture)}), not supported: {reason}"
    raise DflashError(what, where=config.where, fix=f"supported are {supported}")


def _refuse_variants(config: ConfigFields, family: Family) -> None:
    for key in family.must_be_off:
        if config.flag(key, False):
            raise config.unsupported(key, "it must be false")
    if family.is_gemma4:
        refuse_relatives(config)
    for key in FOREIGN_KEYS:
        if key not in family.own_keys and config.values.get(key) not in (None, False, 0):
            raise config.unsupported(key, f"{family.architecture} as it is known here has none")


def _check_tied_head(checkpoint: Checkpoint, name: str, embedding: TensorEntry) -> None:
    """A head stored beside a tied embedding must equal it: transformers unties two that differ.

    Samples settle it: a head trained on its own differs everywhere.
    """
    head = checkpoint.tensors[name]
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if not same or _samples(head) != _samples(embedding):
        raise DflashError(
            f"tie_word_embeddings is true, but {name} differs from the embedding",
            where=checkpoint.path,
            fix="set tie_word_embeddings to false in config.json",
        )


def _samples(entry: TensorEntry) -> list[bytes]:
    """The start, middle and end of a tensor's bytes."""
    size = min(TIED_SAMPLE_BYTES, entry.length)
    latest = entry.length - size
    with open_file(entry.file) as file:
        return [
            os.pread(file.fileno(), size, entry.offset + start)
            for start in (0, latest // 2, latest)
        ]


def _read_eos_token_ids(folder: Path, config: ConfigFields) -> tuple[int, ...]:
    """The ids that end a text: generation_config.json knows them best, config.json next."""
    path, fields = folder / GENERATION_CONFIG_NAME, config
    if exists(path):
        generation = ConfigFields(read_json_object(path), path)
        fields = generation if generation.has(EOS) else config
    if isinstance(fields.values.get(EOS), list):
        return fields.integers(EOS, low=0, high=MAX_VOCAB, limit=256)
    return (fields.integer(EOS, low=0, high=MAX_VOCAB),) if fields.has(EOS) else ()
