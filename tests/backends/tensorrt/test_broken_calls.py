"""Calls that an error breaks off half-way, over stand-ins: what is asked for next is as ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.errors import DflashError
from tests.backends.steps import begin, decode_plainly, one_chunk, random_ids, step
from tests.backends.tensorrt.machine import make_machine
from tests.pairs import PairFactory, TinyPair
from tests.standins.cuda import real


@pytest.fixture(scope="module")
def built(make_pair: PairFactory) -> TinyPair:
    draft = {"num_layers": 2, "block_size": 6}
    return make_pair("qwen3", {"head_dim": 32, "kv_heads": 2}, draft)


@pytest.mark.parametrize("failing", ["cudaEventRecord", "cudaEventSynchronize"])
def test_arguments_on_their_way_are_not_overwritten(
    built: TinyPair, tmp_path: Path, failing: str
) -> None:
    """The broken call's passes still run; what follows is another call, in another slot."""
    prompts, cpu = ((3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8)), built.open()
    expected = [decode_plainly(cpu, prompt, 45)[0] for prompt in prompts]
    cpu.close()
    machine = make_machine(built, tmp_path, "tensorrt", built.bundle.folder)
    executor = machine.open()
    sequences = [begin(executor, prompt, slot, (6,)) for slot, prompt in enumerate(prompts)]
    for number in range(7):
        if number == 4:
            machine.cuda.fail[failing] = real.cudaError_t.cudaErrorNotReady
            with pytest.raises(DflashError, match=failing):
                step(executor, sequences, 6, 0)
            assert machine.cuda.queue
            executor.forward(one_chunk(random_ids(200, 1, 16), slot=2))
        step(executor, sequences, 6, 0)
    for sequence, tokens in zip(sequences, expected, strict=True):
        assert sequence.output == tokens[: len(sequence.output)]
