"""Measure a served model under rising load, and draw throughput against interactivity.

Needs a server and the perf extra (pip install -e '.[serve,perf]'):
    dflash-trt serve demo-bundle
Run it: python examples/sweep_and_plot.py localhost:8001 demo_pair/prompts.jsonl build/sweep
The results stay in the folder: run it again and it goes on where it stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_perf.harness.sweep import run_sweep
from dflash_perf.harness.sweep_config import SweepConfig
from dflash_perf.report.content import write_report

from dflash_trt.core.progress import SilentProgress


def main(address: str, prompts: str, folder: str, most: str = "8", tokens: str = "64") -> None:
    concurrency = [1 << power for power in range(int(most).bit_length())]
    config = SweepConfig.model_validate(
        {
            "configurations": [{"name": "DFlash", "url": address}],
            "input_file": prompts,
            "concurrency": concurrency,
            "osl": int(tokens),
            "repeats": 2,
        }
    )
    store = run_sweep(config, Path(folder), SilentProgress(), "examples/sweep_and_plot.py")
    for point in store.points():
        assert point.interactivity is not None and point.throughput is not None
        print(
            f"{point.load.label}: {point.interactivity:,.0f} tokens/s per user, "
            f"{point.throughput.mean:,.0f} together"
        )
    page, *_, chart = write_report(Path(folder), Path(folder) / "report", [], None)
    print(f"{page} and {chart}")


if __name__ == "__main__":
    main(*sys.argv[1:])
