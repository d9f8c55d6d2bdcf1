"""The LLM-API contract's inputs as a request of the runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash_trt.core.strict_json import parse_json
from dflash_trt.errors import DflashError, one_line
from dflash_trt.runtime import Request, SamplingParams
from dflash_trt.sampling.penalties import MOST_BIASED, Penalties
from dflash_trt.sampling.rules import MOST_ALLOWED, TokenRules
from dflash_trt.serving.server.fields import LLM_NAMES, LLM_PARAMETERS, check_parameters
from dflash_trt.serving.server.guides import GUIDE, GUIDE_TYPE, read_guide
from dflash_trt.serving.server.inputs import (
    Tensors,
    check_sizes,
    check_unimplemented,
    read_flag,
    read_scalar,
    read_texts,
    refuse,
)
from dflash_trt.text.grammar import MOST_CHARACTERS, Grammar
from dflash_trt.text.stops import check_stop_strings
from dflash_trt.text.tokenizer import BundleTokenizer

# What TensorRT-LLM's SamplingParams take when the client says nothing.
DEFAULT_MAX_TOKENS = 32

StreamingText = Literal["cumulative", "delta"]
STREAMING_TEXTS: tuple[StreamingText, ...] = ("cumulative", "delta")

# Inputs that would change the output: the values that ask for nothing.
UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "sampling_param_best_of": (1,),
    "image_url": ("",),
    "lora_id": (),
    "lora_name": ("",),
    "lora_path": ("",),
    "lora_ckpt_source": ("",),
}
_SAMPLING = "sampling_param_"
_MOST_BIAS_TEXT = 64 << 10
_MOST_DIGITS = 10
_MOST_ID_TEXT = 12  # characters of a token id, a comma and a blank
_MOST_GRAMMAR_TEXT = 6 * MOST_CHARACTERS + 100  # JSON takes up to six bytes for a character


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A runtime request, and how its client wants to hear of it.

    `grammar` is what the output must follow; it is not yet in the request, which takes it compiled.
    `lead` begins the output: the prompt, if it is not to be excluded. A model that forwards asks
    for `errors_as_output`, and with `acknowledge` for an empty message at once.
    """

    request: Request
    grammar: Grammar | None
    streaming: bool
    streaming_text: StreamingText
    lead: str
    return_finish_reason: bool
    return_stop_reason: bool
    return_perf_metrics: bool
    return_cumulative_logprob: bool
    errors_as_output: bool
    acknowledge: bool


