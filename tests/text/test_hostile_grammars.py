"""Grammars made to hang or to take memory: an error or a grammar each, soon, and it goes on."""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest

from dflash_trt.errors import DflashError
from dflash_trt.text.grammar import MAX_BYTES, Grammar, GrammarCompiler
from tests.covering import exhaustive
from tests.hostile.grammars import HostileGrammar, hostile_grammars
from tests.text.tokenizers import make_plain

CORE = make_plain("<end>")
SIZE = CORE.get_vocab_size()
EVERY = hostile_grammars()
DAILY = {
    "a product of repeats",
    "a large divisor",
    "references in a ring",
    "arrays in arrays",
}
_STEPS = 30
MOST_SECONDS = 5


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(CORE, SIZE, [CORE.token_to_id("<end>")])


def _meet(compiler: GrammarCompiler, hostile: HostileGrammar) -> bool:
    """Whether it was accepted. One that was is followed for some tokens."""
    _, kind, text = hostile
    random = np.random.default_rng(3)
    try:
        follower = compiler.compile(Grammar(kind, text))  # type: ignore[arg-type]
        for _ in range(_STEPS):
            row = follower.tokens().apply(np.zeros(SIZE, np.float32))
            follower.take(int(random.choice(np.flatnonzero(np.isfinite(row)))))
    except DflashError as error:
        assert error.message.startswith("grammar: "), error.message
        assert "\n" not in error.message and len(error.message) < 300
        assert error.usage, error.message
        return False
    return True


def _check(compiler: GrammarCompiler, chosen: list[HostileGrammar]) -> int:
    accepted = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for hostile in chosen:
        started = time.thread_time()
        accepted += _meet(compiler, hostile)
        assert time.thread_time() - started < MOST_SECONDS, hostile[0]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < 2 * MAX_BYTES
    assert _meet(compiler, ("a good one", "regex", "(ab)*")), "it goes on"
    return accepted


@pytest.mark.parametrize("chosen", [sorted(DAILY), exhaustive([one[0] for one in EVERY])])
def test_hostile_grammars(compiler: GrammarCompiler, chosen: list[str]) -> None:
    accepted = _check(compiler, [one for one in EVERY if one[0] in chosen])
    assert accepted <= (1 if len(chosen) == len(DAILY) else len(EVERY) - 15)
