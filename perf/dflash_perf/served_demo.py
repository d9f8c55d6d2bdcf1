"""A bundle served in every way of decoding, measured under load, and drawn.

    python -m dflash_perf.served_demo BUNDLE --output-dir FOLDER

Starts Triton servers on free ports: one with the bundle's target_only graph, one with DFlash at
whatever block a request asks for, and one that follows the bundle's block schedule, where `tune`
wrote one. Then runs `dflash-trt sweep` and `dflash-trt report` on them. Each server has one
executor thread; only the one that is asked works.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click
import yaml

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.commands.progress import StageBars
from dflash_trt.runtime.bundle_schedule import AUTO, NONE, choose_schedule
from dflash_trt.serving.launcher import ServerOptions, TritonServer
from dflash_trt.serving.repository import RepositoryOptions, write_repository

READY_TIMEOUT_S = 300


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--output-dir", type=click.Path(path_type=Path), required=True)
@click.option("--concurrency", default="1,2,4,8,16", show_default=True)
@click.option("--blocks", default="4,8", show_default=True, help="Fixed blocks to compare.")
@click.option("--osl", type=int, default=128, show_default=True, help="Most output tokens.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--interactivity", default="600", show_default=True, help="Tokens/s per user.")
def main(
    bundle: Path,
    output_dir: Path,
    concurrency: str,
    blocks: str,
    osl: int,
    repeats: int,
    interactivity: str,
) -> None:
    """Measure BUNDLE on its own prompts, served with and without speculation."""
    opened = open_bundle(bundle)
    if opened.prompts is None:
        raise click.UsageError("the bundle came without prompts")
    served = {
        "target_only": RepositoryOptions(speculation=False),
        "DFlash": RepositoryOptions(block_schedule=NONE),
    }
    if choose_schedule(opened, AUTO) is not None:
        served["DFlash, tuned"] = RepositoryOptions()
    output_dir.mkdir(parents=True, exist_ok=True)
    # Beside the results, so that weights are linked and not copied.
    with tempfile.TemporaryDirectory(dir=output_dir) as folder, ExitStack() as servers:
        configurations: list[dict[str, object]] = []
        for name, packaging in served.items():
            repository = Path(folder) / name
            with StageBars() as bars:
                write_repository(bundle, repository, packaging, bars)
            options = ServerOptions(repository=repository, http_port=0, grpc_port=0, metrics_port=0)
            server = servers.enter_context(TritonServer(options))
            server.wait_ready(READY_TIMEOUT_S)
            address = {"url": server.addresses.grpc}
            if name != "DFlash":
                configurations.append({"name": name, **address})
                continue
            for block in map(int, blocks.split(",")):
                asked = {"name": f"DFlash, block {block}", "parameters": {"block_size": block}}
                configurations.append({**asked, **address})
        config = Path(folder) / "sweep.yaml"
        config.write_text(
            yaml.safe_dump(
                {"input_file": str(opened.prompts.resolve()), "configurations": configurations}
            ),
            "utf-8",
        )
        results = output_dir / "sweep"
        options_of_sweep = ["--concurrency", concurrency, "--osl", str(osl), "--ignore-eos"]
        options_of_sweep += ["--repeats", str(repeats), "--interactivity", interactivity]
        _run("sweep", "--config", str(config), *options_of_sweep, "-o", str(results))
    report = output_dir / "report.html"
    _run("report", str(results), "--interactivity", interactivity, "-o", str(report))


def _run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "dflash_trt", *arguments], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
