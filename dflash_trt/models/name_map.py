"""Finds the tensors of a checkpoint by its family's name map."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, first_few
from dflash_trt.models.folder import Checkpoint
from dflash_trt.models.quantization import Quantization
from dflash_trt.models.quantized_weights import (
    check_quantized,
    find_scales,
    is_kv_scale,
    is_packed_expert,
    is_scale,
    logical_shape,
)
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.weight_names import HARMLESS_SUFFIXES, Rules, Shape

NAMES_SHOWN = 4
MANY_WEIGHTS = 100_000
"""Above what any one checkpoint here has: so many are named only where most of them exist."""


def match_weights(
    checkpoint: Checkpoint,
    rules: Rules,
    num_layers: int,
    symbols: Mapping[str, int],
    ignored: tuple[str, ...] = (),
    quantization: Quantization | None = None,
    *,
    linear_layers: Collection[int] = (),
    sliding_layers: Collection[int] = (),
    unused: tuple[str, ...] = (),
) -> dict[str, TensorEntry]:
    """Role → tensor for every rule, expanded over the layers, and the scales of quantised linears.

    Args:
        symbols: value of each symbol of the rules' shapes.
        ignored: exact names that may be present and are not used.
        linear_layers: those without attention, {linear} in a role.
        sliding_layers: {sliding} in a role; the others with attention are {full}.
        unused: how names begin of tensors that may be present and are not used.

    Raises:
        DflashError: names the missing, the unexpected and the wrongly shaped tensors, the
            first few of each and how many more; or a dtype that the tensor may not have.
    """
    experts, held = symbols.get("experts", 0), len(checkpoint.tensors)
    fix = "config.json and the weights must come from the same checkpoint"
    # Before millions of names are made, of which a config needs two numbers.
    count = sum(
        (num_layers if "layers." in role else 1) * (experts if "{e}" in role else 1)
        for role in rules
    )
    if count > MANY_WEIGHTS + 2 * held:
        what = f"weights do not fit the config: it needs {count:,} tensors, the files hold {held:,}"
        raise DflashError(what, where=checkpoint.path, fix=fix)
    layers = {
        "i": range(num_layers),
        "linear": linear_layers,
        "sliding": sliding_layers,
        "full": [i for i in range(num_layers) if i not in {*linear_layers, *sliding_layers}],
    }
    weights: dict[str, TensorEntry] = {}
    missing: list[str] = []
    misshapen: list[str] = []
    for role, (name, shape) in expand(rules, layers, experts).items():
        entry = checkpoint.tensors.get(name)
        if entry is None:
            missing.append(quoted(name))
            continue
        weights[role] = entry
        actual = entry.shape if is_packed_expert(role) else logical_shape(entry)
        wanted = [size_of(term, symbols) for term in shape]
        fits = [size in ("?", str(n)) for size, n in zip(wanted, actual, strict=False)]
        if len(actual) != len(wanted) or not all(fits):
            misshapen.append(f"{quoted(name)} is {list(actual)}, not [{', '.join(wanted)}]")
    scales: dict[str, TensorEntry] = {}
    misfit = bool(missing or misshapen)
    if not misfit:  # else no scale is looked for, and none is unexpected
        check_quantized(weights, quantization)
        scales = find_scales(checkpoint.tensors, weights)
    used = {entry.name for entry in (*weights.values(), *scales.values())}
    unexpected = [
        quoted(name)
        for name in checkpoint.tensors
        if name not in used
        and name not in ignored
        and not name.endswith(HARMLESS_SUFFIXES)
        and not name.startswith(unused)
        and not (quantization and (is_kv_scale(name) or (misfit and is_scale(name))))
    ]
    problems = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
    listed = [
        f"{len(items)} {label} ({first_few(items, NAMES_SHOWN, '; ')})"
        for label, items in problems.items()
        if items
    ]
    if listed:
        what = f"weights do not fit the config: {', '.join(listed)}"
        raise DflashError(what, where=checkpoint.path, fix=fix)
    return weights | scales


def expand(rules: Rules, layers: Mapping[str, Collection[int]], experts: int = 0) -> Rules:
    """Writes `rules` out for each of `layers`, by the names of their kinds, and each expert."""
    expanded: dict[str, tuple[str, Shape]] = {}
    for role, (name, shape) in rules.items():
        kind = next((kind for kind in layers if f"{{{kind}}}" in role), None)
        for i in range(1) if kind is None else layers[kind]:
            for e in range(experts) if "{e}" in role else range(1):
                place = {kind or "i": i, "e": e}
                expanded[role.format_map(place)] = (name.format_map(place), shape)
    return expanded


def size_of(term: str, symbols: Mapping[str, int]) -> str:
    """A term of a symbolic shape as a number, or "?" where any size will do."""
    return term if term == "?" else str(math.prod(symbols[part] for part in term.split("*")))
