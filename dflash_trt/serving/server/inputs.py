"""Values out of a request's tensors and parameters, each error naming its input.

Over HTTP (`/generate`) Triton server makes a parameter of every field that the model has no input
for; over gRPC parameters are parameters. Whatever nobody reads is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from dflash_trt.errors import DflashError, one_line
from dflash_trt.serving.client.wire import FLOW
from dflash_trt.text.detokenise import MAX_STOP_STRINGS

T = TypeVar("T", bool, int, float)

Tensors = Mapping[str, npt.NDArray[Any]]

# A parameter of stops between our models: ids of the requests to end, a space between two.
STOP_IDS = "stop_ids"

# Inputs of the classic contract and of the LLM-API contract: one meaning, one type, two names.
RENAMED = {
    "text_input": "text_input",
    "max_tokens": "sampling_param_max_tokens",
    "stream": "streaming",
    "temperature": "sampling_param_temperature",
    "top_k": "sampling_param_top_k",
    "top_p": "sampling_param_top_p",
    "frequency_penalty": "sampling_param_frequency_penalty",
    "presence_penalty": "sampling_param_presence_penalty",
    "stop_words": "sampling_param_stop",
    "exclude_input_in_output": "sampling_param_exclude_input_from_output",
    "return_perf_metrics": "sampling_param_return_perf_metrics",
}
LLM_NAMES: Mapping[str, str] = RENAMED | {
    "prompt": "text_input",
    "max_new_tokens": "sampling_param_max_tokens",
    "max_completion_tokens": "sampling_param_max_tokens",
    "seed": "sampling_param_seed",
    "random_seed": "sampling_param_seed",
    "timeout": "timeout_us",
}
CLASSIC_NAMES: Mapping[str, str] = {
    **{theirs: ours for ours, theirs in RENAMED.items() if theirs != ours},
    "sampling_param_seed": "seed",
    "prompt": "text_input",
    "max_new_tokens": "max_tokens",
}

# TensorRT-LLM's guided decoding: inputs of the classic contract, parameters of the other one.
GUIDE_TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
# A parameter, true: `text_input` is a user's message, which stands in the chat template.
APPLY_TEMPLATE = "apply_chat_template"
# Parameters that `llm_model.py` reads itself; the request's id comes as one too.
READ_ELSEWHERE = frozenset({"id", "timeout_us", STOP_IDS, FLOW})
# Those of the classic contract, which are passed on.
CLASSIC_PARAMETERS = frozenset(
    "id streaming_text ignore_eos add_special_tokens end_id stop_token_ids block_size".split()
)


def refuse(name: str, what: str, fix: str | None = None) -> DflashError:
    """A DflashError (usage) about the input `name`."""
    return DflashError(what, where=name, fix=fix, usage=True)


def read_scalar(tensors: Tensors, name: str, kind: type[T]) -> T | None:
    """The one value of a tensor of one element; None where it was not sent.

    A float32 is read as the shortest decimal number that it stands for: 0.7 is the same
    temperature here as on the command line.
    """
    tensor = tensors.get(name)
    if tensor is None:
        return None
    if tensor.size != 1:
        raise refuse(name, f"has shape {list(tensor.shape)}, one value is wanted")
    value = tensor.reshape(-1)[0]
    return kind(str(value)) if kind is float else kind(value)


def read_texts(tensors: Tensors, name: str) -> list[str]:
    """The texts of a tensor; none where it was not sent."""
    tensor = tensors.get(name)
    texts: list[str] = []
    for element in [] if tensor is None else tensor.reshape(-1).tolist():
        data = element if isinstance(element, bytes) else str(element).encode()
        try:
            texts.append(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise refuse(name, f"is not UTF-8 at byte {error.start}") from error
    return texts


def check_inputs(tensors: Tensors, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses inputs of too many values, or that would change the output if they were implemented.

    `neutral` gives the values of each of these that ask for nothing."""
    for name, tensor in tensors.items():
        if tensor.size > MAX_STOP_STRINGS:
            raise refuse(name, f"{tensor.size:,} values are more than {MAX_STOP_STRINGS}")
    for name, values in neutral.items():
        given = tensors.get(name)
        for element in () if given is None else given.reshape(-1).tolist():
            value = element.decode("utf-8", "replace") if isinstance(element, bytes) else element
            if value not in values:
                advice = f" or pass {' or '.join(map(shown, values))}" if values else ""
                raise refuse(name, f"{shown(value)} is not supported", f"leave it out{advice}")


def check_parameters(parameters: Iterable[str], known: Set[str], names: Mapping[str, str]) -> None:
    """Refuses the first parameter that is not `known`; `names` has what others call a field."""
    for name in parameters:
        if name not in known and not name.startswith("triton_"):
            fix = f"send {names[name]}" if name in names else "leave it out (see config.pbtxt)"
            raise refuse(one_line(name, 60), "is no field of this model", fix)


def as_strings(texts: list[str]) -> npt.NDArray[np.object_]:
    """Texts as the elements of a STRING tensor."""
    return np.array([text.encode() for text in texts], dtype=np.object_)


def shown(value: object) -> str:
    """A value as JSON has it, short."""
    return one_line(json.dumps(value) if isinstance(value, str | bool) else str(value), 40)


class ModelSettings:
    """The arguments of a model's `initialize`."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        self._parameters: dict[str, dict[str, str]] = config["parameters"]
        self.version_folder = Path(arguments["model_repository"]) / arguments["model_version"]

    def read(self, name: str, kind: Any) -> Any:
        """The parameter `name` as a `kind`; DflashError where it is none."""
        given = self._parameters.get(name, {}).get("string_value")
        try:
            return TypeAdapter(kind).validate_python(given)
        except ValidationError as error:
            what = f"{error.errors()[0]['msg']}, got {one_line(repr(given), 40)}"
            fix = "package the bundle again" if given is None else None  # of an earlier version
            raise DflashError(what, where=f"config.pbtxt: parameters: {name}", fix=fix) from error