class GenerationReader:
    """Reads requests for a bundle whose caches have `max_seq_len` positions.

    `streaming_text` is what is streamed where the request does not say. Without `speculation` no
    request may choose a block size.
    """

    def __init__(
        self,
        tokenizer: BundleTokenizer,
        max_seq_len: int,
        streaming_text: StreamingText,
        *,
        speculation: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._speculation = speculation
        self._streaming_text = streaming_text
        # A text longer than this cannot fit, and need not be tokenised to know it.
        longest = max(map(len, tokenizer.core.get_vocab(with_added_tokens=True)))
        self._max_characters, self._max_seq_len = max_seq_len * longest, max_seq_len

    def read(self, tensors: Tensors, parameters: Mapping[str, Any]) -> Generation:
        """Raises DflashError (usage) naming the first input that cannot be served."""
        check_sizes(tensors)
        check_parameters(parameters, LLM_PARAMETERS, LLM_NAMES)
        check_unimplemented(tensors, UNIMPLEMENTED)
        stop_strings = tuple(filter(None, read_texts(tensors, f"{_SAMPLING}stop")))
        check_stop_strings(stop_strings, f"{_SAMPLING}stop")
        text, prompt_ids = self._read_prompt(tensors, parameters)
        max_tokens = read_scalar(tensors, f"{_SAMPLING}max_tokens", int)
        if max_tokens is not None and max_tokens < 1:
            raise refuse(f"{_SAMPLING}max_tokens", f"{max_tokens} is not at least 1")
        exclude = read_scalar(tensors, f"{_SAMPLING}exclude_input_from_output", bool)

        sampling = _read_sampling(tensors, parameters)
        sums = bool(read_scalar(tensors, "return_cumulative_logprob", bool))

        def is_set(name: str) -> bool:
            return bool(read_scalar(tensors, name, bool))

        return Generation(
            request=Request(
                prompt_ids=prompt_ids,
                max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
                sampling=sampling,
                stop_token_ids=_read_end_id(parameters),
                stop_strings=stop_strings,
                ignore_eos=read_flag(parameters, "ignore_eos", False),
                block_size=self._read_block_size(parameters),
                penalties=_read_penalties(tensors, parameters, sampling),
                rules=self._read_rules(parameters),
                logprobs=parameters.get("logprobs", 0 if sums else None),
                logprobs_mode=parameters.get("logprobs_mode", "raw_logprobs"),
                prompt_logprobs=parameters.get("prompt_logprobs"),
            ),
            grammar=_read_grammar(parameters),
            streaming=is_set("streaming"),
            streaming_text=check_streaming_text(
                parameters.get("streaming_text", self._streaming_text)
            ),
            lead=text if exclude is False else "",
            return_finish_reason=is_set("return_finish_reason"),
            return_stop_reason=is_set("return_stop_reason"),
            return_perf_metrics=is_set(f"{_SAMPLING}return_perf_metrics"),
            return_cumulative_logprob=sums,
            errors_as_output=read_flag(parameters, "errors_as_output", False),
            acknowledge=read_flag(parameters, "acknowledge", False),
        )

    def _read_prompt(
        self, tensors: Tensors, parameters: Mapping[str, Any]
    ) -> tuple[str, tuple[int, ...]]:
        """The prompt's text and its tokens; no text where our own clients send tokens."""
        given = parameters.get("prompt_ids")
        if given is None:
            text = self._read_text(tensors)
            special = read_flag(parameters, "add_special_tokens", True)
            return text, tuple(self._tokenizer.encode(text, special=special))
        if not isinstance(given, str) or len(given) > self._max_seq_len * _MOST_ID_TEXT:
            raise refuse("prompt_ids", "more than the model's context, or no JSON")
        ids = parse_json(given.encode(), "prompt_ids", self._max_seq_len + 1)
        if not isinstance(ids, list) or any(type(one) is not int for one in ids):
            raise refuse("prompt_ids", "is not a JSON list of token ids")
        return "", tuple(ids)

    def _read_text(self, tensors: Tensors) -> str:
        texts = read_texts(tensors, "text_input")
        if len(texts) != 1:
            raise refuse("text_input", f"holds {len(texts)} texts, one is wanted")
        if not texts[0]:
            raise refuse("text_input", "the prompt is empty")
        if len(texts[0]) > self._max_characters:
            what = f"{len(texts[0]):,} characters cannot fit the model's context"
            raise refuse("text_input", what)
        return texts[0]

    def _read_rules(self, parameters: Mapping[str, Any]) -> TokenRules:
        """Tokens that may not come.

        As in vLLM, a bad word is forbidden at the start of a text and, where that is as many
        tokens and another first one, behind a blank.
        """
        ids = _read_list(parameters, "allowed_token_ids", int)
        bad: list[tuple[int, ...]] = []
        for word in _read_list(parameters, "bad_words", str) or ():
            plain, behind = (
                tuple(self._tokenizer.encode(text + word.lstrip(), special=False))
                for text in ("", " ")
            )
            is_other = len(plain) == len(behind) and plain[:1] != behind[:1]
            bad += [one for one in ((plain, behind) if is_other else (plain,)) if one]
        return TokenRules(allowed=None if ids is None else tuple(ids), bad=tuple(bad))

    def _read_block_size(self, parameters: Mapping[str, Any]) -> int | None:
        """Rows of this request's verify steps; None is the trained block."""
        size = parameters.get("block_size")
        if size is None:
            return None
        if type(size) is not int:
            raise refuse("block_size", f"{one_line(repr(size), 40)} is not an integer")
        if not self._speculation:
            raise refuse("block_size", "it needs speculation, which is off here", "leave it out")
        return size


def _read_grammar(parameters: Mapping[str, Any]) -> Grammar | None:
    """What the output must follow, as our own clients and the classic model send it, or as
    TensorRT-LLM's two fields, which this contract has no inputs for."""
    kind, guide = (parameters.get(name, "") for name in (GUIDE_TYPE, GUIDE))
    given = parameters.get("grammar", read_guide(str(kind), str(guide)))
    if given is None:
        return None
    if not isinstance(given, str) or len(given) > _MOST_GRAMMAR_TEXT:
        raise refuse("grammar", "is not the JSON of a grammar")
    raw = parse_json(given.encode(), "grammar", 4)
    if not isinstance(raw, dict) or raw.keys() != {"kind", "text"}:
        raise refuse("grammar", "is not the JSON of a grammar")
    if not isinstance(raw["text"], str):
        raise refuse("grammar", "its text is none")
    return Grammar(raw["kind"], raw["text"])


def check_streaming_text(value: object) -> StreamingText:
    """Raises DflashError (usage) unless `value` is one of STREAMING_TEXTS."""
    for known in STREAMING_TEXTS:
        if value == known:
            return known
    known_values = " or ".join(STREAMING_TEXTS)
    raise refuse("streaming_text", f"{one_line(repr(value), 40)} is not {known_values}")


def _read_sampling(tensors: Tensors, parameters: Mapping[str, Any]) -> SamplingParams:
    """As TensorRT-LLM reads them: 0 is a top_k or top_p that was not set.

    Without a temperature, a client that narrows the choice wants to sample at 1, and one that
    does not wants the likeliest token; a top_k of 1 is greedy by its meaning.
    """
    top_k = read_scalar(tensors, f"{_SAMPLING}top_k", int) or None
    top_p = read_scalar(tensors, f"{_SAMPLING}top_p", float) or 1.0
    temperature = read_scalar(tensors, f"{_SAMPLING}temperature", float)
    if temperature is None:
        temperature = 1.0 if top_k is not None or top_p != 1.0 else 0.0
    try:
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=read_scalar(tensors, f"{_SAMPLING}seed", int) or 0,
            min_p=_read_float(parameters.get("min_p", "0")),
        )
    except DflashError as error:
        if error.where == "min_p":
            raise
        raise refuse(f"{_SAMPLING}{error.where}", error.what, error.fix) from error
    return SamplingParams(seed=params.seed) if top_k == 1 else params


