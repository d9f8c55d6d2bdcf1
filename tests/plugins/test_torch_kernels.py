"""Kernels that PyTorch's executor starts, interpreted: the tokens of the functions' bodies."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.backends.registry import open_executor
from dflash_trt.building.spec import BuildSpec
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.decoding import Generator, Request, SamplingParams
from dflash_trt.graph.form import Precision
from tests.pairs import PairFactory, caches, write_bundle
from tests.plugins.interpreter import Interpreter, tell_tensors

POOL = {"page_size": 8, "pages": 24}
REQUESTS = [
    Request(prompt_ids=(3, 1, 4, 1, 5), max_tokens=8, ignore_eos=True),
    Request(
        prompt_ids=(2, 7, 1),
        max_tokens=6,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0.9, top_k=12, seed=3),
    ),
]


def decode(folder: Path, has_kernels: bool) -> tuple[list[tuple[int, ...]], int]:
    """What a bundle answers, and how many kernels were started."""
    from dflash_trt.backends.torch import open_torch, passes

    started = []
    tell_tensors([])  # PyTorch's are its own affair

    class Loader(passes.TorchLoader):
        def _launch(self, node, tensors):  # type: ignore[no-untyped-def]
            started.append(node.operation)
            return super()._launch(node, tensors)

    open_torch.TorchLoader = lambda place, **_: Loader(place, has_kernels=has_kernels)  # type: ignore[misc, assignment]
    executor = open_executor(open_bundle(folder), threads=1)
    results = Generator(executor).generate(REQUESTS)
    executor.close()
    return [tuple(one.token_ids) for one in results], len(set(started))


@pytest.mark.exhaustive
def test_kernels_give_the_bodies_tokens(
    interpreter: Interpreter, make_pair: PairFactory, tmp_path: Path
) -> None:
    """Paged caches: attention, cache writes, injection, draws and acceptance."""
    target = {"vocab": 64, "num_layers": 2, "head_dim": 64}
    draft = {"head_dim": 64, "block_size": 4, "target_layer_ids": [0, 1]}
    pair = make_pair("qwen3", target, draft, fit_steps=40, max_seq_len=64).pair
    limits = {"max_batch": 2, "max_seq_len": 64, "prefill_chunk": 16}
    spec = BuildSpec(caches=caches(POOL))
    write_bundle(pair, tmp_path / "torch", spec, torch=Precision.FLOAT16, **limits)
    expected, none = interpreter.call(decode, tmp_path / "torch", False)
    tokens, kinds = interpreter.call(decode, tmp_path / "torch", True)
    assert tokens == expected and (none, kinds) == (0, 6)
