"""Checks that two bundles hold one pair in different precision, and crosses their models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from os import W_OK, access
from pathlib import Path
from tempfile import TemporaryDirectory

from dflash_trt.building.bundle_writer import build_bundle
from dflash_trt.building.spec import BuildSpec, CacheOptions
from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.bundle.dims import int8_models
from dflash_trt.core.files import resolved
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError, first_few, one_line
from dflash_trt.graph.form import CacheDtype
from dflash_trt.models.build_config import BuildConfig, CheckpointSource
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.draft import read_draft
from dflash_trt.models.folder import CONFIG_NAME
from dflash_trt.models.moe import MoeSpec
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.target import read_target

# What precision changes; every other field of a spec says what the model computes.
PRECISION_FIELDS = frozenset(
    {"weights", "checkpoint", "quantization", "attention_format", "mlp_format"}
)
# What sizes are called in config.json, and where a spec has them.
SIZES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_layers",
    "num_heads": "sizes.layer.heads",
    "num_kv_heads": "sizes.layer.kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "sizes.intermediate_size",
    "layer_windows": "layer_windows",
    "layer_causal": "layer_causal",
    "experts": "sizes.experts",
}
DIFFERENCES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Twins:
    """A bundle, its high-precision twin, and the pair that each was built from."""

    bundle: Bundle
    twin: Bundle
    bundle_pair: Pair
    twin_pair: Pair


def check_twins(bundle: Bundle, twin: Bundle) -> Twins:
    """The two as twins.

    Raises:
        DflashError: one was built without its checkpoints' configs, or what differs between
            them besides precision.
    """
    twins = Twins(bundle, twin, read_pair(bundle), read_pair(twin))
    differences = list(_differences(twins))
    if differences:
        raise DflashError(
            f"is not a twin of {twin.folder}: {first_few(differences, DIFFERENCES_SHOWN)}",
            where=bundle.folder,
            fix="both must be built from one pair, with the same block size",
            usage=True,
        )
    return twins


def read_pair(bundle: Bundle) -> Pair:
    """The pair that a bundle was built from, read back from its weights folders.

    Raises:
        DflashError: the bundle is of a version that did not keep the configs.
    """
    weights = bundle.folder / "weights"
    for owner in ("target", "draft"):
        if not (weights / owner / CONFIG_NAME).is_file():
            raise DflashError(
                f"has no weights/{owner}/{CONFIG_NAME}: an earlier version built it",
                where=bundle.folder,
                fix="build it again",
            )
    draft = read_draft(weights / "draft", tuple(bundle.manifest.draft.target_layer_ids))
    return check_pair(read_target(weights / "target"), draft)


@contextmanager
def crossed_bundles(twins: Twins, progress: Progress) -> Iterator[tuple[Bundle, Bundle]]:
    """Temporary bundles: the twin's target with the bundle's draft, and the other way round.

    Each needs its own graphs: a draft's projections are part of the target's. KV caches are as in
    the target's own bundle. They lie beside it where possible, so that weights are linked.
    """
    parent = resolved(twins.bundle.folder).parent
    beside = parent if access(parent, W_OK) else None
    pairs = {
        "twin-target": check_pair(twins.twin_pair.target, twins.bundle_pair.draft),
        "twin-draft": check_pair(twins.bundle_pair.target, twins.twin_pair.draft),
    }
    owners = (twins.twin, twins.bundle)
    cache_dtypes = [CacheDtype(owner.manifest.kv_dtype) for owner in owners]
    int8 = [
        int8_models(whose.manifest.target, other.manifest.draft)
        for whose, other in (owners, reversed(owners))
    ]
    limits = twins.bundle.manifest.limits
    source = CheckpointSource(checkpoint=str(twins.bundle.folder))
    config = BuildConfig(
        description="a crossed pair",
        target=source,
        draft=source,
        max_batch=limits.max_batch,
        max_seq_len=min(limits.max_seq_len, twins.twin.manifest.limits.max_seq_len),
        block_size=limits.block_size,
        prefill_chunk=limits.prefill_chunk,
    )
    with TemporaryDirectory(prefix=".dflash-trt-", dir=beside) as temporary:
        folders = [Path(temporary) / name for name in pairs]
        each = zip(folders, pairs.values(), cache_dtypes, int8, strict=True)
        for folder, pair, dtype, narrow in each:
            spec = BuildSpec(caches=CacheOptions(kv_dtype=dtype.value))
            build_bundle(pair, config, folder.name, folder, spec, progress, int8=narrow)
        yield open_bundle(folders[0]), open_bundle(folders[1])


def _differences(twins: Twins) -> Iterator[str]:
    pairs = twins.bundle_pair, twins.twin_pair
    yield from _field_differences("target", pairs[0].target, pairs[1].target)
    yield from _field_differences("draft", pairs[0].draft, pairs[1].draft)
    sizes = [bundle.manifest.limits.block_size for bundle in (twins.bundle, twins.twin)]
    if sizes[0] != sizes[1]:
        yield f"block size limit {sizes[0]} versus {sizes[1]}"
    texts = [load_tokenizer(bundle).core.to_str() for bundle in (twins.bundle, twins.twin)]
    if texts[0] != texts[1]:
        yield "the tokenizers differ"


def _field_differences(owner: str, spec: DecoderSpec, twin: DecoderSpec) -> Iterator[str]:
    for name in (*SIZES, *(field.name for field in fields(spec) if field.name != "sizes")):
        if name.startswith("layer_") and spec.num_layers != twin.num_layers:
            continue  # as many as layers, which are named already
        read = attrgetter(SIZES.get(name, name))
        values = _without_precision(read(spec)), _without_precision(read(twin))
        if name not in PRECISION_FIELDS and values[0] != values[1]:
            shown = " versus ".join(one_line(value, 80) for value in values)
            yield f"{owner} {name} {shown}"


def _without_precision(value: object) -> object:
    """A field's value, of experts without the format that they are stored in."""
    return replace(value, storage="float") if isinstance(value, MoeSpec) else value
