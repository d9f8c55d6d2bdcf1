"""What a build computes in and quantises, on each kind of executor."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.building.spec import PrecisionOptions
from dflash_trt.bundle.support import CPU, PRECISIONS, check_executor
from dflash_trt.core.formats import QUANTIZED, Format
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.graph.bindings import Owner
from dflash_trt.graph.form import Precision
from dflash_trt.models.build_config import BuildConfig, PrecisionName, resolve_file
from dflash_trt.text.prompts import read_prompts

COMPUTE = {"fp32": Precision.FLOAT32, "bf16": Precision.BFLOAT16, "fp16": Precision.FLOAT16}


def choose_precisions(
    config: BuildConfig, options: PrecisionOptions, config_path: Path, executor: str
) -> tuple[Precision, dict[Owner, Format]]:
    """What graphs compute in, and the formats of the models that are quantised.

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
    return Precision.FLOAT32 if executor == CPU else COMPUTE[floats[0]], algorithms


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
