"""Grammars that an output must follow: JSON, a schema, an expression, a choice, or rules.

llguidance compiles them and says which tokens may come next. Its own limits bound a step, but not
compiling: each grammar is tried in a sandbox first (`sandbox_grammar.py`).
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.core.masks import TokenMask
from dflash_trt.core.strict_json import parse_given
from dflash_trt.errors import DflashError, install_extra, one_line
from dflash_trt.text.json_schema import enforce_schema
from dflash_trt.text.sandbox import Held, Sandbox, SandboxLimits, SandboxLostError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
MOST_CHARACTERS = 64 << 10
_MOST_GBNF = 16 << 10
"""Characters of rules that have to be converted, which takes time with their square."""
# A model that is not sure writes blanks for as long as a grammar allows them. What oneOf loses is
# told by what reads schemas.
_ANY_OBJECT = '{"type":"object"}'
_OPTIONS = {"whitespace_pattern": r"\x20", "coerce_one_of": True}
# States of a lexer take one to two kilobytes each; fuel is a step's work, about a microsecond each.
# llguidance's own limits are 25, 10 and 10 times as high.
_LIMITS = {"max_lexer_states": 10_000, "initial_lexer_fuel": 100_000, "step_lexer_fuel": 20_000}
_MOST_KEPT, _MOST_KEPT_BYTES = 64, 256 << 20

MAX_SECONDS, MAX_BYTES = 2, 128 << 20
"""For compiling and going some way, in processor time; a schema in use takes hundredths."""
MAX_MASK_SECONDS, MEAN_MASK_SECONDS = 0.5, 0.02
"""Of processor time, for saying once what may come next; usual are fractions of a millisecond."""
# The process also holds the tokenizer, and the largest take seconds to load.
_LOADING = SandboxLimits(max_seconds=30, max_bytes=3 << 30, max_answer_bytes=1 << 16)
_TRYING = SandboxLimits(MAX_SECONDS + 1, _LOADING.max_bytes, _LOADING.max_answer_bytes)
_TRIAL = {"trial_seconds": MAX_SECONDS, "trial_bytes": MAX_BYTES, "limits": _LIMITS}
_TRIAL |= {"mask_seconds": MAX_MASK_SECONDS, "mean_seconds": MEAN_MASK_SECONDS}
_UNSUPPORTED = "llguidance does not support this tokenizer ({})"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must be.

    Args:
        text: the schema; the expression; of a choice a JSON list of texts; of a grammar its rules,
            llguidance's Lark or GBNF (`root ::= …`). Empty for any JSON object.

    Raises:
        DflashError: too long (usage).
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            kind = one_line(repr(self.kind), 40)
            raise _refusal(f"{kind} is none of {', '.join(GRAMMAR_KINDS)}")
        if len(self.text) > MOST_CHARACTERS:
            raise _refusal(f"{len(self.text):,} characters are more than {MOST_CHARACTERS:,}")


class CompiledGrammar:
    """Where outputs begin that follow one grammar; any thread may use it.

    All of them share one lexer, whose states are added as they are met, and limited. Once they are
    used up it is compiled again, with none. `end_id` is a token that ends what is whole.
    """

    def __init__(self, make: Callable[[], LLMatcher], vocab_size: int, end_id: int) -> None:
        self.vocab_size, self.end_id = vocab_size, end_id
        self._make = make
        self._lock = threading.Lock()
        self._start = make()

    @property
    def start(self) -> LLMatcher:
        """To be copied, and never changed."""
        return self._start

    def renew(self, used_up: LLMatcher) -> LLMatcher:
        """Another start than `used_up`."""
        with self._lock:
            if self._start is used_up:
                self._start = self._make()
            return self._start


class Follower:
    """Follows one output token by token.

    `compiled` is where it begins, `seconds` the processor time that following has taken.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self._start = compiled.start
        self._matcher = self._start.deep_copy()
        self._taken: list[int] = []
        self.seconds = self._revising = 0.0
        self._known: TokenMask | None = None  # of what comes next

    def fork(self) -> Follower:
        """One of its own for an output that goes on from here."""
        other = type(self)(self.compiled)
        other._start, other._matcher = self._start, self._matcher.deep_copy()
        other._taken = self._taken.copy()
        return other

    def allows(self, token_id: int) -> bool:
        """Whether `token_id` may come next.

        Raises:
            DflashError: llguidance reached a limit.
        """
        # Of an end of sequence, which may come, that says no.
        if self._known is None and self._do(lambda matcher: matcher.validate_tokens([token_id])):
            return True
        return self.tokens().has(token_id)

    def tokens(self) -> TokenMask:
        """All tokens that may come next.

        Raises:
            DflashError: llguidance reached a limit.
        """
        if self._known is None:
            bits = np.frombuffer(self._do(lambda matcher: matcher.compute_bitmask()), np.uint8)
            self._known = TokenMask(bits, self.compiled.vocab_size, "grammar")
        return self._known

    def take(self, token_id: int) -> None:
        """The output goes on with `token_id`.

        Raises:
            DflashError: llguidance reached a limit.
        """
        self._known = None
        self._do(lambda matcher: matcher.consume_token(token_id))
        self._taken.append(token_id)

    def revise(self, draft: Sequence[int], most: int) -> list[int]:
        """What of a draft may come next, up to what may not, with what must; `most` tokens at most.

        What must come takes the draft's place, and goes on where it ends. The follower stays where
        it is; a limit that llguidance reaches on the way ends the draft there.
        """
        scout, revised = self._matcher.deep_copy(), list[int]()
        started = time.thread_time()
        while len(revised) < most:
            if scout.is_stopped():
                if not scout.is_error() and revised[-1:] != [self.compiled.end_id]:
                    revised.append(self.compiled.end_id)
                break
            tokens = scout.compute_ff_tokens()[: most - len(revised)]
            tokens = tokens or list(draft[len(revised) : len(revised) + 1])
            taken = scout.try_consume_tokens(tokens) if tokens else 0
            revised += tokens[:taken]
            if taken < len(tokens) or not tokens:
                break
        seconds = time.thread_time() - started
        self.seconds += seconds
        self._revising += seconds
        return revised

    def _do(self, work: Callable[[LLMatcher], T]) -> T:
        """What `work` says; a second time, with a new lexer, where it fails.

        What it takes is the request's own doing: the first time that it is too much is the last.
        """
        started = time.thread_time()
        found = work(self._matcher)
        seconds = time.thread_time() - started
        self.seconds += seconds
        allowed = MAX_MASK_SECONDS + MEAN_MASK_SECONDS * len(self._taken)
        # What drafts cost beside that ends no request.
        if seconds > MAX_MASK_SECONDS or self.seconds - self._revising > allowed:
            raise DflashError("takes too long to say what may come next", where="grammar")
        if self._matcher.is_error():
            self._start = self.compiled.renew(self._start)
            self._matcher = self._start.deep_copy()
            self._matcher.consume_tokens(self._taken)
            found = work(self._matcher)
            _check(self._matcher)
        return found