def _read_penalties(
    tensors: Tensors, parameters: Mapping[str, Any], sampling: SamplingParams
) -> Penalties:
    """Both penalties of the contract; our own models' `repetition_penalty`, a number as text, and
    `logit_bias`, a JSON object.

    As TensorRT-LLM has them, whose contract it is: taken off what the temperature has divided, and
    counting the prompt's tokens too. Clients of ours say that theirs are OpenAI's.
    """
    is_ours = read_flag(parameters, "own_penalties", False)
    given = parameters.get("logit_bias", "{}")
    if not isinstance(given, str) or len(given) > _MOST_BIAS_TEXT:
        raise refuse("logit_bias", "is not a JSON object of token ids and numbers")
    bias = parse_json(given.encode(), "logit_bias", 2 * MOST_BIASED + 1)
    if not isinstance(bias, dict) or not all(_is_id(one) for one in bias):
        raise refuse("logit_bias", "is not a JSON object of token ids and numbers")
    frequency, presence = (
        read_scalar(tensors, f"{_SAMPLING}{kind}_penalty", float) or 0.0
        for kind in ("frequency", "presence")
    )
    try:
        return Penalties(
            frequency=frequency,
            presence=presence,
            repetition=_read_float(parameters.get("repetition_penalty", "1")),
            bias=tuple((int(token_id), value) for token_id, value in bias.items()),
            counts_prompt=not is_ours,
            scale=1.0 if is_ours or sampling.greedy else sampling.temperature,
        )
    except DflashError as error:
        contract = ("frequency_penalty", "presence_penalty")
        name = f"{_SAMPLING}{error.where}" if error.where in contract else error.where
        raise refuse(str(name), error.what, error.fix) from error


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def _read_list(parameters: Mapping[str, Any], name: str, kind: type) -> list[Any] | None:
    """A parameter that holds a JSON list; None where it was not sent."""
    given = parameters.get(name)
    if given is None:
        return None
    if not isinstance(given, str) or len(given) > _MOST_BIAS_TEXT:
        raise refuse(name, "is no JSON list, or a long one")
    values = parse_json(given.encode(), name, MOST_ALLOWED + 1)
    if not isinstance(values, list) or any(type(one) is not kind for one in values):
        raise refuse(name, "is no JSON list of " + ("token ids" if kind is int else "texts"))
    return values


def _read_float(text: object) -> float:
    """A number that parameters, which are texts, flags and integers, hold as text."""
    try:
        return float(text) if isinstance(text, str) else math.nan
    except ValueError:
        return math.nan


def _read_end_id(parameters: Mapping[str, Any]) -> tuple[int, ...]:
    """A further token that ends the output; a negative one is none."""
    end_id = parameters.get("end_id", -1)
    if type(end_id) is not int:
        raise refuse("end_id", f"{one_line(repr(end_id), 40)} is not a token id")
    return (end_id,) if end_id >= 0 else ()
