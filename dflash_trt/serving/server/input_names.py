"""Fields of the contracts that are no tensors, and what a client meant by one that they lack.

Over HTTP (`/generate`) Triton server makes a parameter of every field that the model has no input
for; over gRPC parameters are parameters. Whatever nobody reads is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from dflash_trt.errors import one_line
from dflash_trt.serving.server.inputs import STOP_IDS, refuse

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
_OTHER_NAMES = {
    "prompt": "text_input",
    "max_new_tokens": "sampling_param_max_tokens",
    "max_completion_tokens": "sampling_param_max_tokens",
    "seed": "sampling_param_seed",
    "random_seed": "sampling_param_seed",
    "timeout": "timeout_us",
}
LLM_NAMES: Mapping[str, str] = RENAMED | _OTHER_NAMES
CLASSIC_NAMES: Mapping[str, str] = {
    **{theirs: ours for ours, theirs in RENAMED.items() if theirs != ours},
    "sampling_param_seed": "seed",
    "prompt": "text_input",
    "max_new_tokens": "max_tokens",
}

# TensorRT-LLM's guided decoding: inputs of the classic contract, parameters of the other one.
GUIDE_TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
# Parameters that `llm_model.py` reads itself; the request's id comes as one too.
READ_ELSEWHERE = frozenset({"id", "timeout_us", STOP_IDS})
# Those of the classic contract, which are passed on.
CLASSIC_PARAMETERS = frozenset(
    {"id", "streaming_text", "ignore_eos", "add_special_tokens", "end_id", "block_size"}
)
_OF_THE_SERVER = "triton_"


def check_parameters(parameters: Iterable[str], known: Set[str], names: Mapping[str, str]) -> None:
    """Refuses the first parameter that is not `known`; `names` has what others call a field.

    Raises:
        DflashError: there is one (usage).
    """
    for name in parameters:
        if name in known or name.startswith(_OF_THE_SERVER):
            continue
        meant = names.get(name)
        fix = (
            f"send {meant}"
            if meant is not None
            else "leave it out (config.pbtxt has all there are)"
        )
        raise refuse(one_line(name, 60), "is no field of this model", fix)
