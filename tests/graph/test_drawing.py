"""Graphs that draw, run by ONNX Runtime, against the ordinary ones and the runtime's rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto

from dflash_trt.graph.bindings import (
    ACCEPTED,
    CHOICE_IDS,
    LOGITS,
    NEW_START,
    NEW_TOKENS,
    NEXT_BLOCK_IDS,
    SAMPLING,
    GraphName,
)
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.graph.row_sample import row_sample_function
from dflash_trt.sampling.acceptance import accept_block
from dflash_trt.sampling.choice import choose_tokens
from dflash_trt.sampling.params import SamplingParams, pack_sampling
from tests.graph.functions import open_function, run_session
from tests.graph.runner import Arrays, build, open_model
from tests.pairs import PairFactory, TinyPair
from tests.reference.compare import assert_bitwise_equal

M = 128
SETTLED = {ACCEPTED, NEW_TOKENS, NEW_START, NEXT_BLOCK_IDS}
MIXED = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=2**64 - 1),
    SamplingParams(temperature=0.7, seed=11, top_k=5),
    SamplingParams(),
    SamplingParams(temperature=1.5, seed=2**63, top_p=0.9),
    SamplingParams(temperature=1.0, seed=4, top_k=40, top_p=0.6),
)
STARTS = np.array([0, 3, 17, 90, 41, 60])


class Graph:
    """A graph of `built` in a form, over caches that hold random rows."""

    def __init__(self, built: TinyPair, name: GraphName, form: GraphForm) -> None:
        self._session = open_model(built, build(built, name, form))
        self._type = np.float16 if form.precision is Precision.FLOAT16 else np.float32

    def run(
        self, feeds: Arrays, damage: Callable[[str, npt.NDArray[Any]], object] | None = None
    ) -> Arrays:
        batch = len(feeds["cache_start"])
        generator = np.random.default_rng(1)
        own = {}
        for value in self._session.get_inputs():
            if value.name in feeds:
                own[value.name] = feeds[value.name]
            else:
                shape = (batch, value.shape[1], M, value.shape[3])
                own[value.name] = generator.standard_normal(shape).astype(self._type)
                if damage is not None:
                    damage(value.name, own[value.name])
        return run_session(self._session, own)


@pytest.fixture(scope="module")
def built(make_pair: PairFactory) -> TinyPair:
    return make_pair(target={"vocab": 200}, copy_weights=True)


def draw(logits: npt.NDArray[Any], feeds: Arrays, params: Sequence[SamplingParams]) -> Any:
    """The runtime's token for each logit row."""
    positions = feeds["cache_start"][:, None] + feeds["logit_rows"] + 1
    return np.array([choose_tokens(logits[b], positions[b], one) for b, one in enumerate(params)])


def settle(outputs: Arrays, feeds: Arrays, mask: int) -> Arrays:
    """What the runtime's rule makes of each sequence's picked rows."""
    picked = np.take_along_axis(feeds["token_ids"], feeds["logit_rows"], axis=1)
    choices = outputs[CHOICE_IDS]
    rows = choices.shape[1]
    settled = [
        accept_block(row[1:].tolist(), own.tolist().__getitem__)
        for row, own in zip(picked, choices, strict=True)
    ]
    counts = np.array([len(tokens) for tokens in settled])
    return {
        ACCEPTED: (counts - 1).astype(np.int32),
        NEW_TOKENS: np.array([tokens + [-1] * (rows - len(tokens)) for tokens in settled]),
        NEW_START: feeds["cache_start"] + feeds["logit_rows"][:, 0] + counts,
        NEXT_BLOCK_IDS: np.array([[tokens[-1]] + [mask] * (rows - 1) for tokens in settled]),
    }


def roll_out(plain: Graph, feeds: Arrays, params: Sequence[SamplingParams]) -> Arrays:
    """`feeds` with the drafts that the target itself would draw after the anchors."""
    ids = feeds["token_ids"].copy()
    feeds = feeds | {"token_ids": ids}
    for row in range(ids.shape[1] - 1):
        ids[:, row + 1] = draw(plain.run(feeds)[LOGITS], feeds, params)[:, row]
    return feeds


