"""The LLM-API contract's inputs as a request of the runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from dflash_trt.core.limits import TOO_LONG
from dflash_trt.core.strict_json import parse_json
from dflash_trt.core.validation import check_value
from dflash_trt.decoding import Request, SamplingParams
from dflash_trt.errors import DflashError
from dflash_trt.sampling.penalties import MOST_BIASED, Penalties, TokenName
from dflash_trt.sampling.token_rules import MOST_ALLOWED, TokenRules
from dflash_trt.serving.server.inputs import (
    APPLY_TEMPLATE,
    GUIDE,
    GUIDE_TYPE,
    LLM_NAMES,
    READ_ELSEWHERE,
    Tensors,
    check_inputs,
    check_parameters,
    read_scalar,
    read_texts,
    refuse,
    shown,
)
from dflash_trt.text.chat import ChatRenderer
from dflash_trt.text.detokenise import MAX_STOP_IDS
from dflash_trt.text.grammar import MOST_CHARACTERS, Grammar, GrammarKind
from dflash_trt.text.tokenizer import BundleTokenizer

# What TensorRT-LLM's SamplingParams take when the client says nothing.
DEFAULT_MAX_TOKENS = 32

StreamingText = Literal["cumulative", "delta"]
# Inputs that are flags, and parameters of our own models and clients: `errors_as_output`, and
# `acknowledge` for an empty message at once.
SUM = "return_cumulative_logprob"
TIMED = "sampling_param_return_perf_metrics"
FLAGS = ("streaming", "return_finish_reason", "return_stop_reason", SUM, TIMED)
OWN_FLAGS = ("errors_as_output", "acknowledge")

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
# Fields of the runtime's request that are inputs of the contract.
_INPUTS = "max_tokens temperature top_k top_p seed frequency_penalty presence_penalty".split()
_INPUT_NAMES = {name: _SAMPLING + name for name in _INPUTS}
_INPUT_NAMES["stop_strings"] = f"{_SAMPLING}stop"
# TensorRT-LLM's names for what a guide is; structural tags are not known.
_GUIDES: dict[str, GrammarKind] = {
    "json": "json_object",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "grammar",
}
_MOST_TEXT = 64 << 10
_MOST_ID_TEXT = 12  # characters of a token id, a comma and a blank
_MOST_GRAMMAR_TEXT = 6 * MOST_CHARACTERS + 100  # JSON takes up to six bytes for a character

T = TypeVar("T", bool, int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A runtime request, and how its client wants to hear of it.

    `grammar` is what the output must follow; it is not yet in the request, which takes it compiled.
    `lead` begins the output: the prompt, if it is not to be excluded. `wanted` names the inputs
    and parameters of FLAGS that are true.
    """

    request: Request
    grammar: Grammar | None
    streaming_text: StreamingText
    lead: str
    wanted: frozenset[str]


