"""Few shapes: idle sequences and rows that no sequence ever sees, over stand-ins that compute."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import Scores, StepCall
from dflash_trt.decoding import Generator, GeneratorOptions, Request, SamplingParams
from dflash_trt.decoding.jobs import JobRunner
from dflash_trt.decoding.scores import sampling_input
from dflash_trt.graph.form import GraphForm
from tests.backends.steps import one_chunk, random_ids, run_chunks
from tests.backends.tensorrt.drawing import GREEDY, PROMPTS, Decoding, write_graphs
from tests.backends.tensorrt.machine import Machine, make_machine, run_alone
from tests.backends.tensorrt.overflowing import Overflowing
from tests.covering import exhaustive
from tests.pairs import PairFactory, TinyPair

SLOTS, LENGTH, CHUNK, ROWS, VOCAB, SIZE = 6, 150, 48, 5, 64, 8
PAIR: dict[str, Any] = {
    "target": {"vocab": VOCAB, "num_layers": 2},
    "draft": {"num_layers": 1, "block_size": ROWS, "target_layer_ids": [0, 1]},
    "max_batch": SLOTS,
    "max_seq_len": LENGTH,
}
BATCHES, CHUNKS = (1, 2, 4, 6), (16, 32, 48)


@pytest.fixture(scope="module")
def linear(make_pair: PairFactory) -> TinyPair:
    return make_pair(**PAIR)


@pytest.fixture(params=["linear", "paged", "drawing"])
def machine(
    request: pytest.FixtureRequest, make_pair: PairFactory, linear: TinyPair, tmp_path: Path
) -> Machine:
    """Engines over linear caches, over pages, and those that draw tokens over linear caches."""
    built, draws = linear, request.param == "drawing"
    if request.param == "paged":
        built = make_pair(**PAIR, paging={"page_size": SIZE, "pages": SLOTS * -(-LENGTH // SIZE)})
    graphs = built.bundle.folder
    if draws:
        graphs = write_graphs(built, tmp_path / "drawing", GraphForm(draws=True))
    return make_machine(built, tmp_path, "tensorrt", graphs, draws=draws, prefill_chunk=CHUNK)


def make_requests(count: int, seed: int, longest: int = 2 * CHUNK) -> list[Request]:
    """Prompts of every kind of remainder, outputs that end one by one."""
    rng = random.Random(seed)
    return [
        Request(
            prompt_ids=tuple(rng.choices(range(VOCAB - 1), k=rng.randint(1, longest))),
            max_tokens=rng.randint(4, 20),
            sampling=SamplingParams(temperature=rng.choice([0.0, 0.9]), top_k=20, seed=number),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "blocks", [exhaustive((None,)), (3, 3, 3, *[None] * 3)], ids=["equal", "ragged"]
)
def test_no_sequence_ever_sees_an_idle_row(
    machine: Machine, linear: TinyPair, blocks: tuple[int | None, ...]
) -> None:
    """Batches of any size, beside prompts and other sequences, though idle rows overflow.

    Where blocks differ, ranges of slots begin anywhere.
    """
    requests = [
        replace(one, block_size=blocks[number % len(blocks)])
        for number, one in enumerate(make_requests(14, seed=len(blocks)))
    ]
    # Its last chunk has no room for idle rows, and nor has a neighbour's step behind it.
    requests[3] = replace(requests[3], prompt_ids=(7,) * (LENGTH - 4), max_tokens=None)
    executor = Overflowing(machine, machine.open())
    results = Generator(executor).generate(requests)
    expected = run_alone(linear, requests)
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]
    assert bool(executor.overflown) == (machine.bundle.limits.page_pool is None)
    assert machine.trt.shape_changes == 0
    executor.close()
    assert machine.cuda.is_clean


def test_rows_that_are_run_again_keep_what_lies_behind_them(machine: Machine) -> None:
    """A chunk is padded behind all that its slot holds, and nowhere else."""
    executor = Overflowing(machine, machine.open())
    if executor.limits.page_pool is not None:
        executor.bind_pages(2, range(3, 3 + LENGTH // SIZE))
    ids = random_ids(VOCAB, 1, 60)
    whole = run_chunks(executor, ids[0].tolist(), (ROWS,), slot=2)
    greedy = sampling_input(executor.limits, [SamplingParams()])
    again = executor.forward(one_chunk(ids[:, :18], 17, slot=2, sampling=greedy))
    assert again.choice_ids == whole[17].argmax()
    np.testing.assert_array_equal(
        run_chunks(executor, ids[0, -2:].tolist(), (2,), slot=2, start=58), whole[-2:]
    )


@pytest.mark.parametrize("machine", ["linear", "drawing"], indirect=True)
def test_results_are_the_calls_own_where_idle_sequences_come_first(
    machine: Machine, linear: TinyPair
) -> None:
    """Three sequences in the last slots are those from the second on of four."""
    first, executor = SLOTS - 3, machine.open()
    if machine.bundle.limits.draws:
        chains = [
            Decoding.begin(one, *[GREEDY] * 3, prompts=[*PROMPTS, [4]], first_slot=first)
            for one in (executor, machine.open())
        ]
        for _ in range(8):
            assert chains[0].step(ahead=True) == chains[1].step(ahead=False)
        assert executor.lookahead.started > 4 and executor.lookahead.dropped == 0
        return
    starts = np.zeros(3, np.int64)
    step = StepCall(first, np.array([5, 6, 7]), starts, ROWS, Scores.LOGITS)
    want = linear.open().speculate(step)
    got = executor.speculate(step)
    assert got.logits is not None and want.logits is not None
    np.testing.assert_array_equal(got.logits, want.logits)
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    some = executor.speculate(replace(step, scores=Scores.CANDIDATES)).candidates
    assert some is not None
    ids, values = some.token_ids, some.logits
    np.testing.assert_array_equal(np.take_along_axis(want.logits, ids, -1), values)
    for place in ((0, 0), (2, ROWS - 1)):
        np.testing.assert_array_equal(some.read_row(*place), want.logits[place])


@pytest.mark.parametrize("machine", ["drawing"], indirect=True)
def test_steps_ahead_leave_idle_rows_where_they_are(machine: Machine) -> None:
    """Or a chain of them would come to the neighbour's slot."""
    executor = machine.open()
    chain = Decoding.begin(executor, *[GREEDY] * 3, prompts=[*PROMPTS, PROMPTS[0]])
    for _ in range(9):
        chain.step(ahead=True)
    assert executor.lookahead.started > 5
    machine.cuda.run()
    for name, held in machine.caches(executor).items():
        assert held[3, :, :ROWS].any() and not held[3, :, ROWS:].any(), name


