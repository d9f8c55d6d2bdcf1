"""Engines that draw, and steps begun before they are asked for, over stand-ins that compute.

The stand-in's work runs only up to what is waited for, and a download's destination holds garbage
until then: a step that is read too early, or waited for too late, shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.backends.base import Scores
from dflash_trt.backends.device.executor import DeviceExecutor
from dflash_trt.backends.device.lookahead import Step
from dflash_trt.decoding import Generator, Request
from dflash_trt.graph.form import GraphForm
from dflash_trt.proof.gpu_check.engine_probes import Bench, probe_drawing, probe_unrecorded
from dflash_trt.sampling.params import pack_sampling
from tests.backends.steps import one_chunk, random_ids
from tests.backends.tensorrt.drawing import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    Decoding,
    Patient,
    write_graphs,
)
from tests.backends.tensorrt.machine import REQUESTS, SLIDING, Machine, make_machine, run_alone
from tests.inspection import has_read_scores
from tests.pairs import PairFactory, TinyPair

ROWS, VOCAB, LENGTH = 6, 64, 96


@pytest.fixture(scope="module")
def built(make_pair: PairFactory) -> TinyPair:
    target = {"vocab": VOCAB, "num_layers": 2}
    draft = {"target_layer_ids": [0, 1], "block_size": ROWS, **SLIDING}
    return make_pair("qwen3", target, draft, fit_steps=60, max_seq_len=LENGTH)


@pytest.fixture(scope="module")
def graphs(built: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair's graphs in the form that draws, beside its weights."""
    folder = tmp_path_factory.mktemp("drawing") / "bundle"
    return write_graphs(built, folder, GraphForm(draws=True))


@pytest.fixture
def machine(built: TinyPair, graphs: Path, tmp_path: Path) -> Machine:
    return make_machine(built, tmp_path, "tensorrt", graphs, draws=True)


def test_whole_generations_are_the_cpus(machine: Machine, built: TinyPair) -> None:
    """Greedy and sampled requests side by side, with and without looking ahead."""
    expected = [result.token_ids for result in run_alone(built, REQUESTS)]
    executor = machine.open()
    for one in (Patient(executor), executor):
        assert executor.lookahead.started == 0
        results = Generator(one).generate(REQUESTS)  # type: ignore[arg-type]
        assert [result.token_ids for result in results] == expected
    assert executor.runner.capture_error is None
    assert executor.lookahead.started > 20
    assert executor.lookahead.dropped < executor.lookahead.started / 3
    assert not has_read_scores(executor), "nobody read logits"
    executor.close()
    assert machine.cuda.is_clean


def test_the_next_step_runs_while_the_host_looks_at_this_one(machine: Machine) -> None:
    executor, cuda = machine.open(), machine.cuda
    decoding = Decoding.begin(executor, GREEDY, SAMPLED)
    for _ in range(2):
        decoding.step(ahead=True)
        assert executor.lookahead.started == 0, "the graph is captured first"
    assert not cuda.queue
    first = decoding.call(ahead=True)
    assert executor.lookahead.started == 1 and cuda.queue, "the step begun is not waited for"
    kept = [first.token_ids.copy(), first.choice_ids.copy()]
    cuda.run()
    for array, copy in zip((first.token_ids, first.choice_ids), kept, strict=True):
        np.testing.assert_array_equal(array, copy)
    outputs = []
    for number in range(2, 8):
        copies, launches, executions = cuda.copies, cuda.launches, machine.trt.executions
        if number == 2:
            decoding.step(ahead=True)  # the very call of before: not the one that was begun
            assert (executor.lookahead.started, executor.lookahead.dropped) == (2, 1)
            continue
        outputs.append(decoding.call(ahead=True))
        assert cuda.launches - launches == 1, "a replay, of the step after"
        assert machine.trt.executions - executions == 2
        assert cuda.copies - copies == 3, "ids, starts, the results"
        decoding.settle(outputs[-1])
    places = {output.choice_ids.ctypes.data for output in outputs}
    assert len(places) == 2, "host buffers take turns"
    assert (executor.lookahead.started, executor.lookahead.dropped) == (7, 1)


