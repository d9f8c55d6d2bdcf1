"""How a checkpoint says that it is quantised: ModelOpt's two files, read as one statement.

ModelOpt writes `hf_quant_config.json` ({"producer", "quantization": {"quant_algo", …}}) and
config.json's `quantization_config` ({"quant_method": "modelopt", "ignore", …}); of DFlash drafts
it exports the first form in both. gpt-oss states {"quant_method": "mxfp4",
"modules_to_not_convert"} in config.json: its experts alone are quantised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from dflash_trt.core.files import exists
from dflash_trt.core.formats import NVFP4_BLOCK, QUANTIZED, Format
from dflash_trt.core.strict_json import quoted, read_json_object
from dflash_trt.errors import DflashError
from dflash_trt.models.config_fields import ConfigFields

LinearFormat = Literal["FP8", "NVFP4"]
"""The algorithm of linears that graphs, engines and manifests name; see Format.algorithm."""
StatedAlgorithm = Literal["FP8", "NVFP4", "MXFP4", "W4A16_NVFP4"]
WEIGHTS_ONLY: Literal["W4A16_NVFP4"] = "W4A16_NVFP4"
"""NVFP4 weights whose inputs stay in floating point."""
ALGORITHMS: tuple[LinearFormat, ...] = get_args(LinearFormat)
SUPPORTED = (
    "supported are ModelOpt's FP8 (one scale per tensor) and NVFP4 (blocks of 16), "
    "and experts in MXFP4"
)

QUANT_CONFIG_NAME = "hf_quant_config.json"
CONFIG_KEY = "quantization_config"
MAX_PATTERNS = 1 << 16


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the config says of the weights.

    `algorithm` is None where only the KV cache is quantised; "MXFP4" and "W4A16_NVFP4" are those
    of experts (moe.py). `excluded` are patterns of modules in floating point.
    `kv_cache_algorithm` says what a KV cache's scales are for (quantized_weights.py), not what
    caches hold.
    """

    algorithm: StatedAlgorithm | None
    excluded: tuple[str, ...]
    kv_cache_algorithm: str | None

    def excluding_pattern(self, module: str) -> str | None:
        """The pattern that keeps `module` (a tensor's name without ".weight") unquantised."""
        for pattern in self.excluded:
            if fnmatchcase(module, pattern) or module.startswith(f"{pattern}."):
                return pattern
        return None


def stored_formats(stated: Quantization | str | None) -> tuple[Format, Format]:
    """What attention and MLP are stored in where a config states it, or an algorithm, in any case.

    Of gpt-oss's algorithms for experts attention stays as it is, as all does with one that is not
    known.
    """
    algorithm = stated.algorithm if isinstance(stated, Quantization) else stated
    name = (algorithm or "").lower()
    known = {form.value: form for form in Format}
    mlp = known.get(name.removeprefix("w4a16_"), Format.BF16)
    return mlp if name in QUANTIZED else Format.BF16, mlp


def read_quantization(
    config: ConfigFields, *, has_packed_experts: bool = False
) -> Quantization | None:
    """The quantisation that the checkpoint of `config` states; None where it states none.

    `has_packed_experts` says that the family may have its experts in four bits, and only those.

    Raises:
        DflashError: an algorithm other than FP8 and NVFP4 (named), malformed fields, or two
            files that disagree.
    """
    stated = config.child(CONFIG_KEY)
    if stated.values.get("quant_method") == "mxfp4" and not has_packed_experts:
        raise stated.unsupported("quant_method", "MXFP4 is supported in gpt-oss's experts only")
    found = []
    if config.has(CONFIG_KEY):
        found.append(_read(stated, has_packed_experts))
    path = config.where.parent / QUANT_CONFIG_NAME
    if exists(path):
        found.append(_read(ConfigFields(read_json_object(path), path), has_packed_experts))
    if len(found) < 2:
        return found[0] if found else None
    first, second = found
    # config.json need not repeat the KV cache's algorithm; everything else must be the same.
    kv_cache = first.kv_cache_algorithm or second.kv_cache_algorithm
    stated_twice: list[tuple[str, Any, Any]] = [
        ("quant_algo", first.algorithm, second.algorithm),
        ("the exclude list", sorted(first.excluded), sorted(second.excluded)),
        ("the KV cache", kv_cache, second.kv_cache_algorithm or kv_cache),
    ]
    differences = [
        f"{name} is {quoted(ours)} in one and {quoted(theirs)} in the other"
        for name, ours, theirs in stated_twice
        if ours != theirs
    ]
    if differences:
        what = f"disagrees with {CONFIG_KEY} in config.json: {', '.join(differences)}"
        raise DflashError(what, where=path, fix="both must come from the same export")
    return replace(first, kv_cache_algorithm=kv_cache)


def _read(fields: ConfigFields, has_packed_experts: bool) -> Quantization:
    known = (*ALGORITHMS, WEIGHTS_ONLY) if has_packed_experts else ALGORITHMS
    if isinstance(fields.values.get("quantization"), dict):
        return _read_statement(fields.child("quantization"), "exclude_modules", known)
    method = fields.text("quant_method")
    if method == "mxfp4":
        return Quantization("MXFP4", _excluded(fields, "modules_to_not_convert"), None)
    if not method.startswith("modelopt"):
        raise fields.unsupported("quant_method", SUPPORTED)
    return _read_statement(fields, "ignore", known)


def _read_statement(
    fields: ConfigFields, excluded_key: str, known: tuple[StatedAlgorithm, ...]
) -> Quantization:
    algorithm: StatedAlgorithm | None = None
    if fields.has("quant_algo"):
        name = fields.text("quant_algo")
        if name not in known:
            raise fields.unsupported("quant_algo", SUPPORTED)
        algorithm = name
    elif _kv_cache_algorithm(fields) is None:
        raise fields.error("quant_algo", "must name an algorithm")
    excluded = _excluded(fields, excluded_key)
    if algorithm in ("NVFP4", WEIGHTS_ONLY):
        # NVFP4's block, wherever it is stated; other sizes are another format.
        groups, sides = fields.child("config_groups"), ("weights", "input_activations")
        places = [groups.child(group).child(side) for group in groups.values for side in sides]
        for place in (fields, *places):
            if place.has("group_size") and place.integer("group_size", low=0) != NVFP4_BLOCK:
                raise place.unsupported("group_size", f"NVFP4 has blocks of {NVFP4_BLOCK}")
    return Quantization(algorithm, excluded, _kv_cache_algorithm(fields))


def _excluded(fields: ConfigFields, key: str) -> tuple[str, ...]:
    patterns = fields.values.get(key)
    if patterns is None:
        return ()
    if not isinstance(patterns, list) or len(patterns) > MAX_PATTERNS:
        raise fields.error(key, "must be a list of module names")
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise fields.error(key, "must hold module names")
    return tuple(dict.fromkeys(patterns))


def _kv_cache_algorithm(fields: ConfigFields) -> str | None:
    if fields.has("kv_cache_quant_algo"):
        return fields.text("kv_cache_quant_algo")
    if fields.has("kv_cache_scheme"):
        scheme = fields.child("kv_cache_scheme")
        bits = scheme.integer("num_bits", high=16)
        if scheme.has("type") and scheme.text("type") != "float":
            return f"{bits}-bit {scheme.text('type')}"
        return {4: "NVFP4", 8: "FP8"}.get(bits, f"{bits}-bit")
    return None
