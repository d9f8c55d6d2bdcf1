"""What a bundle's checkpoint asks to sample by, where a request says nothing about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.bundle.manifest import TOKENIZER_FOLDER
from dflash_trt.core.files import exists
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError, one_line
from dflash_trt.models.target import GENERATION_CONFIG_NAME
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.sampling.penalties import Penalties

SamplingDefaults = Mapping[str, Any]
"""Values by their names in generation_config.json: those that vLLM takes, and no others.

`do_sample` is none of them: where sampling is off is what a temperature of 0 says.
"""
MAX_NEW_TOKENS = "max_new_tokens"
ALL_TOKENS = (0, -1)
"""What transformers and vLLM write for a top_k that keeps all."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_REPETITION = "repetition_penalty"


def read_sampling_defaults(bundle: Bundle) -> SamplingDefaults:
    """The values in the bundle's generation_config.json; none where it has no such file.

    Raises:
        DflashError: a value that no request may have.
    """
    name = f"{TOKENIZER_FOLDER}/{GENERATION_CONFIG_NAME}"
    if bundle.tokenizer_folder is None or not exists(bundle.folder / name):
        return {}
    path = bundle.find(name)
    stated = read_json_object(path)
    names = (*_SAMPLING, _REPETITION, MAX_NEW_TOKENS)
    given = {name: stated[name] for name in names if stated.get(name) is not None}
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    if type(sampling.get("top_k")) is int and sampling["top_k"] in ALL_TOKENS:
        del sampling["top_k"]
    try:
        SamplingParams(**sampling)
        Penalties(repetition=given.get(_REPETITION, 1.0))
        most = given.get(MAX_NEW_TOKENS, 1)
        if type(most) is not int or most < 1:
            what = f"{most!r} is not an integer of at least 1"
            raise DflashError(what, where=MAX_NEW_TOKENS)
    except DflashError as error:
        what = f"{error.where}: {one_line(error.what, 160)}"
        fix = "correct the checkpoint's and build again, or `serve --generation-config none`"
        raise DflashError(what, where=path, fix=fix) from error
    return given


def describe_defaults(defaults: SamplingDefaults) -> str:
    """The values in words, as in "temperature 0.6, top_k 20"."""
    return ", ".join(f"{name} {value}" for name, value in defaults.items())
