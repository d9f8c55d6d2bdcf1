"""Grammars: which tokens may come next, and what is no grammar."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from dflash_trt.errors import DflashError
from dflash_trt.text.grammar import Follower, Grammar, GrammarCompiler
from tests.text.tokenizers import make_plain

CORE = make_plain("<end>")
END, SIZE = CORE.token_to_id("<end>"), CORE.get_vocab_size() + 3


def compiler(*ends: int) -> GrammarCompiler:
    return GrammarCompiler(CORE, SIZE, ends or (END,))


def allowed(follower: Follower) -> set[str]:
    """The characters that may come next, and "" for the end."""
    row = follower.mask(np.zeros(SIZE, np.float32))
    ids = np.flatnonzero(np.isfinite(row)).tolist()
    return {"" if one == END else CORE.decode([one]) for one in ids}


def follow(follower: Follower, text: str) -> Follower:
    for token_id in CORE.encode(text).ids:
        follower.take(token_id)
    return follower


def test_what_may_come_next() -> None:
    start = compiler().compile(Grammar("regex", "ab?(12|19)"))
    assert allowed(start) == {"a"} == allowed(start), "looking changes nothing"
    assert allowed(follow(start.fork(), "a")) == {"b", "1"}
    assert allowed(follow(start.fork(), "ab1")) == {"2", "9"}
    assert allowed(follow(start.fork(), "a19")) == {""}
    assert allowed(start) == {"a"}, "each output has one of its own"


def test_one_token_is_told_as_all_are() -> None:
    """At every place of an output, its end too, and where the model has more tokens."""
    ends = (END, CORE.encode("z").ids[0])
    texts = {"ab?(12|19)": "ab19", '"[a-z]*"': '"fox"'}
    for pattern, text in texts.items():
        follower = compiler(*ends).compile(Grammar("regex", pattern))
        for token_id in [*CORE.encode(text).ids, None]:
            alone = [one for one in range(SIZE) if follower.fork().allows(one)]
            mask = follower.tokens()
            few = mask.few()
            assert few is not None
            assert alone == few.tolist() == [one for one in range(SIZE) if mask.has(one)]
            assert np.flatnonzero(np.isfinite(follower.mask(np.zeros(SIZE)))).tolist() == alone
            if token_id is not None:
                follower.take(token_id)


def test_schemas() -> None:
    schema = {
        "type": "object",
        "properties": {"state": {"enum": ["ok", "lost"]}},
        "required": ["state"],
        "additionalProperties": False,
    }
    start = compiler().compile(Grammar("json_schema", json.dumps(schema)))
    assert allowed(follow(start.fork(), '{"state":"')) == {"o", "l"}
    assert allowed(follow(start.fork(), '{"state":"ok"}')) == {""}
    anything = compiler().compile(Grammar("json_object"))
    assert allowed(follow(anything.fork(), '{"a": [1, {"b": null}]}')) == {""}
    blanks = follow(start.fork(), "{" + " " * 20)
    assert allowed(blanks) == {'"'}, "blanks have an end"


@pytest.mark.parametrize(
    ("kind", "text", "piece"),
    [
        ("json_schema", "{", "grammar: "),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", '{"$ref": "http://localhost/x"}', "grammar: "),
        ("json_schema", "[" * 5000, "grammar: "),
        ("regex", "(", "grammar: "),
        ("regex", "x" * 65537, "65,537 characters are more than 65,536"),
        ("xml", "", "'xml' is none of json_object, json_schema, regex"),
    ],
)
def test_what_is_no_grammar(kind: str, text: str, piece: str) -> None:
    with pytest.raises(DflashError, match=piece) as caught:
        compiler().compile(Grammar(kind, text))  # type: ignore[arg-type]
    assert caught.value.usage and caught.value.message.isprintable()


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(DflashError, match="no end-of-sequence token"):
        GrammarCompiler(CORE, SIZE, ()).compile(Grammar("json_object"))


def test_hostile_grammars_end_soon() -> None:
    """Whatever they are, an error or a grammar."""
    started = time.monotonic()
    for text in ("(a{1000}){1000}", "(x+x+)+y", "(a|b|ab)*c{999}", "." * 30000, "(?i)(k|s){5000}"):
        try:
            follower = compiler().compile(Grammar("regex", text))
            for _ in range(5):
                allowed(follower)
                follower.take(CORE.encode("a").ids[0])
        except DflashError:
            continue
    assert time.monotonic() - started < 20
