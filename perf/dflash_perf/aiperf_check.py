"""Our harness beside aiperf, on the same served model and the same requests.

    dflash-trt serve BUNDLE --openai-port 9000 &
    python -m dflash_perf.aiperf_check --aiperf VENV/bin/aiperf --url http://127.0.0.1:9000 \
        --model demo --tokenizer BUNDLE/tokenizer --input-file BUNDLE/prompts.jsonl

aiperf lives in an environment of its own. Runs take turns, so that what the machine does meanwhile
befalls both; the figures compared are those both define alike: TPOT (aiperf: inter token latency),
output tokens per second, and TTFT. The server must not be short of processor: aiperf is several
busy processes, which a server on two cores feels.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click

from dflash_perf.harness.config import SweepConfig
from dflash_perf.harness.sweep import SilentObserver, run_sweep
from dflash_perf.record import spread, write_record

# Figure: where aiperf's export has it, and what its unit is worth in seconds or tokens/s.
_AIPERF = {
    "tpot": ("inter_token_latency", "p50", 1e-3),
    "ttft": ("time_to_first_token", "p50", 1e-3),
    "output_throughput": ("output_token_throughput", "avg", 1.0),
}


@click.command()
@click.option("--aiperf", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--url", required=True, help="The OpenAI endpoint, without /v1.")
@click.option("--model", required=True)
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--input-file", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--concurrency", type=click.IntRange(1), default=4, show_default=True)
@click.option("--request-count", type=click.IntRange(1), default=200, show_default=True)
@click.option("--osl", type=click.IntRange(2), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder of records.")
def main(
    aiperf: Path,
    url: str,
    model: str,
    tokenizer: Path,
    input_file: Path,
    concurrency: int,
    request_count: int,
    osl: int,
    repeats: int,
    output: Path | None,
) -> None:
    """Measure one load with both tools in turn, and say how far apart they are."""
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    load = {"concurrency": concurrency, "request_count": request_count, "osl": osl}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for repeat in range(repeats):
            ours.append(_sweep(url, model, input_file, load, folder / f"sweep-{repeat}"))
            theirs.append(
                _run_aiperf(aiperf, url, model, tokenizer, input_file, load, folder / f"{repeat}")
            )
    figures: dict[str, Any] = {"load": load, "repeats": repeats}
    for name in _AIPERF:
        ratios = [one[name] / other[name] for one, other in zip(ours, theirs, strict=True)]
        figures[name] = {
            "dflash": spread([one[name] for one in ours]),
            "aiperf": spread([one[name] for one in theirs]),
            "ratio": spread(ratios),
        }
        ratio = figures[name]["ratio"]
        bounds = f"{ratio['min']:.3f} … {ratio['max']:.3f}"
        click.echo(f"{name}: sweep ÷ aiperf {ratio['median']:.3f} ({bounds})")
    if output is not None:
        click.echo(write_record(output, "aiperf-check", "dflash_perf.aiperf_check", figures))


def _sweep(
    url: str, model: str, input_file: Path, load: dict[str, int], folder: Path
) -> dict[str, float]:
    config = SweepConfig.model_validate(
        {
            "configurations": [{"name": model, "kind": "completions", "url": url, "model": model}],
            "input_file": str(input_file),
            **load,
            "concurrency": [load["concurrency"]],
            "repeats": 1,
            "ignore_eos": True,
        }
    )
    (run,) = run_sweep(config, folder, SilentObserver(), "").runs()
    if run.completed != load["request_count"]:
        raise click.ClickException(f"{load['request_count'] - run.completed} requests failed")
    return {
        "tpot": run.distributions["tpot"]["p50"],
        "ttft": run.distributions["ttft"]["p50"],
        "output_throughput": run.values["output_throughput"],
    }


def _run_aiperf(
    aiperf: Path,
    url: str,
    model: str,
    tokenizer: Path,
    input_file: Path,
    load: dict[str, int],
    folder: Path,
) -> dict[str, float]:
    folder.mkdir()
    prompts = [json.loads(line)["prompt"] for line in input_file.read_text("utf-8").splitlines()]
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts), "utf-8")
    arguments = {
        "--model": model,
        "--url": url,
        "--endpoint-type": "completions",
        "--tokenizer": str(tokenizer.resolve()),
        "--input-file": str(texts),
        "--custom-dataset-type": "single_turn",
        "--concurrency": str(load["concurrency"]),
        "--request-count": str(load["request_count"]),
        "--warmup-request-count": str(load["concurrency"]),
        "--osl": str(load["osl"]),
        "--artifact-dir": str(folder),
        "--ui": "none",
    }
    done = subprocess.run(
        [
            str(aiperf),
            "profile",
            *(word for pair in arguments.items() for word in pair),
            "--streaming",
            "--use-server-token-count",
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
            *("--extra-inputs", "seed:0"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise click.ClickException(f"aiperf failed:\n{done.stderr[-2000:] or done.stdout[-2000:]}")
    exported = json.loads((folder / "profile_export_aiperf.json").read_text("utf-8"))
    return {name: exported[key][field] * unit for name, (key, field, unit) in _AIPERF.items()}


if __name__ == "__main__":
    main()
