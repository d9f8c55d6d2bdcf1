"""A bundle served in every way of decoding, measured under load, and drawn.

Starts Triton servers on free ports: one with the bundle's target_only graph, one with DFlash at
whatever block a request asks for, and one that follows the bundle's block schedule, where `tune`
wrote one. `--beside` adds bundles of the same target with other drafts, EAGLE-3's or DSpark's say,
each decoded as its own schedule has it. Then runs `dflash-trt sweep` and `dflash-trt report` on
them. Only the server that is asked works.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import yaml

from dflash_perf.bench.base import Work, bench
from dflash_perf.bench.bundles import rendered_prompts
from dflash_perf.bench.served import serve
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.errors import DflashError
from dflash_trt.serving.server.repository import RepositoryOptions
from dflash_trt.tuning.bundle_schedule import AUTO, NONE, choose_schedule


@bench(runs=3)
def measure(
    work: Work,
    bundle: Path,
    *,
    output_dir: Annotated[Path, "Folder of results and report."],
    concurrency: str = "1,2,4,8,16",
    blocks: Annotated[str, "Fixed blocks to compare."] = "4,8",
    osl: Annotated[int, "Most output tokens."] = 128,
    end_at_eos: Annotated[bool, "End answers where the model does; else all are --osl."] = False,
    interactivity: Annotated[str | None, "Tokens/s per user; else what all of them reach."] = None,
    beside: Annotated[tuple[str, ...], "NAME=BUNDLE of another draft; repeatable."] = (),
) -> None:
    opened = open_bundle(bundle)
    prompts = rendered_prompts(opened, work.folder)
    served = {
        "target_only": (bundle, RepositoryOptions(speculation=False)),
        "DFlash": (bundle, RepositoryOptions(block_schedule=NONE)),
    }
    if choose_schedule(opened, AUTO) is not None:
        served["DFlash, tuned"] = (bundle, RepositoryOptions())
    for name, other in read_named_bundles(beside, opened).items():
        served[name] = (other.folder, RepositoryOptions())
    output_dir.mkdir(parents=True, exist_ok=True)
    results = output_dir / "sweep"
    marked = ["--interactivity", interactivity] if interactivity else []
    # On the results' disk, so that weights are linked and not copied.
    with tempfile.TemporaryDirectory(dir=output_dir) as scratch, ExitStack() as servers:
        configurations: list[dict[str, object]] = []
        for number, (name, (folder, packaging)) in enumerate(served.items()):
            repository = Path(scratch) / str(number)
            address = {"url": servers.enter_context(serve(folder, repository, packaging))}
            if name != "DFlash":
                configurations.append({"name": name, **address})
                continue
            for block in map(int, blocks.split(",")):
                asked = {"name": f"DFlash, block {block}", "parameters": {"block_size": block}}
                configurations.append({**asked, **address})
        config = work.folder / "sweep.yaml"
        settings = {"input_file": str(prompts), "configurations": configurations}
        config.write_text(yaml.safe_dump(settings), "utf-8")
        options = ["--concurrency", concurrency, "--osl", str(osl), "--repeats", str(work.runs)]
        options += ["--ignore-eos"] * (not end_at_eos)
        _run("sweep", "--config", str(config), *options, *marked, "-o", str(results))
    _run("report", str(results), *marked, "-o", str(output_dir / "report.html"))


def read_named_bundles(texts: Sequence[str], target: Bundle | None) -> dict[str, Bundle]:
    """The bundles of NAME=BUNDLE texts, by name.

    Raises:
        DflashError: one that cannot be read, or whose target is not that of `target`, or of the
            first where there is none (usage).
    """
    found: dict[str, Bundle] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in found:
            raise DflashError(f"{text!r} is not one NAME=BUNDLE", usage=True)
        found[name] = open_bundle(Path(path))
        target = target or found[name]
        if _target_of(found[name]) != _target_of(target):
            what = f"has another target than {target.folder}"
            raise DflashError(what, where=path, usage=True)
    return found


def _target_of(bundle: Bundle) -> list[tuple[int, str | None]]:
    """What tells a bundle's target from others: sizes and headers of its weight files."""
    files = bundle.manifest.files
    return [
        (one.bytes, one.header_sha256) for one in files if one.path.startswith("weights/target/")
    ]


def _run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "dflash_trt", *arguments], check=False)
    if done.returncode:
        raise DflashError(f"`dflash-trt {arguments[0]}` failed with exit code {done.returncode}")
