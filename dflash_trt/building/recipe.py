"""What a build computes in and quantises, on each kind of executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_trt.building.request import PrecisionOptions
from dflash_trt.bundle.quantize import PairAmax, PairQuantization
from dflash_trt.calibration import observe_pair
from dflash_trt.checkpoints.pair import Pair
from dflash_trt.config import BuildConfig, PrecisionName, resolve_file
from dflash_trt.core.formats import QUANTIZED, Format
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.graph.bindings import Owner
from dflash_trt.graph.form import Precision
from dflash_trt.text.prompts import encode_calibration, read_prompts

COMPUTE = {"fp32": Precision.FLOAT32, "bf16": Precision.BFLOAT16, "fp16": Precision.FLOAT16}
PRECISIONS = (*COMPUTE, *(form.value for form in QUANTIZED))


@dataclass(frozen=True, slots=True)
class PrecisionRecipe:
    """What graphs compute in, and what is quantised.

    `algorithms` has the models that the build quantises; the others stay as they are.
    """

    compute: Precision
    algorithms: dict[Owner, Format]
    exclude: tuple[str, ...]


def choose_recipe(
    config: BuildConfig, config_path: Path, options: PrecisionOptions, *, engines: bool
) -> PrecisionRecipe:
    """The request's options, and the configuration's where they leave room for them.

    A precision that is given replaces the configuration's recipe as a whole: its draft_precision
    and patterns were chosen for its own.

    Raises:
        DflashError: what the executor does not compute in, or an option without an effect.
    """
    places: dict[Owner, str] = {"target": "--precision", "draft": "--draft-precision"}
    precision, draft_precision = options.precision, options.draft_precision
    exclude = options.exclude
    if precision is None:
        exclude = exclude or config.exclude
        if config.precision is not None:
            precision, places["target"] = config.precision, f"{config_path}, precision"
        if draft_precision is None and config.draft_precision is not None:
            draft_precision = config.draft_precision
            places["draft"] = f"{config_path}, draft_precision"
    names: dict[Owner, PrecisionName] = {}
    names["target"] = precision or ("bf16" if engines else "fp32")
    names["draft"] = draft_precision or names["target"]
    _check_executor(names, places, engines=engines)
    if draft_precision is not None and not set(names.values()) & set(QUANTIZED):
        raise DflashError(
            f"{draft_precision!r} does nothing: neither model is quantised",
            where=places["draft"],
            fix="leave it out; --precision says what engines compute in",
            usage=True,
        )
    # What is not quantised has the one type that everything is computed in.
    floats = [name for name in names.values() if name in COMPUTE] or ["bf16"]
    return PrecisionRecipe(
        compute=COMPUTE[floats[0]] if engines else Precision.FLOAT32,
        algorithms={owner: Format(name) for owner, name in names.items() if name in QUANTIZED},
        exclude=exclude,
    )


def _check_executor(
    names: dict[Owner, PrecisionName], places: dict[Owner, str], *, engines: bool
) -> None:
    if engines:
        for owner, name in names.items():
            if name == "fp32":
                raise DflashError(
                    "engines compute in bf16 or fp16, not in fp32",
                    where=places[owner],
                    fix="choose one of bf16, fp16, fp8, nvfp4",
                    usage=True,
                )
    # A draft in bf16 or fp16 beside a quantised target is one that stays as it is.
    elif names["target"] in ("bf16", "fp16"):
        raise DflashError(
            f"{names['target']!r} is for engines; the CPU executor computes in float32",
            where=places["target"],
            fix="add --executor tensorrt-rtx, or choose fp32, fp8 or nvfp4",
            usage=True,
        )


def check_idle_options(recipe: PrecisionRecipe, options: PrecisionOptions) -> None:
    """Refuses options about what is not going to happen."""
    what = "does nothing without a precision to quantize to"
    fix = "add --precision fp8 or nvfp4, or leave it out"
    if not recipe.algorithms:
        given = {"--calibration": options.calibration, "--exclude": options.exclude}
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
    """What the build quantises of `pair`, calibrated on `texts`; see `PairQuantization`.

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
