"""Which linears of a model are quantised, and which stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

from dflash_trt.core.formats import NVFP4_BLOCK, Format
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.families import FAMILIES
from dflash_trt.models.quantized_weights import FLOAT_DTYPES
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.target import TargetSpec

FUSED_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Linears of one input, which servers fuse: they share scales."""

LAYER_LINEARS = (*chain.from_iterable(FUSED_GROUPS), "o_proj", "down_proj", "out_proj")
GATES = ("in_proj_b", "in_proj_a", "router", "shared_gate", "dynamic", "selector_gate")
"""Linears that stay as they are: what a hybrid's give is its decay and step, which a state adds
up over the whole text; those of experts choose and weigh them; DFlash 2's make kernels and weigh
codes, in a sixtieth of its weights."""
ALL_EXPERTS = "*.experts.*"
"""A pattern of every expert's modules."""
LM_HEAD = "lm_head"
FC = "fc"
EMBEDDING = "embed_tokens"
NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What to quantise, and to which of `QUANTIZED`.

    `exclude` holds shell patterns of module names ("*.mlp.*", "model.layers.0.*"), as ModelOpt's;
    `kv_scales` adds the scales of an FP8 KV cache.
    """

    form: Format
    exclude: tuple[str, ...] = ()
    quantize_lm_head: bool = False
    kv_scales: bool = False
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Linear:
    """One weight to quantise.

    `role` is the checkpoint reader's name ("layers.0.q_proj"), `module` the model's
    ("model.layers.0.self_attn.q_proj"); linears that share an input have one `group`.
    """

    role: str
    module: str
    group: str
    weight: TensorEntry


@dataclass(frozen=True, slots=True)
class Selection:
    """The linears to quantise, in the reader's order; `kept` are other linears and embeddings."""

    linears: tuple[Linear, ...]
    kept: tuple[str, ...]


def select_linears(spec: DecoderSpec, options: QuantizeOptions) -> Selection:
    """What `options` asks to quantise of a model.

    Raises:
        DflashError: the model is quantised already, has experts that are not excluded, has no
            such head or `fc`, no V whose scale was asked for, a pattern matches nothing, nothing
            is left, or an input size has no whole NVFP4 blocks.
    """
    refuse_quantized(spec)
    expert_patterns = _exclude_experts(spec, options.exclude)
    if options.kv_scales and any(layer.keys_are_values for layer in spec.sizes.layers):
        what = "K and V of some layers are one projection, whose FP8 caches are not known"
        raise DflashError(what, where="--kv-scales", fix="leave it out", usage=True)
    if options.quantize_lm_head:
        what = "a draft borrows the target's lm_head"
        if isinstance(spec, TargetSpec):
            what = "the lm_head is tied to the embedding, which stays in high precision"
        if not isinstance(spec, TargetSpec) or spec.tie_word_embeddings:
            raise DflashError(what, where="--quantize-lm-head", fix="leave it out", usage=True)
    linears: list[Linear] = []
    kept: list[str] = []
    for role, module in _candidates(spec).items():
        name = role.rpartition(".")[2]
        wanted = options.quantize_lm_head if role == LM_HEAD else name in LAYER_LINEARS
        if not wanted or any(fnmatchcase(module, pattern) for pattern in options.exclude):
            kept.append(module)
        else:
            first = next((group[0] for group in FUSED_GROUPS if name in group), name)
            group = role.removesuffix(name) + first
            linears.append(Linear(role, module, group, spec.weights[role]))
    matched = matching_patterns(spec, options.exclude)
    if isinstance(spec, TargetSpec) and LM_HEAD not in spec.weights:
        kept.append(LM_HEAD)  # tied: the embedding's tensor, but a module of its own
    for pattern in options.exclude:
        if pattern not in matched:
            fix = f"names look like {(linears[0].module if linears else kept[0])!r}"
            what = f"{pattern!r} matches no linear of {spec.checkpoint.path}"
            raise DflashError(what, where="--exclude", fix=fix, usage=True)
    if not linears:
        raise DflashError("nothing is left to quantize", where="--exclude", usage=True)
    odd = [one for one in linears if one.weight.shape[1] % NVFP4_BLOCK]
    if odd and options.form is Format.NVFP4:
        weight, module = odd[0].weight, odd[0].module
        tail = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
        pattern = f"'*.{module.rpartition('.')[2]}'" if "." in module else module
        what = f"tensor {quoted(weight.name)} has {weight.shape[1]} input columns{tail}; "
        what += f"NVFP4 needs multiples of {NVFP4_BLOCK}"
        fix = f"exclude {pattern}"
        raise DflashError(what, where=spec.checkpoint.path, fix=fix, usage=True)
    kept += expert_patterns
    if isinstance(spec, TargetSpec):  # what lies beside the text model stays as it is
        names = spec.checkpoint.tensors
        unused = {part for one in FAMILIES if one.name == spec.family for part in one.unused}
        kept += [f"{one[:-1]}*" for one in unused if any(name.startswith(one) for name in names)]
    return Selection(tuple(linears), tuple(sorted({*kept})))


def matching_patterns(spec: DecoderSpec, patterns: Iterable[str]) -> tuple[str, ...]:
    """Those of `patterns` that match a module of the model which could be quantised."""
    modules = (*_candidates(spec).values(), *_expert_modules(spec))
    return tuple(
        pattern for pattern in patterns if any(fnmatchcase(module, pattern) for module in modules)
    )


def _candidates(spec: DecoderSpec) -> dict[str, str]:
    """Role → module of the model's linears and embedding, in the reader's order."""
    return {
        role: weight.name.removesuffix(".weight")
        for role, weight in spec.weights.items()
        if role.rpartition(".")[2] in (*LAYER_LINEARS, *GATES) or role in (LM_HEAD, FC, EMBEDDING)
    }


def refuse_quantized(
    spec: DecoderSpec,
    fix: str = "quantize the original checkpoint in float32, float16 or bfloat16",
) -> None:
    """Raises DflashError when the model is quantised already."""
    config = spec.checkpoint.config
    if config.get("quantization_config") or config.get("compression_config"):
        raise DflashError("is quantized already", where=spec.checkpoint.path, fix=fix)
    for weight in spec.weights.values():
        if weight.dtype not in FLOAT_DTYPES:
            what = f"is quantized already: tensor {quoted(weight.name)} is {weight.dtype}"
            raise DflashError(what, where=spec.checkpoint.path, fix=fix)


def _expert_modules(spec: DecoderSpec) -> list[str]:
    """Modules of experts, which are in floating point wherever linears are quantised."""
    return [
        weight.name.removesuffix(".weight")
        for role, weight in spec.weights.items()
        if ".experts." in role
    ]


def _exclude_experts(spec: DecoderSpec, patterns: Iterable[str]) -> list[str]:
    """Those of `patterns` that exclude experts.

    Raises DflashError where some are left: nearly all weights of a mixture would stay as they are,
    which nobody expects who did not say so.
    """
    modules = _expert_modules(spec)
    found = [one for one in patterns if any(fnmatchcase(module, one) for module in modules)]
    if not all(any(fnmatchcase(module, one) for one in found) for module in modules):
        fix = f"exclude '{ALL_EXPERTS}' to quantize the linears beside them"
        if isinstance(spec, TargetSpec) and spec.moe is not None and spec.moe.clamp is not None:
            fix = "of gpt-oss, use the published checkpoint with MXFP4 experts"
        what = "has experts in floating point, which are not quantized here"
        raise DflashError(what, where=spec.checkpoint.path, fix=fix)
    return found
