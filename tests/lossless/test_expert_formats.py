"""The gpt-oss demo pair: the same bits from its experts in NVFP4."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dflash_trt.backends.registry import open_executor
from dflash_trt.building.bundle_writer import build_bundle
from dflash_trt.building.spec import BuildSpec
from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.core.formats import Format
from dflash_trt.decoding import Generator, GeneratorOptions, Request, RequestResult
from dflash_trt.models.build_config import BuildConfig, load_config
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.target import read_target
from dflash_trt.quantization.experts import convert_experts
from tests.pairs import SilentProgress

PAIR = Path(__file__).parents[2] / "demo_pair" / "gpt_oss"


def _build(target: Path, folder: Path) -> Bundle:
    pair = check_pair(read_target(target), read_draft(PAIR / "draft"))
    config: BuildConfig = load_config("demo-gpt-oss")[0]
    build_bundle(pair, config, "demo", folder, BuildSpec(), SilentProgress())
    return open_bundle(folder)


def _generate(bundle: Bundle) -> list[RequestResult]:
    tokenizer = load_tokenizer(bundle)
    lines = (PAIR / "prompts.jsonl").read_text().splitlines()[:6]
    executor = open_executor(bundle, threads=1, graphs=("target", "draft"))
    generator = Generator(
        executor,
        tokenizer=tokenizer.core,
        eos_token_ids=bundle.manifest.target.eos_token_ids,
        options=GeneratorOptions(record_logits=True),
    )
    requests = [
        Request(prompt_ids=tuple(tokenizer.encode(json.loads(line)["prompt"])), max_tokens=96)
        for line in lines
    ]
    results = generator.generate(requests)
    executor.close()
    return results


def _same(some: list[RequestResult], others: list[RequestResult]) -> bool:
    return all(
        one.token_ids == other.token_ids and np.array_equal(one.logits, other.logits)
        for one, other in zip(some, others, strict=True)
    )


def test_experts_in_nvfp4_give_the_bits_of_mxfp4(tmp_path: Path) -> None:
    native = _generate(_build(PAIR / "target", tmp_path / "native"))
    checkpoint = read_target(PAIR / "target").checkpoint
    written = convert_experts(checkpoint, Format.NVFP4, tmp_path / "q", SilentProgress())
    assert not any(report.requantized for report in written.reports.values())
    converted = read_target(tmp_path / "q")
    assert converted.moe is not None and converted.moe.storage == "NVFP4"
    assert _same(native, _generate(_build(tmp_path / "q", tmp_path / "bundle")))
