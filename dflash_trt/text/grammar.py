"""Grammars that an output must follow: JSON, a JSON schema, or a regular expression.

llguidance compiles them and says which tokens may come next. It has limits of time and memory and
raises nothing: what it cannot do, or not within them, is an error that is told here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.core.arrays import FloatArray
from dflash_trt.core.masks import TokenMask
from dflash_trt.errors import DflashError, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GrammarKind = Literal["json_object", "json_schema", "regex"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
MOST_CHARACTERS = 64 << 10
# A model that is not sure writes blanks for ever, where a grammar allows them.
_BLANKS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
_MOST_STATES = 10_000
"""Of an output's lexer, one to two kilobytes each; llguidance's own limit is 25 times as high."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must be; `text` is the schema or the expression, empty for any JSON object.

    Raises:
        DflashError: too long (usage).
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            what = f"{one_line(repr(self.kind), 40)} is none of {', '.join(GRAMMAR_KINDS)}"
            raise DflashError(what, where="grammar", usage=True)
        if len(self.text) > MOST_CHARACTERS:
            what = f"{len(self.text):,} characters are more than {MOST_CHARACTERS:,}"
            raise DflashError(what, where="grammar", usage=True)


class Follower:
    """Follows one output token by token."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._known: TokenMask | None = None  # of what comes next

    def fork(self) -> Follower:
        """One of its own for an output that begins here."""
        return Follower(self._matcher.deep_copy(), self._vocab_size)

    def allows(self, token_id: int) -> bool:
        """Whether `token_id` may come next.

        Raises:
            DflashError: llguidance reached a limit.
        """
        # Of an end of sequence, which may come, that says no.
        allowed = self._known is None and self._matcher.validate_tokens([token_id]) == 1
        _check(self._matcher)
        return allowed or self.tokens().has(token_id)

    def tokens(self) -> TokenMask:
        """All tokens that may come next.

        Raises:
            DflashError: llguidance reached a limit.
        """
        if self._known is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            _check(self._matcher)
            self._known = TokenMask(bits, self._vocab_size, "grammar")
        return self._known

    def mask(self, logits: FloatArray) -> FloatArray:
        """A copy of the row [V] in which what may not come next is minus infinity.

        Raises:
            DflashError: nothing may, or llguidance reached a limit.
        """
        return self.tokens().apply(logits)

    def take(self, token_id: int) -> None:
        """The output goes on with `token_id`.

        Raises:
            DflashError: llguidance reached a limit.
        """
        self._known = None
        self._matcher.consume_token(token_id)
        _check(self._matcher)


class GrammarCompiler:
    """Compiles grammars for a tokenizer; any thread may use it.

    Args:
        vocab_size: of the model, which may have more than the tokenizer.
        eos_token_ids: what may come where an output is whole.
    """

    def __init__(self, core: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._core, self._vocab_size = core, vocab_size
        self._eos_token_ids = list(eos_token_ids)

    def compile(self, grammar: Grammar) -> Follower:
        """Raises DflashError (usage): a grammar that is none, or too large; no llguidance here."""
        library = _library()
        matcher_type = library.LLMatcher
        if not self._eos_token_ids:
            what = "the model names no end-of-sequence token, which ends what is whole"
            raise DflashError(what, where="grammar", usage=True)
        schema = grammar.text if grammar.kind == "json_schema" else '{"type":"object"}'
        try:
            if grammar.kind == "regex":
                text = matcher_type.grammar_from_regex(grammar.text)
            else:
                text = matcher_type.grammar_from_json_schema(schema, overrides=_BLANKS)
        except ValueError as error:
            raise DflashError(one_line(error, 200), where="grammar", usage=True) from error
        limits = library.LLParserLimits(max_lexer_states=_MOST_STATES)
        matcher = matcher_type(self._tokenizer, text, log_level=0, limits=limits)
        _check(matcher, usage=True)
        return Follower(matcher, self._vocab_size)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        core = Tokenizer.from_str(self._core.to_str())
        core.no_padding()
        core.no_truncation()
        try:
            made: LLTokenizer = _library().LLTokenizer(
                core.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
            return made
        except Exception as error:
            what = f"the tokenizer is of no kind that grammars know ({one_line(error, 100)})"
            raise DflashError(what, where="grammar", usage=True) from error


def _check(matcher: LLMatcher, *, usage: bool = False) -> None:
    if matcher.is_error():
        said = one_line(matcher.get_error(), 200)
        raise DflashError(said or "cannot be compiled", where="grammar", usage=usage)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise DflashError(
            "grammars need llguidance, which is not installed",
            where="grammar",
            fix="pip install 'dflash-trt[serve]'",
            usage=True,
        ) from error
    return llguidance


def schema_text(schema: object) -> str:
    """A schema as the text of a Grammar."""
    return json.dumps(schema, separators=(",", ":"))