class _Given:
    """A request's tensors and parameters; a parameter that nobody asked for is not known."""

    def __init__(self, tensors: Tensors, parameters: Mapping[str, Any]) -> None:
        self.tensors, self._parameters = tensors, parameters
        self._known = set(READ_ELSEWHERE)

    def sampling(self, name: str, kind: type[T]) -> T | None:
        """The value of the contract's input for a sampling parameter."""
        return read_scalar(self.tensors, _SAMPLING + name, kind)

    def parameter(self, name: str, default: Any = None) -> Any:
        """A parameter as it came: a text, a flag or an integer."""
        self._known.add(name)
        return self._parameters.get(name, default)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A parameter that is true or false; clients that only know strings write those words."""
        value = self.parameter(name, default)
        if value in (True, "true"):
            return True
        if value in (False, "false"):
            return False
        raise refuse(name, f"{shown(value)} is neither true nor false")

    def number(self, name: str, default: float) -> float:
        """A parameter that is the text of a number; NaN for any other."""
        given = self.parameter(name, str(default))
        try:
            return float(given) if isinstance(given, str) else math.nan
        except ValueError:
            return math.nan

    def json(self, name: str, kind: Any, most_values: int, most_text: int = _MOST_TEXT) -> Any:
        """A parameter that is the JSON of a `kind`; None where it was not sent."""
        given = self.parameter(name)
        if given is None:
            return None
        if not isinstance(given, str) or len(given) > most_text:
            raise refuse(name, f"is not JSON of at most {most_text:,} characters")
        value = parse_json(given.encode(), name, most_values)
        check_value(name, value, kind)
        return value

    def read_flags(self) -> frozenset[str]:
        """Those of FLAGS that are true."""
        inputs = {name for name in FLAGS if read_scalar(self.tensors, name, bool)}
        return frozenset(inputs | {name for name in OWN_FLAGS if self.flag(name)})

    def check(self) -> None:
        """Refuses the first parameter that nobody asked for."""
        check_parameters(self._parameters, self._known, LLM_NAMES)


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
        self._renderer: ChatRenderer | None = None
        self._speculation = speculation
        self._streaming_text = streaming_text
        # A text longer than this cannot fit, and need not be tokenised to know it.
        longest = max(map(len, tokenizer.core.get_vocab(with_added_tokens=True)))
        self._max_characters, self._max_seq_len = max_seq_len * longest, max_seq_len

    def read(self, tensors: Tensors, parameters: Mapping[str, Any]) -> Generation:
        """Raises DflashError (usage) naming the first input that cannot be served."""
        check_inputs(tensors, UNIMPLEMENTED)
        given = _Given(tensors, parameters)
        text, prompt_ids = self._read_prompt(given)
        exclude = given.sampling("exclude_input_from_output", bool)
        try:
            request = self._read_request(given, prompt_ids)
        except DflashError as error:
            if error.where not in _INPUT_NAMES:
                raise
            raise refuse(_INPUT_NAMES[error.where], error.what, error.fix) from error
        streaming_text = given.parameter("streaming_text", self._streaming_text)
        if streaming_text not in ("cumulative", "delta"):
            raise refuse("streaming_text", f"{shown(streaming_text)} is not cumulative or delta")
        generation = Generation(
            request=request,
            grammar=_read_grammar(given),
            streaming_text=streaming_text,
            lead=text if exclude is False else "",
            wanted=given.read_flags(),
        )
        given.check()
        return generation

    def _read_request(self, given: _Given, prompt_ids: tuple[int, ...]) -> Request:
        """Values as they came: the runtime's own records check them."""
        sampling = _read_sampling(given)
        max_tokens = given.sampling("max_tokens", int)
        sums = read_scalar(given.tensors, SUM, bool)
        end_id = given.parameter("end_id", -1)
        if type(end_id) is not int:
            raise refuse("end_id", f"{shown(end_id)} is not a token id")
        stops = given.json("stop_token_ids", list[int], MAX_STOP_IDS + 2) or ()
        block_size = given.parameter("block_size")
        if type(block_size) is int and not self._speculation:
            raise refuse("block_size", "it needs speculation, which is off here", "leave it out")
        return Request(
            prompt_ids=prompt_ids,
            max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            sampling=sampling,
            stop_token_ids=(*stops, end_id) if end_id >= 0 else (*stops,),  # below 0 is none
            stop_strings=tuple(filter(None, read_texts(given.tensors, f"{_SAMPLING}stop"))),
            ignore_eos=given.flag("ignore_eos"),
            min_tokens=given.parameter("min_tokens", 0),
            include_stop_str_in_output=given.flag("include_stop_str_in_output"),
            skip_special_tokens=given.flag("skip_special_tokens", default=True),
            speculate=given.flag("speculate", default=True),
            block_size=block_size,
            origins=given.flag("origins"),
            penalties=_read_penalties(given, sampling),
            rules=self._read_rules(given),
            logprobs=given.parameter("logprobs", 0 if sums else None),
            logprobs_mode=given.parameter("logprobs_mode", "raw_logprobs"),
            prompt_logprobs=given.parameter("prompt_logprobs"),
        )

    def _read_prompt(self, given: _Given) -> tuple[str, tuple[int, ...]]:
        """The prompt's text and its tokens; no text where our own clients send tokens."""
        most, sent = self._max_seq_len, str(given.parameter("prompt_ids"))
        special = given.flag("add_special_tokens", default=True)
        if (count := sent.count(",") + 1) > most:
            what = f"{count:,} tokens do {TOO_LONG} of {most} holds fewer"
            raise refuse("prompt_ids", what)
        ids = given.json("prompt_ids", list[int], most + 1, most * _MOST_ID_TEXT)
        if ids is not None:
            return "", tuple(ids)
        texts = read_texts(given.tensors, "text_input")
        if len(texts) != 1:
            raise refuse("text_input", f"holds {len(texts)} texts, one is wanted")
        (text,) = texts
        if not text:
            raise refuse("text_input", "the prompt is empty")
        if given.flag(APPLY_TEMPLATE):
            text, special = self._render(text), False
        if len(text) > self._max_characters:
            what = f"{len(text):,} characters do {TOO_LONG} of {self._max_seq_len} holds fewer"
            raise refuse("text_input", what)
        return text, tuple(self._tokenizer.encode(text, special=special))

    def _render(self, text: str) -> str:
        """The text of a chat of this one message; requests are read one after the other."""
        if self._renderer is None:
            self._renderer = self._tokenizer.open_renderer()
        if self._renderer is None:
            raise refuse(APPLY_TEMPLATE, "the model has no chat template", "leave it out")
        return self._renderer.render([{"role": "user", "content": text}])

    def _read_rules(self, given: _Given) -> TokenRules:
        """Tokens that may not come.

        As in vLLM, a bad word is forbidden at the start of a text and, where that is as many
        tokens and another first one, behind a blank.
        """
        ids = given.json("allowed_token_ids", list[int], MOST_ALLOWED + 1)
        bad: list[tuple[int, ...]] = []
        for word in given.json("bad_words", list[str], MOST_ALLOWED + 1) or ():
            plain, behind = (
                tuple(self._tokenizer.encode(text + word.lstrip(), special=False))
                for text in ("", " ")
            )
            is_other = len(plain) == len(behind) and plain[:1] != behind[:1]
            bad += [one for one in ((plain, behind) if is_other else (plain,)) if one]
        return TokenRules(allowed=None if ids is None else tuple(ids), bad=tuple(bad))