CHANGES: dict[str, Callable[[Decoding], Decoding]] = {
    "nothing": lambda d: d,
    "anchors": lambda d: replace(d, anchors=(d.anchors + [0, 1]) % VOCAB),
    "starts": lambda d: replace(d, starts=d.starts - [1, 0]),
    "sampling": lambda d: replace(d, sampling=pack_sampling([SAMPLED, GREEDY])),
    "first_slot": lambda d: replace(d, first_slot=1),
    "batch": lambda d: replace(
        d, anchors=d.anchors[:1], starts=d.starts[:1], sampling=d.sampling[:1]
    ),
    "scores": lambda d: d,
    "block_size": lambda d: d,
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_the_step_that_was_begun_is_taken(machine: Machine, change: str) -> None:
    executor, other = machine.open(), machine.open()
    second, prompts = SAMPLED, PROMPTS
    if change == "first_slot":  # two of a kind: what one slot holds, so does the next
        second, prompts = GREEDY, PROMPTS[:1] * 2
    decodings = [Decoding.begin(one, GREEDY, second, prompts=prompts) for one in (executor, other)]
    scores = Scores.LOGITS if change == "scores" else Scores.NONE
    answers = []
    for ahead, decoding in zip((True, False), decodings, strict=True):
        for start in (0, 16):  # so that slot 2 holds as much
            ids, sampling = random_ids(VOCAB, 1, 16), decoding.sampling[:1]
            decoding.executor.forward(one_chunk(ids, slot=2, start=start, sampling=sampling))
        for first_slot in (1, 0):  # both shapes have been captured
            moved = replace(decoding, first_slot=first_slot)
            for _ in range(3):
                moved.call()
        for _ in range(3):
            decoding.step(ahead=ahead)
        rows = 4 if change == "block_size" else ROWS
        output = CHANGES[change](decoding).call(scores=scores, rows=rows)
        assert (output.logits is not None) == (change == "scores")
        answers.append([output.token_ids.copy(), output.choice_ids.copy()])
    assert executor.lookahead.started > 0
    for got, want in zip(*answers, strict=True):
        np.testing.assert_array_equal(got, want)
    assert executor.lookahead.dropped == (change != "nothing")
    # What comes behind is as if nothing had been begun.
    for _ in range(3):
        tokens = [decoding.step(ahead=True) for decoding in decodings]
        assert tokens[0] == tokens[1]


def test_each_range_of_slots_goes_on_beside_the_others(machine: Machine) -> None:
    """Two that look ahead, and one between them whose rows the host reads at every step."""
    answers = []
    for one in (machine.open(), machine.open()):
        ahead = not answers
        prompts = [(3, 1, 4), (2, 7, 1, 8), (9, 9)]
        decodings = [
            Decoding.begin(one, params, prompts=[prompt], first_slot=slot)
            for slot, (params, prompt) in enumerate(
                zip((SAMPLED, GREEDY, SAMPLED), prompts, strict=True)
            )
        ]
        told: list[object] = []
        for _ in range(9):
            for slot, decoding in enumerate(decodings):
                scores = Scores.LOGITS if slot == 1 else Scores.NONE
                output = decoding.call(ahead=ahead and slot != 1, scores=scores)
                if output.logits is not None:
                    told.append(output.logits.copy())
                told.append(decoding.settle(output))
        answers.append(told)
        if ahead:
            assert one.lookahead.started >= 8 and not one.lookahead.dropped
        else:
            assert not one.lookahead.started
    for got, want in zip(*answers, strict=True):
        np.testing.assert_array_equal(got, want)


def begin_ahead(machine: Machine) -> tuple[DeviceExecutor, Decoding]:
    """An executor of which a step is under way that nobody has asked for yet."""
    executor = machine.open()
    decoding = Decoding.begin(executor, GREEDY, SAMPLED)
    for _ in range(3):
        decoding.step(ahead=True)
    assert executor.lookahead.started == 1 and machine.cuda.queue
    return executor, decoding


def test_slots_that_a_step_writes_behind_the_hosts_back_are_cleared(machine: Machine) -> None:
    executor, decoding = begin_ahead(machine)
    length = int(decoding.starts[0])
    executor.move_slot(0, 1, length)
    assert executor.lookahead.dropped == 1
    executor.release_slots(2)
    machine.cuda.run()
    for name, both in machine.caches(executor).items():
        np.testing.assert_array_equal(both[1, :, :length], both[0, :, :length])
        assert both[1, :, :length].any() and not both[1, :, length:].any(), name
    executor.release_slots(0)
    machine.cuda.run()
    for name, held in machine.caches(executor).items():
        assert not held.any(), name


@pytest.mark.parametrize("end", [lambda one: one.release_slots(1), lambda one: one.close()])
def test_a_step_is_dropped_whose_slots_go(
    machine: Machine, end: Callable[[DeviceExecutor], None]
) -> None:
    """Closing waits for it."""
    executor, _ = begin_ahead(machine)
    end(executor)
    assert executor.lookahead.dropped == 1
    executor.close()
    assert machine.cuda.is_clean


def test_an_engine_loaded_meanwhile_takes_nothing_away(machine: Machine) -> None:
    """target_only wants more memory than there is: graphs are made anew, results are not lost."""
    executor, decoding = begin_ahead(machine)
    executor.preload(("target_only",))
    other = Decoding.begin(machine.open(), GREEDY, SAMPLED)
    tokens = [other.step(ahead=False) for _ in range(6)]
    assert [decoding.step(ahead=True) for _ in range(3)] == tokens[3:]
    assert executor.lookahead.dropped == 0


def test_no_step_is_begun_that_may_not_fit(machine: Machine) -> None:
    decoding = Decoding.begin(machine.open(), GREEDY, SAMPLED)
    executor, most = decoding.executor, decoding.executor.limits.max_seq_len
    for _ in range(2):
        decoding.call()
    for start, begun in ((most - 2 * ROWS + 1, 0), (most - 2 * ROWS, 1)):
        decoding.starts[:] = [8, start]
        decoding.call(ahead=True)
        assert executor.lookahead.started == begun


def test_the_gpu_checks_probes_see_what_is_wrong(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps begun in vain cost time and no token; tokens that are drawn otherwise are others."""
    requests = [Request(prompt_ids=tuple(PROMPTS[0]), max_tokens=16)]
    executor, unused = machine.open(), None
    bench = Bench(executor, unused, unused, requests)  # type: ignore[arg-type]
    assert probe_unrecorded(bench)[0] and probe_drawing(bench)[0]
    monkeypatch.setattr(Step, "equals", lambda self, other: False)
    passed, detail, _ = probe_unrecorded(bench)
    assert not passed and "1 of 1 outputs are the same" in detail
    monkeypatch.setattr(
        "dflash_trt.proof.gpu_check.engine_probes.sampling_input",
        lambda limits, params: pack_sampling(
            [replace(one, seed=one.seed % 2**63) for one in params]
        ),
    )
    assert not probe_drawing(bench)[0]
