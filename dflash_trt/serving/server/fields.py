"""Fields of the contracts that are no tensors, and what a client meant by one that they lack.

Over HTTP (`/generate`) Triton server makes a parameter of every field that the model has no input
for; over gRPC parameters are parameters. Whatever nobody reads is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dflash_trt.errors import one_line
from dflash_trt.serving.server.guides import GUIDE, GUIDE_TYPE
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

# The request's id comes as one too.
_PARAMETERS = {
    "id",
    "streaming_text",
    "ignore_eos",
    "add_special_tokens",
    "end_id",
    "block_size",
}
# For clients of ours, the other model among them.
_BETWEEN_US = {
    "timeout_us",
    "errors_as_output",
    "acknowledge",
    "logprobs",
    "logprobs_mode",
    "prompt_logprobs",
    "logit_bias",
    "grammar",
    "prompt_ids",
    "repetition_penalty",
    "own_penalties",
    "min_p",
    "allowed_token_ids",
    "bad_words",
    STOP_IDS,
}
LLM_PARAMETERS = frozenset(_PARAMETERS | _BETWEEN_US | {GUIDE_TYPE, GUIDE})
CLASSIC_PARAMETERS = frozenset(_PARAMETERS)
_OF_THE_SERVER = "triton_"


def check_parameters(
    parameters: Iterable[str], known: frozenset[str], names: Mapping[str, str]
) -> None:
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
