"""The TensorRT executor over stand-ins that compute: the CPU executor's tokens, call for call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import Scores, StepCall
from dflash_trt.backends.tensorrt.build.profiles import choose_profile, profiles
from dflash_trt.backends.tensorrt.library import LIBRARIES
from dflash_trt.core.limits import Limits
from dflash_trt.decoding import Generator, GeneratorOptions
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import Precision
from dflash_trt.hardware.device import Device
from tests.backends.steps import (
    begin,
    decode_plainly,
    one_chunk,
    one_step,
    random_ids,
    step,
)
from tests.backends.tensorrt.machine import REQUESTS, SLIDING, Machine, make_machine, run_alone
from tests.covering import exhaustive
from tests.pairs import PairFactory, TinyPair
from tests.standins.cuda import FakeCuda
from tests.standins.cuda import real as real_cuda
from tests.standins.tensorrt import FAKES, FakeEngine

ERRORS = real_cuda.cudaError_t


@pytest.fixture(scope="module")
def built(make_pair: PairFactory) -> TinyPair:
    draft = {"num_layers": 2, "block_size": 6, **SLIDING}
    return make_pair("qwen3", {"head_dim": 32, "kv_heads": 2}, draft, fit_steps=60)


@pytest.fixture(params=["tensorrt-rtx", exhaustive("tensorrt")])
def machine(request: pytest.FixtureRequest, built: TinyPair, tmp_path: Path) -> Machine:
    return make_machine(built, tmp_path, request.param, built.bundle.folder)


@pytest.mark.parametrize("speculation", [True, exhaustive(False)])
def test_whole_generations_are_the_cpus(
    machine: Machine, built: TinyPair, speculation: bool
) -> None:
    """Batches that grow and shrink, moved slots, ragged blocks, chunks, sampling: the same."""
    options = GeneratorOptions(speculation=speculation)
    requests = REQUESTS if speculation else REQUESTS[:-1]
    expected = [result.token_ids for result in run_alone(built, requests, options=options)]
    executor = machine.open()
    for count in (len(requests), 5):  # the second time from graphs that were captured
        results = Generator(executor, options=options).generate(requests[:count])
        assert [result.token_ids for result in results] == expected[:count]
    assert executor.runner.capture_error is None
    assert executor.runner.captured > 0 and machine.cuda.launches > machine.trt.executions // 8
    executor.close()
    assert machine.cuda.is_clean


def test_a_step_is_two_copies_and_one_replay(machine: Machine) -> None:
    executor = machine.open()
    anchors, starts = np.array([7, 8]), np.array([0, 3])
    expected, counts = None, []
    for _ in range(4):
        copies, launches = machine.cuda.copies, machine.cuda.launches
        output = executor.speculate(StepCall(0, anchors, starts, 6))
        assert output.logits is None and output.candidates is None
        got = (output.token_ids.copy(), output.choice_ids.copy())
        expected = expected or got
        np.testing.assert_array_equal(got, expected)
        counts.append((machine.cuda.copies - copies, machine.cuda.launches - launches))
    assert counts == [(2, 0), (2, 0), (2, 1), (2, 1)]
    # Other scores of a captured shape: rows and candidates are copied beside the same graph.
    whole = executor.speculate(StepCall(0, anchors, starts, 6, Scores.LOGITS))
    assert machine.cuda.launches == 3 and whole.logits is not None
    logits = whole.logits.copy()
    for _ in range(3):
        some = executor.speculate(StepCall(0, anchors, starts, 6, Scores.CANDIDATES))
        assert some.candidates is not None and some.logits is None
        ids, values = some.candidates.token_ids, some.candidates.logits
        assert ids.shape == values.shape == (2, 6, 128)
        np.testing.assert_array_equal(np.take_along_axis(logits, ids, -1), values)
        np.testing.assert_array_equal(values[..., 0], logits.max(-1))
        for row in ((0, 0), (1, 5)):
            np.testing.assert_array_equal(some.candidates.read_row(*row), logits[row])
        first, last = some.candidates.read_row(0, 0), some.candidates.read_row(1, 5)
        assert not np.array_equal(first, last), "a row read keeps its own memory"
    assert executor.runner.captured == 1


@pytest.mark.parametrize(("batch", "many"), [(2, None), (3, 3), (4, 4), (16, 8), (256, 32)])
def test_every_call_has_the_tightest_profile(batch: int, many: int | None) -> None:
    """And steps are timed amid theirs."""
    limits = Limits(max_batch=batch, max_seq_len=64, block_size=8, prefill_chunk=16)
    for library in LIBRARIES.values():
        known = profiles("target", limits, library)
        steps = [one.axes["B"] for one in known if one.is_step]
        split = many is not None and not library.is_rtx
        assert [span.usual for span in steps] == ([1, many] if split else [1])
        assert all(span.low <= span.usual <= span.high for span in steps)
        for sequences in range(1, batch + 1):
            index = choose_profile(known, {"B": sequences, "S": 8, "R": 8})
            assert index is not None and known[index].is_step
            taking = [span for span in steps if span.low <= sequences <= span.high]
            assert taking == [known[index].axes["B"]]
        for rows, want in ((16, 0), (17, None)):
            assert choose_profile(known, {"B": 1, "S": rows, "R": 1}) == want


def test_old_calls_are_dropped(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_trt.backends.device.pass_runner.MAX_CALLS", 2)
    executor = machine.open()
    for rows in (2, 3, 4, 2):
        for _ in range(3):
            executor.speculate(one_step(rows))
    assert executor.runner.captured == 2 and len(machine.cuda.executables) == 2
    for slot in range(3):
        executor.forward(one_chunk(random_ids(9, 1, 8), slot=slot))
    assert executor.runner.captured == 1, "calls without a graph push out each other"


def test_contexts_of_old_shapes_are_dropped(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None before its work is done."""
    monkeypatch.setattr("dflash_trt.backends.device.pass_runner.MAX_CONTEXTS", 1)
    executor, answers = machine.open(), set()
    for slot, rows in enumerate((1, 8, 1, 8)):
        call = one_chunk(random_ids(9, 1, 8)[:, :rows], slot=slot)
        answers.add((rows, *executor.forward(call).choice_ids[0].tolist()))
        assert len(machine.trt.contexts) == 1
    assert len(answers) == 2
    executor.speculate(one_step())  # the draft's is dropped for the target's
    assert len(machine.trt.contexts) == 1


