"""PyTorch's executor on the CPU: the tokens and accepted drafts of the CPU's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dflash_trt.backends.device.executor import DeviceExecutor
from dflash_trt.backends.registry import open_executor
from dflash_trt.building.spec import BuildSpec
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding import Generator, Request, RequestResult, SamplingParams
from dflash_trt.graph.form import Precision
from dflash_trt.models.build_config import data_folder
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.target import read_target
from tests.backends.tensorrt.drawing import Patient
from tests.backends.tensorrt.test_families_on_engines import LIMITS as LOGIT_LIMITS
from tests.backends.tensorrt.test_families_on_engines import POOL as LOGIT_POOL
from tests.backends.tensorrt.test_families_on_engines import TARGETS, check_logits
from tests.covering import exhaustive
from tests.lossless.runs import make_requests, write_fitted_mtp
from tests.lossless.test_hybrids import PAIR as HYBRID
from tests.pairs import PairFactory, bundle_pair, caches, write_bundle
from tests.reference.compare import narrow_error

LIMITS = {"max_batch": 3, "max_seq_len": 160, "prefill_chunk": 40}
POOL = {"page_size": 8, "pages": 60}
DRAWN = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=4)


def _demo(draft: str, target: str = "demo_pair/target") -> Callable[..., Pair]:
    def make(factory: PairFactory, folder: Path) -> Pair:
        target_folder, draft_folder = map(data_folder, (target, f"demo_pair/{draft}"))
        return check_pair(read_target(target_folder), read_draft(draft_folder))

    return make


def _tiny(**given: Any) -> Callable[..., Pair]:
    return lambda factory, folder: factory(**given).pair


def _mtp(factory: PairFactory, folder: Path) -> Pair:
    base = factory(**HYBRID)
    return bundle_pair(write_fitted_mtp(folder, base, make_requests(64, 6)), BuildSpec()).pair


_DRAFT = {"block_size": 8, "target_layer_ids": [0, 3]}
# Their narrow logits have no bound: one rounding less of a norm moves whole steps of an FP4 code.
QUANTISED: dict[str, Any] = {
    "family": "qwen3",
    "target": {"vocab": 64, "num_layers": 4, "head_dim": 32},
    "quantize": {"target": {"algorithm": "NVFP4", "exclude": ()}, "draft": {"algorithm": "FP8"}},
    "fit_steps": 60,
}
PAIRS = {
    "DFlash": _demo("draft"),
    "DFlash 2": _demo("trio/dflash2"),
    "DSpark": _demo("trio/dspark"),
    "EAGLE-3": _demo("trio/eagle3"),
    "MTP, hybrid": _mtp,
    "gpt-oss": _demo("gpt_oss/draft", "demo_pair/gpt_oss/target"),
    "hybrid": _tiny(**HYBRID),
    "quantised": _tiny(draft=_DRAFT, **QUANTISED),
    "Gemma 4": _tiny(
        family="gemma4", target={"vocab": 64, "num_layers": 4, "tie": True}, draft=_DRAFT
    ),
}
NAMES = [name if name in ("DFlash", "hybrid") else exhaustive(name) for name in PAIRS]


def _ask(pair: Pair) -> list[Request]:
    vocab = min(pair.target.vocab_size, 500)
    asked = make_requests(vocab, 6)
    return [
        Request(
            prompt_ids=one.prompt_ids,
            max_tokens=24,
            ignore_eos=True,
            sampling=DRAWN if index % 2 else SamplingParams(),
        )
        for index, one in enumerate(asked)
    ]


def _told(results: Sequence[RequestResult]) -> list[tuple[Any, ...]]:
    return [(one.token_ids, one.statistics.acceptance_histogram) for one in results]


def _open(bundle: Bundle) -> DeviceExecutor:
    executor = open_executor(bundle, threads=1)
    assert isinstance(executor, DeviceExecutor)
    return executor


@pytest.mark.covering(1)
@pytest.mark.parametrize("paged", [False, True], ids=["linear", "paged"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_accepted_drafts_are_the_cpus(
    name: str, paged: bool, make_pair: PairFactory, tmp_path: Path
) -> None:
    """Greedy and drawn requests side by side, looking ahead and not."""
    folder = tmp_path / "pair"
    folder.mkdir()
    pair, spec = PAIRS[name](make_pair, folder), BuildSpec(caches=caches(POOL if paged else None))
    requests = _ask(pair)
    cpu = open_executor(write_bundle(pair, tmp_path / "cpu", spec, **LIMITS), threads=1)
    results = Generator(cpu).generate(requests)
    expected = _told(results)
    assert any(one.statistics.accepted_tokens for one in results) or name == "Gemma 4"
    cpu.close()
    bundle = write_bundle(pair, tmp_path / "torch", spec, torch=Precision.FLOAT32, **LIMITS)
    executor = _open(bundle)
    for one in (Patient(executor), executor):
        assert _told(Generator(one).generate(requests)) == expected  # type: ignore[arg-type]
    assert executor.runner.capture_error is None and executor.runner.captured
    assert executor.lookahead.started or executor.states
    executor.close()


@pytest.mark.parametrize(
    ("name", "precision", "paged"),
    [
        ("windows", Precision.BFLOAT16, True),
        ("mixture", Precision.FLOAT16, False),
        *(exhaustive(name, Precision.FLOAT16, True) for name in TARGETS),
        *(exhaustive(name, Precision.BFLOAT16, False) for name in TARGETS),
    ],
)
def test_narrow_logits_are_near_the_cpus(
    name: str, precision: Precision, paged: bool, make_pair: PairFactory, tmp_path: Path
) -> None:
    """Chunks, rejected rows, a slot that moves; FP8 codes where caches hold them."""
    built = make_pair(**HYBRID | TARGETS[name])
    spec = BuildSpec(caches=caches(LOGIT_POOL if paged else None, built.bundle.manifest.kv_dtype))
    bundle = write_bundle(built.pair, tmp_path / "torch", spec, torch=precision, **LOGIT_LIMITS)
    executor, cpu = _open(bundle), built.open()
    dtype = ml_dtypes.bfloat16 if precision is Precision.BFLOAT16 else np.float16
    bound = narrow_error(len(built.pair.target.sizes.layers), dtype, recurrent="recurrent" in name)
    bound += 0.05 * (spec.caches.kv_dtype == "fp8")
    check_logits(executor, cpu, bound)
    executor.close()