def _read_grammar(given: _Given) -> Grammar | None:
    """What the output must follow, as our own clients and the classic model send it, or as
    TensorRT-LLM's two fields, which this contract has no inputs for."""
    kind = dict[Literal["kind", "text"], str]
    raw = given.json("grammar", kind, 4, _MOST_GRAMMAR_TEXT)
    guide_type, guide = (str(given.parameter(name, "")) for name in (GUIDE_TYPE, GUIDE))
    if raw is not None:
        return Grammar(raw.get("kind", ""), raw.get("text", ""))
    if not guide_type and not guide:
        return None
    if guide_type not in _GUIDES:
        raise refuse(GUIDE_TYPE, f"{shown(guide_type)} is none of {', '.join(_GUIDES)}")
    return Grammar(_GUIDES[guide_type], guide)


def _read_sampling(given: _Given) -> SamplingParams:
    """As TensorRT-LLM reads them: 0 is a top_k or top_p that was not set.

    Without a temperature, a client that narrows the choice wants to sample at 1, and one that
    does not wants the likeliest token; a top_k of 1 is greedy by its meaning.
    """
    top_k, top_p = given.sampling("top_k", int) or None, given.sampling("top_p", float) or 1.0
    temperature = given.sampling("temperature", float)
    if temperature is None:
        temperature = 1.0 if top_k is not None or top_p != 1.0 else 0.0
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=given.sampling("seed", int) or 0,
        min_p=given.number("min_p", 0.0),
    )
    return SamplingParams(seed=params.seed) if top_k == 1 else params


def _read_penalties(given: _Given, sampling: SamplingParams) -> Penalties:
    """Both penalties of the contract; our own models' `repetition_penalty`, a number as text, and
    `logit_bias`, a JSON object.

    As TensorRT-LLM has them, whose contract it is: taken off what the temperature has divided, and
    counting the prompt's tokens too. Clients of ours say that theirs are OpenAI's.
    """
    is_ours = given.flag("own_penalties")
    bias = given.json("logit_bias", dict[TokenName, float], 2 * MOST_BIASED + 1) or {}
    return Penalties(
        frequency=given.sampling("frequency_penalty", float) or 0.0,
        presence=given.sampling("presence_penalty", float) or 0.0,
        repetition=given.number("repetition_penalty", 1.0),
        bias=tuple((int(token_id), value) for token_id, value in bias.items()),
        counts_prompt=not is_ours,
        scale=1.0 if is_ours or sampling.greedy else sampling.temperature,
    )
