"""Results of a sweep that never was: a server that saturates, drafts that help less under load."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from dflash_perf.harness.points import RunPlan, RunSummary
from dflash_perf.harness.records import RequestRecord, RunRecord
from dflash_perf.harness.store import ResultStore
from dflash_perf.harness.sweep_config import OfferedLoad, SweepConfig

OUTPUT_TOKENS = 129
BLOCKS = {"autoregressive": 1, "DFlash, block 4": 4, "DFlash, block 8": 8}


def invented_config(*, gpus: int | None = None, **changes: object) -> SweepConfig:
    configurations = [{"name": name, "url": "127.0.0.1:8001", "gpus": gpus} for name in BLOCKS]
    raw = {"configurations": configurations, "input_file": "prompts.jsonl", **changes}
    return SweepConfig.model_validate(raw)


def invent_run(block: int, concurrency: int, repeat: int) -> RunRecord:
    """`concurrency` × 10 requests; a step gets dearer with concurrency × block."""
    chance = random.Random(f"{block} {concurrency} {repeat}")
    step_s = 0.010 * (1 + 0.012 * concurrency * block**0.9) * (1 + 0.01 * repeat)
    requests: list[RequestRecord] = []
    for index in range(10 * concurrency):
        histogram = [0] * block
        emitted = 0
        while emitted < OUTPUT_TOKENS - 1:
            accepted = 0
            while accepted < block - 1 and chance.random() < 0.88 - 0.03 * accepted:
                accepted += 1
            size = min(accepted + 1, OUTPUT_TOKENS - 1 - emitted)
            histogram[size - 1] += 1
            emitted += size
        steps = sum(histogram)
        ttft_s = 0.03 * (1 + 0.1 * concurrency) * chance.lognormvariate(0, 0.3)
        e2e_s = ttft_s + steps * step_s * chance.lognormvariate(0, 0.04)
        drafted = steps * (block - 1)
        requests.append(
            RequestRecord(
                index=index,
                prompt=index % 7,
                sent_s=(index // concurrency) * e2e_s,
                ttft_s=ttft_s,
                e2e_s=e2e_s,
                input_tokens=40,
                output_tokens=OUTPUT_TOKENS,
                token_source="output_ids",
                finish_reason="length",
                verify_steps=steps,
                drafted_tokens=drafted,
                accepted_tokens=OUTPUT_TOKENS - 1 - steps if drafted else 0,
                histogram=tuple(histogram),
            )
        )
    window_s = sum(one.e2e_s or 0 for one in requests) / concurrency
    share = 0.02 * concurrency**0.5
    return RunRecord(requests=tuple(requests), window_s=window_s, client_cpu_share=share)


def summarize(run: RunRecord, name: str, load: OfferedLoad, repeat: int) -> RunSummary:
    return RunSummary.of(RunPlan(name, load, repeat, seed=repeat), run)


def write_invented(folder: Path, config: SweepConfig) -> ResultStore:
    store = ResultStore(folder)
    with store.open_for(config, "0" * 64, "dflash-trt sweep"):
        for repeat in range(config.repeats):
            for load in config.loads:
                for name in [one.name for one in config.configurations]:
                    run = invent_run(BLOCKS[name], load.concurrency or 1, repeat)
                    run = replace(run, gpus=config.configurations[0].gpus)
                    store.add(run, summarize(run, name, load, repeat))
        server = {"server": "triton 2.51.0", "model": "tensorrt_llm", "parameters": {}}
        store.add_servers({one.name: server for one in config.configurations})
    return store
