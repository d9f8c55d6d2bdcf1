"""Our harness beside aiperf, on the same served model and the same requests.

Needs a served model: `dflash-trt serve BUNDLE --openai-port 9000`, then --url
http://127.0.0.1:9000 --tokenizer BUNDLE/tokenizer --input-file BUNDLE/prompts.jsonl.

aiperf lives in an environment of its own. Runs take turns, so that what the machine does meanwhile
befalls both; the figures compared are those both define alike: TPOT (aiperf: inter token latency),
output tokens per second, and TTFT. The server must not be short of processor: aiperf is several
busy processes, which a server on two cores feels.
"""

from __future__ import annotations

import json
import subprocess
from itertools import count as numbers
from pathlib import Path
from typing import Annotated

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.repeat import show, spread, spread_of_ratios, take_turns
from dflash_perf.bench.served import sweep_once
from dflash_trt.errors import DflashError

# Figure: where aiperf's export has it, and what its unit is worth in seconds or tokens/s.
_AIPERF = {
    "tpot": ("inter_token_latency", "p50", 1e-3),
    "ttft": ("time_to_first_token", "p50", 1e-3),
    "output_throughput": ("output_token_throughput", "avg", 1.0),
}


@bench(runs=5)
def measure(
    work: Work,
    *,
    aiperf: Annotated[Path, "Its command."],
    url: Annotated[str, "The OpenAI endpoint, without /v1."],
    model: str,
    tokenizer: Path,
    input_file: Annotated[Path, "Prompts."],
    concurrency: int = 4,
    request_count: int = 200,
    osl: int = 64,
) -> Figures:
    load = {"concurrency": concurrency, "request_count": request_count, "osl": osl}
    texts = work.folder / "texts.jsonl"
    prompts = [json.loads(line)["prompt"] for line in input_file.read_text("utf-8").splitlines()]
    texts.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts), "utf-8")
    command = [str(aiperf), "profile", "--model", model, "--url", url]
    command += ["--tokenizer", str(tokenizer.resolve()), "--input-file", str(texts)]
    served = {"name": model, "kind": "completions", "url": url, "model": model}
    folders = (work.folder / str(number) for number in numbers())
    ways = {
        "dflash": lambda: _sweep(next(folders), served, input_file, load),
        "aiperf": lambda: _run_aiperf(next(folders), command, load),
    }
    found = take_turns(ways, work.runs)
    figures: Figures = {"load": load, "repeats": work.runs}
    for name in _AIPERF:
        ours, theirs = ([run[name] for run in runs] for runs in found.values())
        ratio = spread_of_ratios(ours, theirs)
        figures[name] = {"dflash": spread(ours), "aiperf": spread(theirs), "ratio": ratio}
        click.echo(f"{name}: sweep ÷ aiperf {show(ratio, '.3f')}")
    return figures


def _sweep(
    folder: Path, served: dict[str, str], prompts: Path, load: dict[str, int]
) -> dict[str, float]:
    (run,) = sweep_once(folder, served, prompts, ignore_eos=True, **load).runs()
    if run.completed != load["request_count"]:
        raise DflashError(f"{load['request_count'] - run.completed} requests failed")
    return {
        "tpot": run.distributions["tpot"]["p50"],
        "ttft": run.distributions["ttft"]["p50"],
        "output_throughput": run.values["output_throughput"],
    }


def _run_aiperf(folder: Path, command: list[str], load: dict[str, int]) -> dict[str, float]:
    folder.mkdir()
    arguments = {
        "--endpoint-type": "completions",
        "--custom-dataset-type": "single_turn",
        "--concurrency": str(load["concurrency"]),
        "--request-count": str(load["request_count"]),
        "--warmup-request-count": str(load["concurrency"]),
        "--osl": str(load["osl"]),
        "--artifact-dir": str(folder),
        "--ui": "none",
    }
    extra = ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
    extra += ["--extra-inputs", "seed:0", "--streaming", "--use-server-token-count"]
    words = [word for pair in arguments.items() for word in pair]
    done = subprocess.run([*command, *words, *extra], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DflashError(f"aiperf failed: {done.stderr[-2000:] or done.stdout[-2000:]}")
    exported = json.loads((folder / "profile_export_aiperf.json").read_text("utf-8"))
    return {name: exported[key][field] * unit for name, (key, field, unit) in _AIPERF.items()}
