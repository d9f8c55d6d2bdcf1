"""The classic contract in terms of the LLM-API contract: names, shapes, and what neither does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.serving.server.inputs import (
    CLASSIC_NAMES,
    CLASSIC_PARAMETERS,
    GUIDE,
    GUIDE_TYPE,
    RENAMED,
    Tensors,
    check_parameters,
    check_sizes,
    check_unimplemented,
    read_scalar,
    read_texts,
    refuse,
)
from dflash_trt.serving.server.replies import TIMES, Outputs

SEED_NAMES = ("seed", "random_seed")

# Inputs that would change the output: the values that ask for nothing. A length penalty ranks
# beams, of which there is one.
UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "min_tokens": (0, 1),
    "length_penalty": (0.0, 1.0),
    "embedding_bias_words": ("",),
    "embedding_bias_weights": (0.0,),
    "prompt_embedding_table": (),
    "prompt_table_extra_id": (),
    "prompt_vocab_size": (0,),
    "lora_task_id": (),
    "lora_weights": (),
    "lora_config": (),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
}

ALWAYS = (
    "text_output",
    "num_verify_steps",
    "acceptance_rate",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
)

# Outputs of both contracts: the classic one's name and shape, [batch, beams, …] of one each.
_LOG_PROBS = {
    "cumulative_logprob": ("cum_log_probs", (1, 1)),
    "logprobs": ("output_log_probs", (1, 1, -1)),
}


@dataclass(frozen=True, slots=True)
class Forward:
    """A request as `tensorrt_llm` takes it; `output_names` are what its client wants of it."""

    tensors: Tensors
    parameters: Mapping[str, Any]
    output_names: tuple[str, ...]
    timeout_us: int


def read_forward(tensors: Tensors, parameters: Mapping[str, Any], timeout_us: int) -> Forward:
    """Raises DflashError (usage) naming the first input that cannot be forwarded."""
    check_sizes(tensors)
    check_parameters(parameters, CLASSIC_PARAMETERS, CLASSIC_NAMES)
    check_unimplemented(tensors, UNIMPLEMENTED)
    forwarded = {
        RENAMED[name]: tensor.reshape(-1) for name, tensor in tensors.items() if name in RENAMED
    }
    seeds = {name: read_scalar(tensors, name, int) for name in SEED_NAMES}
    given = {seed for seed in seeds.values() if seed is not None}
    if len(given) > 1:
        raise refuse(" and ".join(SEED_NAMES), "differ; send one of them")
    if given:
        forwarded["sampling_param_seed"] = np.array(list(given), dtype=np.uint64)
    end_id = read_scalar(tensors, "end_id", int)
    if end_id is not None:
        parameters = {**parameters, "end_id": end_id}
    repetition = read_scalar(tensors, "repetition_penalty", float)
    if repetition is not None:
        parameters = {**parameters, "repetition_penalty": repr(repetition)}
    words = [word for word in read_texts(tensors, "bad_words") if word]
    if words:
        parameters = {**parameters, "bad_words": json.dumps(words)}
    for name in (GUIDE_TYPE, GUIDE):
        if guide := "".join(read_texts(tensors, name)):
            parameters = {**parameters, name: guide}
    names: tuple[str, ...] = ALWAYS
    for name in ("num_input_tokens", "num_output_tokens"):
        if read_scalar(tensors, f"return_{name}", bool):
            names += (name,)
    if read_scalar(tensors, "return_perf_metrics", bool):
        names += TIMES
    if read_scalar(tensors, "return_log_probs", bool):
        forwarded["return_cumulative_logprob"] = np.array([True])
        names += tuple(_LOG_PROBS)
    return Forward(forwarded, parameters, names, timeout_us)


def to_classic(outputs: Outputs, forward: Forward) -> Outputs:
    """Outputs with the batch dimension that classic clients expect."""
    classic = {
        name: values.reshape(1, -1)
        for name, values in outputs.items()
        if name in forward.output_names
    }
    for name, (theirs, shape) in _LOG_PROBS.items():
        if name in classic:
            classic[theirs] = classic.pop(name).astype(np.float32).reshape(shape)
    return classic | {"sequence_index": np.zeros((1, 1), dtype=np.int32)}
