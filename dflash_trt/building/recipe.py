"""What a build computes in and quantises, on each kind of executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.building.observing import observe_pair
from dflash_trt.building.quantize import PairAmax, PairQuantization
from dflash_trt.building.spec import PrecisionOptions
from dflash_trt.bundle.support import CPU, PRECISIONS, check_executor
from dflash_trt.core.formats import QUANTIZED, Format
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.graph.bindings import Owner
from dflash_trt.graph.form import Precision
from dflash_trt.models.build_config import BuildConfig, PrecisionName, resolve_file
from dflash_trt.models.pair_check import Pair
from dflash_trt.text.prompts import encode_calibration, read_prompts

COMPUTE = {"fp32": Precision.FLOAT32, "bf16": Precision.BFLOAT16, "fp16": Precision.FLOAT16}


@dataclass(frozen=True, slots=True)
class PrecisionRecipe:
    """What graphs compute in, and what is quantised.

    `algorithms` has the models that the build quantises; the others stay as they are.
    """

    compute: Precision
    algorithms: dict[Owner, Format]
    exclude: tuple[str, ...]


def choose_recipe(
    config: BuildConfig, places: Mapping[Owner, str], executor: str
) -> PrecisionRecipe:
    """What the configuration says once the request's options stand in it; `places` say where.

    Raises:
        DflashError: what the executor does not compute in, or an option without an effect.
    """
    names: dict[Owner, PrecisionName] = {}
    names["target"] = config.precision or ("fp32" if executor == CPU else "bf16")
    names["draft"] = config.draft_precision or names["target"]
    for owner, name in names.items():
        # On the CPU a draft in bf16 or fp16 beside a quantised target stays as it is.
        if executor != CPU or owner == "target":
            check_executor(PRECISIONS[name], executor, name, where=places[owner])
    if config.draft_precision is not None and not set(names.values()) & set(QUANTIZED):
        raise DflashError(
            f"{config.draft_precision!r} does nothing: neither model is quantised",
            where=places["draft"],
            fix="leave it out; --precision says what engines compute in",
            usage=True,
        )
    # What is not quantised has the one type that everything is computed in.
    floats = [name for name in names.values() if name in COMPUTE] or ["bf16"]
    return PrecisionRecipe(
        compute=Precision.FLOAT32 if executor == CPU else COMPUTE[floats[0]],
        algorithms={owner: Format(name) for owner, name in names.items() if name in QUANTIZED},
        exclude=config.exclude,
    )


def precision_places(options: PrecisionOptions, config_path: Path) -> dict[Owner, str]:
    """Where each model's precision was given: an option, or a key of the YAML file."""
    target = "--precision" if options.precision is not None else f"{config_path}, precision"
    given = options.draft_precision is not None or options.precision is not None
    draft = "--draft-precision" if given else f"{config_path}, draft_precision"
    return {"target": target, "draft": draft}


def check_idle_options(recipe: PrecisionRecipe, options: PrecisionOptions) -> None:
    """Refuses options about what is not going to happen."""
    what = "does nothing without a precision to quantize to"
    fix = "add --precision fp8 or nvfp4, or leave it out"
    if not recipe.algorithms:
        given = {"--calibration": options.calibration, "exclude": options.exclude}
        refuse_options(given, what, fix)
    if "target" not in recipe.algorithms:
        refuse_options({"--quantize-lm-head": options.quantize_lm_head}, what, fix)


def find_texts(
    recipe: PrecisionRecipe, config: BuildConfig, config_path: Path, calibration: Path | None
) -> Path | None:
    """The file to calibrate with, once it has proved readable; None where nothing is quantised.

    Raises:
        DflashError: there is none, or it cannot be used.
    """
    if not recipe.algorithms:
        return None
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


def pair_quantization(
    recipe: PrecisionRecipe,
    pair: Pair,
    texts: Path,
    *,
    quantize_lm_head: bool,
    kv_scales: bool = False,
) -> PairQuantization:
    """What the build quantises of `pair`, calibrated on `texts`.

    Raises:
        DflashError: the target has no tokenizer, or a text is empty.
    """
    sequences = encode_calibration(pair.target.checkpoint.path, texts)

    def observe(pair: Pair, workspace: Path, progress: Progress) -> PairAmax:
        amax = observe_pair(pair, sequences, progress, workspace=workspace)
        return {"target": amax.target, "draft": amax.draft}

    return PairQuantization(
        algorithms=recipe.algorithms,
        observe=observe,
        exclude=recipe.exclude,
        quantize_lm_head=quantize_lm_head,
        kv_scales=kv_scales,
    )
