"""What Dynamo's frontend sends a worker, as requests of the runtime.

Fields are those of Dynamo 1.6's PreprocessedRequest. What is None was not stated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_trt.bundle.sampling_defaults import ALL_TOKENS, SamplingDefaults
from dflash_trt.decoding import Request, SamplingParams
from dflash_trt.errors import DflashError, nearest, one_line
from dflash_trt.sampling.penalties import Penalties
from dflash_trt.sampling.token_rules import TokenRules
from dflash_trt.text.grammar import Grammar, GrammarKind, schema_text

ANNOTATION = "dflash."
"""Begins an annotation (`nvext.annotations`) that is meant for this worker."""
MOST_CHOICES = 128
_ANNOTATIONS = ["speculate", "block_size"]
_FLAGS = {"true": True, "false": False}
_GUIDES: dict[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_REFUSED_GUIDES = ("whitespace_pattern", "structural_tag")
_WIRE_DIGITS = 7
"""Of a float32, which is what numbers travel as: 0.8 arrives as 0.800000011920929."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One request to each choice it wants, and the grammar that all of them follow, if any."""

    choices: tuple[Request, ...]
    grammar: Grammar | None


def read_request(
    given: Mapping[str, Any], request_id: str, defaults: SamplingDefaults
) -> TokenRequest:
    """Reads what the frontend sends; without a seed the request's id gives one.

    A request that is moved to another worker keeps its id, so it goes on with the same noise. A
    choice's seed is one more than that of the choice before it.

    Raises:
        DflashError: the first value that cannot be served (usage).
    """
    wishes = _Wishes(_part(given, "sampling_options"), defaults)
    stops, output = _part(given, "stop_conditions"), _part(given, "output_options")
    if any(given.get(name) for name in ("prompt_embeds", "multi_modal_data")):
        what = "carries pictures, sound or embeddings, and this model takes tokens alone"
        raise DflashError(what, where="prompt", usage=True)
    if wishes.get("use_beam_search") or (wishes.get("best_of") or 1) > 1:
        raise DflashError("is not known here", where="best_of", usage=True)
    count = wishes.get("n") or 1
    if not 1 <= count <= MOST_CHOICES:
        raise DflashError(f"{count} is not 1 … {MOST_CHOICES}", where="n", usage=True)
    more = _part(_part(given, "extra_args"), "sampling_options")
    for name in more.keys() - {"allowed_token_ids"}:
        raise DflashError("is not known here", where=name, usage=True)
    allowed = more.get("allowed_token_ids")
    if count > 1 and stops.get("stop"):
        what = "does not go with n: Dynamo's frontend ends all choices at the first stop text"
        raise DflashError(what, where="stop", fix="ask n times", usage=True)
    own, seed = _read_annotations(given.get("annotations") or ()), wishes.get("seed")
    if seed is None:
        digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
    top_k = wishes.get("top_k")
    request = Request(
        prompt_ids=tuple(given["token_ids"]),
        max_tokens=stops.get("max_tokens"),
        sampling=SamplingParams(
            temperature=wishes.number("temperature", 1.0),
            top_k=None if top_k in ALL_TOKENS else top_k,
            top_p=wishes.number("top_p", 1.0),
            min_p=wishes.number("min_p", 0.0),
            seed=seed % 2**64,
        ),
        penalties=Penalties(
            frequency=wishes.number("frequency_penalty", 0.0),
            presence=wishes.number("presence_penalty", 0.0),
            repetition=wishes.number("repetition_penalty", 1.0),
        ),
        stop_strings=tuple(filter(None, stops.get("stop") or ())),
        stop_token_ids=_unite(stops.get("stop_token_ids"), stops.get("stop_token_ids_visible")),
        ignore_eos=bool(stops.get("ignore_eos")),
        min_tokens=stops.get("min_tokens") or 0,
        include_stop_str_in_output=bool(wishes.get("include_stop_str_in_output")),
        skip_special_tokens=output.get("skip_special_tokens") is not False,
        rules=TokenRules(allowed=None if allowed is None else tuple(allowed)),
        logprobs=output.get("logprobs"),
        prompt_logprobs=output.get("prompt_logprobs"),
        **own,
    )
    seeds = ((request.sampling.seed + place) % 2**64 for place in range(count))
    choices = [replace(request, sampling=replace(request.sampling, seed=one)) for one in seeds]
    first, *others = choices  # the prompt of several is looked at once
    return TokenRequest(
        (first, *(replace(one, prompt_logprobs=None) for one in others)),
        _read_grammar(_part(wishes.given, "guided_decoding")),
    )


class _Wishes:
    """A request's sampling options, and what the checkpoint asks for where one is not stated."""

    def __init__(self, given: Mapping[str, Any], defaults: SamplingDefaults) -> None:
        self.given, self._defaults = given, defaults

    def get(self, name: str) -> Any:
        value = self.given.get(name)
        return self._defaults.get(name) if value is None else value

    def number(self, name: str, default: float) -> float:
        value = self.given.get(name)
        if value is None:
            return float(self._defaults.get(name, default))
        return float(f"{value:.{_WIRE_DIGITS}g}")


def _unite(*lists: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(one for some in lists for one in some or ()))


def _part(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return given.get(name) or {}


def _read_annotations(annotations: Sequence[str]) -> dict[str, Any]:
    """Options of a request that Dynamo has no field for, as in dflash.block_size:4."""
    found: dict[str, Any] = {}
    for one in annotations:
        if not one.startswith(ANNOTATION):
            continue
        name, _, text = one.removeprefix(ANNOTATION).partition(":")
        where = f"annotations: {one_line(one, 60)}"
        if name not in _ANNOTATIONS:
            what = f"is not known{nearest(name, _ANNOTATIONS)}"
            raise DflashError(what, where=where, usage=True)
        if name in found:
            raise DflashError("is given twice", where=where, usage=True)
        if name == "block_size" and text.isdecimal() and len(text) < 6:
            found[name] = int(text)
        elif name == "speculate" and text in _FLAGS:
            found[name] = _FLAGS[text]
        else:
            what = "a whole number" if name == "block_size" else "true or false"
            raise DflashError(f"must be {what}", where=where, usage=True)
    return found


def _read_grammar(guides: Mapping[str, Any]) -> Grammar | None:
    for name in _REFUSED_GUIDES:
        if guides.get(name):
            raise DflashError("is not known here", where=f"guided_decoding.{name}", usage=True)
    for name, kind in _GUIDES.items():
        if (value := guides.get(name)) is None:
            continue
        if kind == "choice":
            return Grammar(kind, json.dumps(value))
        return Grammar(kind, value if isinstance(value, str) else schema_text(value))
    return None
