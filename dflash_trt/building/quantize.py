"""What a build computes in and quantises, and a pair in lower precision on the way to a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.building.observing.observe import observe
from dflash_trt.building.spec import PrecisionOptions
from dflash_trt.bundle.support import (
    CPU,
    PRECISIONS,
    PairFeature,
    check_executor,
    check_pair_features,
)
from dflash_trt.core.files import resolved
from dflash_trt.core.formats import QUANTIZED, Format
from dflash_trt.core.links import check_space
from dflash_trt.core.progress import Progress, Unit
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.graph.bindings import Owner
from dflash_trt.graph.form import Precision
from dflash_trt.models.build_config import BuildConfig, PrecisionName, resolve_file
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.target import read_target
from dflash_trt.quantization.checkpoint import linear_layout, planned_bytes, quantize_checkpoint
from dflash_trt.quantization.experts import has_mxfp4_experts
from dflash_trt.quantization.linears import (
    QuantizeOptions,
    matching_patterns,
    refuse_quantized,
    select_linears,
)
from dflash_trt.quantization.scales import Activations, states_scales
from dflash_trt.text.prompts import encode_calibration, read_prompts

INT8 = "int8"
COMPUTE = {"fp32": Precision.FLOAT32, "bf16": Precision.BFLOAT16, "fp16": Precision.FLOAT16}


def choose_precisions(
    config: BuildConfig, options: PrecisionOptions, config_path: Path, executor: str
) -> tuple[Precision, dict[Owner, Format], frozenset[Owner]]:
    """What graphs compute in, the formats of models that are quantised, and which are in int8.

    `config` has the request's `options` in it already; they say where a mistake was made.

    Raises:
        DflashError: what the executor does not compute in, or an option without an effect.
    """
    given = options.draft_precision is not None or options.precision is not None
    places: dict[Owner, str] = {
        "target": "--precision" if options.precision else f"{config_path}, precision",
        "draft": "--draft-precision" if given else f"{config_path}, draft_precision",
    }
    names: dict[Owner, PrecisionName] = {}
    names["target"] = config.precision or ("fp32" if executor == CPU else "bf16")
    if names["target"] == INT8 and executor != CPU and options.precision is None:
        names["target"] = "bf16"  # a configuration says what the CPU computes in
    names["draft"] = config.draft_precision or names["target"]
    for owner, name in names.items():
        # On the CPU a draft in bf16 or fp16 beside a quantised target stays as it is.
        if executor != CPU or owner == "target":
            check_executor(PRECISIONS[name], executor, name, where=places[owner])
    int8 = frozenset(owner for owner, name in names.items() if name == INT8)
    if config.draft_precision is not None and not (int8 or {*names.values()} & {*QUANTIZED}):
        raise DflashError(
            f"{config.draft_precision!r} does nothing: neither model is quantised",
            where=places["draft"],
            fix="leave it out; --precision says what engines compute in",
            usage=True,
        )
    algorithms = {owner: Format(name) for owner, name in names.items() if name in QUANTIZED}
    what = "does nothing without a precision to quantize to"
    fix = "add --precision fp8 or nvfp4, or leave it out"
    if not algorithms:
        refuse_options(
            {"--calibration": options.calibration, "exclude": options.exclude}, what, fix
        )
    if "target" not in algorithms:
        refuse_options({"--quantize-lm-head": options.quantize_lm_head}, what, fix)
    # What is not quantised has the one type that everything is computed in.
    floats = [name for name in names.values() if name in COMPUTE] or ["bf16"]
    return Precision.FLOAT32 if executor == CPU else COMPUTE[floats[0]], algorithms, int8


def find_texts(config: BuildConfig, config_path: Path, calibration: Path | None) -> Path:
    """The file to calibrate with, once it has proved readable.

    Raises:
        DflashError: there is none, or it cannot be used.
    """
    if calibration is None:
        name = config.calibration or config.prompts
        if name is None:
            raise DflashError(
                f"{config_path.name} has neither calibration texts nor prompts to quantize with",
                where="--calibration",
                fix='pass a .jsonl with a "prompt" each',
                usage=True,
            )
        calibration = resolve_file(name, config_path)
    read_prompts(calibration)
    return calibration


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """A pair and what becomes of it, checked, calibrated on `sequences` of token ids.

    `stored_bytes` are what the linears to be quantised will weigh, scales included, by model
    and role.
    """

    pair: Pair
    options: Mapping[Owner, QuantizeOptions]
    stored_bytes: Mapping[Owner, Mapping[str, int]]
    sequences: Sequence[Sequence[int]]

    def spec(self, owner: Owner) -> DecoderSpec:
        return self.pair.target if owner == "target" else self.pair.draft


def plan_quantization(
    pair: Pair,
    algorithms: Mapping[Owner, Format],
    texts: Path,
    *,
    exclude: tuple[str, ...] = (),
    quantize_lm_head: bool = False,
    kv_scales: bool = False,
) -> QuantizationPlan:
    """Checks what is asked of `pair`, before any weight is read or written.

    Args:
        algorithms: of the models that are quantised.
        texts: prompts to calibrate with.
        exclude: patterns of modules that are not quantised, of either model.
        kv_scales: whether they also get the scales of FP8 KV caches, where they have none.

    Raises:
        DflashError: a kind of pair or a model that cannot be quantised, a pattern that matches
            nothing in either, no tokenizer, or an empty text.
    """
    check_pair_features(pair, [PairFeature.QUANTIZING])
    sequences = encode_calibration(pair.target.checkpoint.path, texts)
    specs: dict[Owner, DecoderSpec] = {"target": pair.target, "draft": pair.draft}
    specs = {owner: spec for owner, spec in specs.items() if owner in algorithms}
    for owner, spec in specs.items():
        option = "--precision" if owner == "target" else "--draft-precision bf16"
        verb = "leave out" if owner == "target" else "add"
        fix = f"{verb} {option} to build it as it is"
        if has_mxfp4_experts(spec.checkpoint.config):
            fix += ", or write it with `dflash-trt quantize` and build that"
        refuse_quantized(spec, fix)
    matched = {owner: matching_patterns(spec, exclude) for owner, spec in specs.items()}
    for pattern in exclude:
        if not any(pattern in patterns for patterns in matched.values()):
            raise DflashError(
                f"{pattern!r} matches no linear of {' or '.join(specs)}",
                where="exclude",
                fix="names look like 'model.layers.0.mlp.up_proj', a draft's have no 'model.'",
                usage=True,
            )
    options = {
        owner: QuantizeOptions(
            algorithm,
            exclude=matched[owner],
            quantize_lm_head=quantize_lm_head and owner == "target",
            kv_scales=kv_scales and not states_scales(specs[owner]),
        )
        for owner, algorithm in algorithms.items()
    }
    stored = {
        owner: {
            linear.role: sum(one.num_bytes for one in linear_layout(linear, options[owner].form))
            for linear in select_linears(spec, options[owner]).linears
        }
        for owner, spec in specs.items()
    }
    return QuantizationPlan(pair, options, stored, sequences)


def quantize_pair(
    plan: QuantizationPlan, folder: Path, destination: Path, progress: Progress
) -> Pair:
    """Writes the models of `plan` that are quantised into `folder`; returns the new pair.

    `destination` is where the bundle will lie: errors about `folder` name it.
    """
    folder.mkdir()
    with _errors_at(destination, folder):
        sizes = (planned_bytes(plan.spec(owner), own) for owner, own in plan.options.items())
        check_space(sum(sizes), folder, destination, "the quantized weights need")
        # As in ModelOpt, the draft's scales hold for the features of a target in high precision.
        target, draft = plan.pair.target, plan.pair.draft
        amax = observe(target, draft, plan.sequences, progress, workspace=folder)
        quantized: dict[Owner, Path] = {}
        for owner, options in plan.options.items():
            spec = plan.spec(owner)
            # The name is the checkpoint's: it is what a bundle says that it was built from.
            quantized[owner] = folder / owner / resolved(spec.checkpoint.path).name
            quantize_checkpoint(
                spec,
                options,
                Activations.known(amax[owner]),
                quantized[owner],
                _NamedProgress(progress, owner),
            )
    if "target" in quantized:
        target = read_target(quantized["target"])
    if "draft" in quantized:
        draft = read_draft(quantized["draft"], draft.target_layer_ids)
    return check_pair(target, draft)


@contextmanager
def _errors_at(destination: Path, folder: Path) -> Iterator[None]:
    """Errors about `folder`, which is temporary, are about `destination` to a user."""
    try:
        yield
    except DflashError as error:
        if error.where is None or not Path(error.where).is_relative_to(folder):
            raise
        raise DflashError(
            error.what, where=destination, fix=error.fix, usage=error.usage
        ) from error


class _NamedProgress:
    """Puts a model's name before the stages of its quantisation."""

    def __init__(self, progress: Progress, owner: Owner) -> None:
        self._progress, self._owner = progress, owner

    def stage(self, name: str, total: int | None, unit: Unit = "bytes") -> None:
        self._progress.stage(f"{self._owner}: {name}", total, unit)

    def advance(self, count: int) -> None:
        self._progress.advance(count)