def make_feeds(rows: int, logit_rows: npt.NDArray[np.int64], batch: int, seed: int = 0) -> Arrays:
    ids = np.random.default_rng(seed).integers(0, 200, (batch, rows))
    return {
        "token_ids": ids,
        "cache_start": STARTS[:batch],
        "logit_rows": np.broadcast_to(logit_rows, (batch, len(logit_rows))).copy(),
        SAMPLING: pack_sampling(MIXED[:batch]),
    }


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_step_settles_what_the_runtime_would(built: TinyPair, rows: int) -> None:
    """Greedy and sampled sequences in one batch, whose drafts are right up to another row each."""
    plain = Graph(built, "target", GraphForm())
    drawing = Graph(built, "target", GraphForm(draws=True))
    feeds = roll_out(plain, make_feeds(rows, np.arange(rows), len(MIXED)), MIXED)
    ids = feeds["token_ids"]
    for sequence in range(min(rows - 1, len(MIXED) - 1)):  # the last ones' are all right
        ids[sequence, sequence + 1] = (ids[sequence, sequence + 1] + 1) % 200
    want, got = plain.run(feeds), drawing.run(feeds)
    for name, array in want.items():
        if name != CHOICE_IDS:
            assert_bitwise_equal(got[name], array, name)
    assert got.keys() - want.keys() == SETTLED
    assert np.array_equal(got[CHOICE_IDS], draw(want[LOGITS], feeds, MIXED))
    for name, expected in settle(got, feeds, built.pair.draft.mask_token_id).items():
        assert got[name].dtype == expected.dtype
        assert np.array_equal(got[name], expected), name
    accepted = set(got[ACCEPTED].tolist())
    assert accepted == ({*range(min(rows - 1, len(MIXED) - 1)), rows - 1})


def test_a_row_that_is_not_finite_ends_the_accepted_prefix(built: TinyPair) -> None:
    """A damaged sequence has no token; its neighbour is settled as ever."""
    drawing = Graph(built, "target", GraphForm(draws=True))
    feeds = make_feeds(4, np.arange(4), 2)
    sound = drawing.run(feeds)
    damaged = drawing.run(feeds, lambda name, rows: name == "target_v_0" and rows[1].fill(np.nan))
    assert damaged[CHOICE_IDS][1].tolist() == [-1] * 4
    assert damaged[NEW_TOKENS][1].tolist() == [-1] * 4
    assert damaged[ACCEPTED][1] == 0
    assert damaged[NEXT_BLOCK_IDS][1, 0] == 0, "a token that an embedding has"
    for name in (CHOICE_IDS, *SETTLED):
        assert np.array_equal(damaged[name][0], sound[name][0]), name


SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def random_params(generator: np.random.Generator, vocabulary: int) -> SamplingParams:
    """Any parameters, the ends of their ranges among them."""
    top_k = generator.choice([0, 1, 2, 17, vocabulary - 1, vocabulary, vocabulary + 1, 10**12])
    return SamplingParams(
        temperature=float(generator.choice([0, 5e-324, 1e-30, 0.3, 0.7, 1, 2.5, 1e30, 1e308])),
        top_k=int(top_k) or None,
        top_p=float(generator.choice([1, 1, 5e-324, 1e-9, 0.3, 0.9, 0.999, 1 - 2**-53])),
        seed=SEEDS[generator.integers(len(SEEDS))] ^ int(generator.integers(4)),
    )


@pytest.mark.parametrize("vocabulary", [2, 3, 64, 513])
def test_the_bodys_tokens_are_numpys(vocabulary: int) -> None:
    """8,000 rows in all: smooth ones, and such of few values with ties, both zeros and -inf."""
    types = {
        "logits": (TensorProto.FLOAT, ["B", "R", vocabulary]),
        "positions": (TensorProto.INT64, ["B", "R"]),
        "sampling": (TensorProto.INT64, ["B", 4]),
    }
    session = open_function(row_sample_function(), types)
    generator = np.random.default_rng(vocabulary)
    few = np.array([-np.inf, -7.5, -0.0, 0.0, 0.25, 3], np.float32)
    for trial in range(10):
        params = [random_params(generator, vocabulary) for _ in range(25)]
        logits = 4 * generator.standard_normal((25, 8, vocabulary)).astype(np.float32)
        if trial % 2:
            logits = few[generator.integers(0, len(few), logits.shape)]
            logits[..., -1] = -1.0  # no row is all -inf
        positions = generator.integers(0, 2**40, logits.shape[:2])
        feeds = {"logits": logits, "positions": positions, "sampling": pack_sampling(params)}
        (drawn,) = session.run(None, feeds)
        rows = zip(logits, positions, params, strict=True)
        wrong = np.argwhere(drawn != np.array([choose_tokens(*row) for row in rows]))
        assert not len(wrong), f"row {wrong[0].tolist()} of {params[wrong[0, 0]]}"
