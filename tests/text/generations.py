"""Draws outputs of schemas, a random token each time.

No model is needed: whatever one may say, the grammar decides what it can.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

import jsonschema
import numpy as np
from tokenizers import Tokenizer

from dflash_trt.errors import DflashError
from dflash_trt.models.build_config import data_folder
from dflash_trt.sampling.choice import choose_tokens
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.text.grammar import Follower, Grammar, GrammarCompiler, schema_text
from tests.text.schemas import OPEN, Schema, all_schemas

MOST_OPEN, MOST_BOUNDED = 400, 10_000
"""Tokens that are drawn of an output whose schema has no bound, and of any other."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What became of one schema: `tokens` of an output, `text` where it was whole."""

    tokens: int
    text: str | None
    refused: str = ""


class Drawer:
    """Draws outputs with the demo pair's tokenizer."""

    def __init__(self) -> None:
        path = data_folder("demo_pair") / "target" / "tokenizer.json"
        self.core = Tokenizer.from_file(str(path))
        self.end = 0  # as its config.json says
        self.size = self.core.get_vocab_size()
        self.compiler = GrammarCompiler(self.core, self.size, [self.end])

    def draw(self, schema: Schema, seed: int) -> Drawn:
        """An output of random tokens; what a revised draft holds is looked at on the way."""
        most = MOST_OPEN if schema in OPEN.values() else MOST_BOUNDED
        sampling = SamplingParams(temperature=1.0, seed=seed)
        random = np.random.default_rng(seed)
        try:
            follower = self.compiler.compile(Grammar("json_schema", schema_text(schema)))
        except DflashError as error:
            return Drawn(0, None, error.what)
        ids: list[int] = []
        while len(ids) < most:
            if random.random() < 0.1:
                self._check_revised(follower, random)
            row = follower.mask(random.normal(0, 3, self.size).astype(np.float32))
            at = np.array([len(ids)], dtype=np.int64)
            token = int(choose_tokens(row[None], at, sampling)[0])
            ids.append(token)
            if token == self.end:
                return Drawn(len(ids), self.core.decode(ids[:-1]))
            follower.take(token)
        return Drawn(len(ids), None)

    def _check_revised(self, follower: Follower, random: np.random.Generator) -> None:
        """All of it may come next, token by token."""
        draft = random.integers(0, self.size, 7).tolist()
        scout = follower.fork()
        for token in follower.revise(draft, 7):
            assert np.isfinite(scout.mask(np.zeros(self.size, np.float32))[token])
            if token != self.end:
                scout.take(token)


def count_endings(count: int, seed: int = 0) -> Counter[str]:
    """How many of `count` outputs were refused, whole, cut with and without a bound.

    Raises:
        AssertionError: one that is whole does not validate.
    """
    drawer, schemas = Drawer(), all_schemas()
    ends: Counter[str] = Counter()
    for number in range(count):
        name, schema = list(schemas.items())[number % len(schemas)]
        drawn = drawer.draw(schema, seed + number)
        bound = "open" if name in OPEN else "bounded"
        ends[bound] += 1
        if drawn.refused:
            ends[f"{bound}, refused"] += 1
        elif drawn.text is None:
            ends[f"{bound}, cut"] += 1
        else:
            ends[f"{bound}, whole"] += 1
            ends["tokens"] += drawn.tokens
            assert is_valid(drawn.text, schema), (name, drawn.text)
    return ends


def is_valid(text: str, schema: Schema) -> bool:
    """Whether it is JSON, and what the schema says, formats included."""
    validator = jsonschema.Draft202012Validator
    return validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(json.loads(text))