def test_a_step_that_cannot_be_captured_still_runs(machine: Machine) -> None:
    executor = machine.open()
    machine.cuda.fail["cudaGraphInstantiate"] = ERRORS.cudaErrorNotSupported
    for _ in range(4):
        executor.speculate(one_step())
    assert executor.runner.captured == 0
    assert executor.runner.capture_error == "cudaGraphInstantiate: operation not supported"


def test_calls_outside_the_limits(machine: Machine) -> None:
    executor = machine.open()
    with pytest.raises(ValueError, match="block size 7"):
        executor.speculate(one_step(7))
    with pytest.raises(ValueError, match="takes no call of"):
        executor.forward(one_chunk(random_ids(9, 1, 17)))
    with pytest.raises(ValueError, match="linear caches have no pages"):
        executor.bind_pages(0, [0])
    for _ in range(2):
        executor.close()
    with pytest.raises(ValueError, match="closed"):
        executor.speculate(one_step())


FAILURES: dict[str, tuple[Callable[[Machine], Any], str]] = {
    "run": (lambda m: m.trt.fail.add("run"), r"draft\.engine: .* cannot run: broken"),
    "shape": (lambda m: m.trt.fail.add("shape"), r"cannot take block_ids of shape \[1, 4\]: "),
    "context": (lambda m: m.trt.fail.add("context"), r"make a context for decode: it gives"),
    "engine": (lambda m: m.trt.plans.clear(), r"cannot load it: the engine is not mine; build"),
    "work": (
        lambda m: m.cuda.fail.update(cudaEventSynchronize=ERRORS.cudaErrorIllegalAddress),
        "cudaEventSynchronize: an illegal memory access",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_one_line(machine: Machine, name: str) -> None:
    executor, (damage, message) = machine.open(), FAILURES[name]
    damage(machine)
    with pytest.raises(DflashError, match=message) as caught:
        executor.speculate(one_step())
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("failing", ["cudaEventRecord", "cudaEventSynchronize"])
def test_arguments_on_their_way_are_not_overwritten(
    machine: Machine, built: TinyPair, failing: str
) -> None:
    """The broken call's passes still run; what follows is another call, in another slot."""
    prompts, cpu = ((3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8)), built.open()
    expected = [decode_plainly(cpu, prompt, 45)[0] for prompt in prompts]
    executor = machine.open()
    sequences = [begin(executor, prompt, slot, (6,)) for slot, prompt in enumerate(prompts)]
    for number in range(7):
        if number == 4:
            machine.cuda.fail[failing] = ERRORS.cudaErrorNotReady
            with pytest.raises(DflashError, match=failing):
                step(executor, sequences, 6, 0)
            assert machine.cuda.queue
            executor.forward(one_chunk(random_ids(200, 1, 16), slot=2))
        step(executor, sequences, 6, 0)
    for sequence, tokens in zip(sequences, expected, strict=True):
        assert sequence.output == tokens[: len(sequence.output)]


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("limits", {"vocab_size": 300}, r"logits has shape \[-1, -1, 256\], .* 300"),
        ("form", {"cache_length": 256}, "has shape .* 512, .* 256"),
        ("form", {"precision": Precision.FLOAT16}, "is FLOAT, the manifest says HALF"),
    ],
)
def test_an_engine_unlike_its_manifest_is_refused(
    machine: Machine, part: str, change: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {part: replace(getattr(machine.bundle, part), **change)}
    machine.bundle = replace(machine.bundle, **fields)
    with pytest.raises(DflashError, match=message):
        machine.open().preload(("target",))


@pytest.mark.parametrize(
    ("told", "writer", "is_refused"),
    [
        (None, "plugin", False),
        ("target_v_0", "plugin", False),
        ("target_k_0", "plugin", True),
        (None, "TensorRT", True),
        ("target_k_0", "TensorRT", True),
    ],
)
def test_caches_that_are_not_updated_in_place_are_refused(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    told: str | None,
    writer: str,
    is_refused: bool,
) -> None:
    """TensorRT may say nothing of what a plugin writes, but nothing wrong."""
    real = FakeEngine.get_aliased_input_tensor
    monkeypatch.setattr(
        FakeEngine,
        "get_aliased_input_tensor",
        lambda self, name: told if name == "target_v_0_out" else real(self, name),
    )
    caches = {"target": ["target_v_0"] if writer == "plugin" else []}
    machine.bundle = replace(machine.bundle, plugin_caches=caches)
    executor = machine.open()
    if is_refused:
        with pytest.raises(DflashError, match="target_v_0 is not updated in place; build the"):
            executor.preload(("target",))
    else:
        executor.preload(("target",))


def test_caches_that_do_not_fit_are_refused(machine: Machine) -> None:
    machine.cuda.total = 1 << 20
    with pytest.raises(DflashError, match=r"linear caches \(4 × 512 positions\) of .* do not fit"):
        machine.open()


def test_kernels_are_kept_between_processes(machine: Machine) -> None:
    cache = machine.folder / "kernels.cache"
    for found, compiled in (
        (None, b"kernels 1"),
        (b"kernels 1", b"kernels 2"),
        (b"odd", b"kernels 3"),
    ):
        if found == b"odd":
            cache.write_bytes(found)
        machine.trt.kernels = b""
        executor = machine.open()
        executor.speculate(one_step())
        if found == b"kernels 1" and machine.library == "tensorrt-rtx":
            assert machine.trt.kernels == found
        machine.trt.kernels = compiled
        executor.close()
        if machine.library == "tensorrt-rtx":
            assert cache.read_bytes() == compiled
        else:
            assert found == b"odd" or not cache.exists()


def test_a_device_without_anything_is_said_so() -> None:
    for driver, reason in ((12040, "CUDA driver version is insufficient"), (0, "this machine has")):
        cuda = FakeCuda(driver=driver)
        cuda.fail["cudaGetDeviceCount"] = ERRORS.cudaErrorInsufficientDriver
        with pytest.raises(DflashError, match=f"no CUDA device: {reason}"):
            Device(cuda)


@pytest.mark.parametrize("fake", FAKES, ids=lambda fake: fake.__name__)
def test_the_library_has_what_the_stand_in_has(fake: type) -> None:
    """Names, and the parameters' names where the real docstring gives them."""
    real = FAKES[fake]
    source = inspect.getsource(fake)
    public = {name for name in vars(fake) if not name.startswith("_")}
    public |= set(re.findall(r"self\.([a-z]\w*)(?:: Any)? = ", source))
    assert public
    for name in public:
        assert hasattr(real, name), f"{real.__name__}.{name}"
        function = vars(fake).get(name)
        if function is None:
            continue
        own = [one for one in inspect.signature(function).parameters if one != "self"]
        documented = re.findall(
            rf"{name}\(self: [^,)]+(?:, ([^)]*))?\)", getattr(real, name).__doc__
        )
        assert documented, name
        counts = [len(re.findall(r"(?:^|, )\w+: ", text)) for text in documented]
        assert len(own) in counts, (name, documented)