@pytest.mark.parametrize("machine", ["paged"], indirect=True)
def test_a_slot_without_pages_holds_nothing_of_its_last_sequence(machine: Machine) -> None:
    """So the next one's chunks are padded, though nobody released the slot meanwhile."""
    executor = machine.open()
    for pages, length in ((range(5), 40), ((), 0), (range(2), 10)):
        executor.bind_pages(0, pages)
        if length:
            executor.forward(one_chunk(random_ids(VOCAB, 1, length), length - 1))
    assert machine.trt.shapes == {("target", (1, 48, 1)), ("target", (1, 16, 1))}


def usual_shapes() -> set[tuple[str, tuple[int, ...]]]:
    """B, S and R of every call of requests that leave room behind them and have one block size."""
    chunks = {("target", (1, rows, 1)) for rows in (1, *CHUNKS)}
    steps = {("target", (batch, ROWS, ROWS)) for batch in BATCHES}
    return chunks | steps | {("draft", (batch, ROWS)) for batch in BATCHES}


@pytest.mark.parametrize("machine", ["linear"], indirect=True)
def test_shapes_are_few_and_no_context_changes_its_own(machine: Machine) -> None:
    """Prompts of every length, chunks of every remainder, any number of sequences."""
    requests = [
        Request(prompt_ids=(length % VOCAB,) * length, max_tokens=3 + length % 9)
        for length in random.Random(1).sample(range(1, 2 * CHUNK + 9), 60)
    ]
    Generator(machine.open()).generate(requests)
    assert machine.trt.shapes == usual_shapes() and machine.trt.shape_changes == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("speculation", [True, False])
def test_no_request_makes_a_shape_or_a_graph_after_the_warm_up(
    machine: Machine, speculation: bool
) -> None:
    """Nor a context, which loads the kernels of its plugins anew."""
    executor = machine.open()
    generator = Generator(executor, options=GeneratorOptions(speculation=speculation))
    JobRunner(generator, executor).warm_up()
    shapes, captured = set(machine.trt.shapes), executor.runner.captured
    if speculation:
        assert shapes == usual_shapes()
    else:
        plain = [*((batch, 1, 1) for batch in BATCHES), *((1, rows, 1) for rows in CHUNKS)]
        assert shapes == {("target_only", shape) for shape in plain}
    assert captured == len(BATCHES), "steps of each batch, and no chunk of a prompt"
    executions, contexts = machine.trt.executions, set(machine.trt.contexts)
    short = [
        Request(prompt_ids=(7,) * rows, max_tokens=9) for rows in (1, CHUNK + 1) for _ in "abc"
    ]
    generator.generate([*short, *make_requests(16, 3)])
    assert machine.trt.executions > executions + 50
    assert machine.trt.shapes == shapes and machine.trt.shape_changes == 0
    assert executor.runner.captured == captured == len(machine.cuda.executables)
    assert contexts == set(machine.trt.contexts)


def test_a_warm_up_leaves_what_slots_hold(machine: Machine, linear: TinyPair) -> None:
    """Even in the middle of sequences and prompts."""
    requests = make_requests(9, 5)
    generator, results, turns = Generator(Overflowing(machine, machine.open())), {}, 0
    numbers = [generator.submit(one) for one in requests]
    while generator.has_work:
        turns += 1
        if turns % 8 == 0:
            generator.warm_up()
        for event in generator.step():
            if event.result is not None:
                results[event.request_id] = event.result.token_ids
    assert [results[number] for number in numbers] == [
        one.token_ids for one in run_alone(linear, requests)
    ]