class GrammarCompiler:
    """Compiles grammars for a tokenizer, and keeps those of late; any thread may use it.

    Args:
        vocab_size: of the model, which may have more than the tokenizer.
        eos_token_ids: what may come where an output is whole.
    """

    def __init__(self, core: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._core, self._vocab_size = core, vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiling, self._looking = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[Grammar, tuple[CompiledGrammar | DflashError, int]] = OrderedDict()

    def find(self, grammar: Grammar) -> Follower | None:
        """What `compile` gives, where it is known already.

        Raises:
            DflashError: it is known not to compile (usage).
        """
        with self._looking:
            if grammar not in self._kept:
                return None
            self._kept.move_to_end(grammar)
            found, _ = self._kept[grammar]
        if isinstance(found, DflashError):
            raise DflashError(found.what, where=found.where, usage=True)
        return Follower(found)

    def compile(self, grammar: Grammar) -> Follower:
        """Where an output begins that follows `grammar`; takes seconds where it is a hostile one.

        Raises:
            DflashError: a grammar that is none, or takes too much; no llguidance here (usage).
            SandboxLostError: the process that tries it was killed, twice.
        """
        with self._compiling:
            follower = self.find(grammar)
            if follower is None:
                follower = self._add(grammar)
        return follower

    def _add(self, grammar: Grammar) -> Follower:
        library = _library()
        matcher_type = library.LLMatcher
        if not self._eos_token_ids:
            raise _refusal("the model names no end-of-sequence token, which ends what is whole")
        try:
            text = _to_llguidance(grammar, matcher_type)
        except ValueError as error:
            raise _refusal(one_line(error, 200)) from error

        def make() -> LLMatcher:
            limits = library.LLParserLimits(**_LIMITS)
            matcher: LLMatcher = matcher_type(self._tokenizer, text, log_level=0, limits=limits)
            _check(matcher, usage=True)
            matcher.compute_bitmask()  # what comes first takes longest, and no request waits here
            _check(matcher, usage=True)
            return matcher

        try:
            # What passes compiles within these limits, and so does going some way through it; some
            # other way may still lead to a limit, which ends a request.
            answer = self._sandbox.ask(_TRIAL, _TRYING, text.encode())
            if "bytes" not in answer:
                raise _refusal(one_line(answer.get("error"), 200))
            compiled = CompiledGrammar(make, self._vocab_size, self._eos_token_ids[0])
        except SandboxLostError:
            raise
        except DflashError as error:
            self._keep(grammar, error, 0)
            raise
        self._keep(grammar, compiled, answer["bytes"])
        return Follower(compiled)

    def _keep(self, grammar: Grammar, found: CompiledGrammar | DflashError, taken: int) -> None:
        with self._looking:
            self._kept[grammar] = found, taken
            while len(self._kept) > _MOST_KEPT or (
                sum(size for _, size in self._kept.values()) > _MOST_KEPT_BYTES
            ):
                self._kept.popitem(last=False)

    @cached_property
    def _sandbox(self) -> Sandbox:
        job = {"vocab_size": self._vocab_size, "eos_token_ids": self._eos_token_ids}
        return Sandbox("grammar", Held(self._text.encode(), _LOADING, job, _UNSUPPORTED))

    @cached_property
    def _text(self) -> str:
        """The tokenizer's own, one that neither pads nor cuts."""
        copy = Tokenizer.from_str(self._core.to_str())
        copy.no_padding()
        copy.no_truncation()
        return copy.to_str()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            made: LLTokenizer = _library().LLTokenizer(
                self._text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
            return made
        except Exception as error:
            raise _refusal(_UNSUPPORTED.format(one_line(error, 100))) from error


def _refusal(what: str) -> DflashError:
    return DflashError(what, where="grammar", usage=True)


def _check(matcher: LLMatcher, *, usage: bool = False) -> None:
    if matcher.is_error():
        # Behind its words the library tells its own state.
        said = one_line(matcher.get_error().split("\n<state>")[0], 200)
        raise DflashError(said or "cannot be compiled", where="grammar", usage=usage)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        what = "grammars need llguidance, which is not installed"
        fix = install_extra("serve")
        raise DflashError(what, where="grammar", fix=fix, usage=True) from error
    return llguidance


def _to_llguidance(grammar: Grammar, matcher_type: Any) -> str:
    text: str
    if grammar.kind == "regex":
        text = matcher_type.grammar_from_regex(grammar.text)
    elif grammar.kind == "choice":
        text = matcher_type.grammar_from_lark(f"start: {lark_choice(grammar.text)}")
    elif grammar.kind == "grammar":
        text = matcher_type.grammar_from_lark(_to_lark(grammar.text))
    else:
        schema = grammar.text if grammar.kind == "json_schema" else _ANY_OBJECT
        text = matcher_type.grammar_from_json_schema(enforce_schema(schema)[0], overrides=_OPTIONS)
    return text


def lark_json(schema: str) -> str:
    """A schema's text as what stands to the right of a Lark rule, as it can be enforced.

    Raises:
        DflashError: it is too long, or no object (usage).
    """
    text, _ = enforce_schema(Grammar("json_schema", schema or _ANY_OBJECT).text)
    return f"%json {schema_text({**json.loads(text), 'x-guidance': _OPTIONS})}"


def lark_choice(text: str) -> str:
    """A choice's JSON list of texts as what stands to the right of a Lark rule.

    Raises:
        DflashError: it is no list of texts, at least one, none empty (usage).
    """
    choices = parse_given(text.encode(), "grammar")
    is_list = isinstance(choices, list) and bool(choices)
    if not is_list or not all(isinstance(one, str) and one for one in choices):
        raise _refusal("a choice is a list of texts, at least one, none empty")
    return " | ".join(map(json.dumps, choices))  # Lark's texts are written as JSON's


def _to_lark(rules: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

    if not is_lark_syntax(rules) and len(rules) > _MOST_GBNF:
        what = f"{len(rules):,} characters of GBNF are more than {_MOST_GBNF:,}"
        raise ValueError(f"{what}; llguidance's Lark may have {MOST_CHARACTERS:,}")
    try:
        return any_to_lark(rules)
    except Exception as error:  # it raises Exception itself, and RecursionError
        raise ValueError(f"is neither Lark nor GBNF: {error}") from error


def schema_text(schema: object) -> str:
    """A schema as the text of a Grammar."""
    return json.dumps(schema, separators=(",", ":"))
