"""A bundle served in every way of decoding, measured under load, and drawn.

Starts Triton servers on free ports: one with the bundle's target_only graph, one that drafts by
prompt lookup, one with the bundle's own draft at whatever block a request asks for, and one that
follows its block schedule, where `tune` wrote one. `--beside` adds bundles of the same target with
other drafts, EAGLE-3's or DSpark's say, each decoded as its own schedule has it. Then runs
`dflash-trt sweep` and `dflash-trt report` on them. Only the server that is asked works.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import yaml

from dflash_perf.bench.base import Work, bench
from dflash_perf.bench.repeat import prompt_file, read_named_bundles
from dflash_perf.harness.store import PLAN
from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.bundle.support import Feature, find_refusal
from dflash_trt.core.progress import SilentProgress
from dflash_trt.decoding.drafter_kinds import DRAFTERS, NOBODY, PROMPT_LOOKUP
from dflash_trt.decoding.tuning.bundle_schedule import AUTO, NONE, choose_schedule
from dflash_trt.errors import DflashError
from dflash_trt.serving.server.launcher import ServerOptions, TritonServer
from dflash_trt.serving.server.repository import RepositoryOptions, write_repository
from dflash_trt.text.prompts import read_prompts

READY_TIMEOUT_S = 300


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
    kind = _shown_kind(opened)
    served = served_ways(opened, read_named_bundles(beside, opened))
    output_dir.mkdir(parents=True, exist_ok=True)
    results = output_dir / "sweep"
    if (results / PLAN).is_file():  # of servers that are gone: nothing can be added to it
        shutil.rmtree(results)
    marked = ["--interactivity", interactivity] if interactivity else []
    # On the results' disk, so that weights are linked and not copied.
    with tempfile.TemporaryDirectory(dir=output_dir) as scratch, ExitStack() as servers:
        configurations: list[dict[str, object]] = []
        for number, (name, (folder, packaging)) in enumerate(served.items()):
            repository = Path(scratch) / str(number)
            address = {"url": servers.enter_context(serve(folder, repository, packaging))}
            if name != kind:
                configurations.append({"name": name, **address})
                continue
            for block in map(int, blocks.split(",")):
                asked = {"name": f"{kind}, block {block}", "parameters": {"block_size": block}}
                configurations.append({**asked, **address})
        config = work.folder / "sweep.yaml"
        settings: dict[str, object] = {"input_file": str(prompts)}
        settings["configurations"] = configurations
        settings |= {"repeats": work.runs, "ignore_eos": not end_at_eos}
        config.write_text(yaml.safe_dump(settings), "utf-8")
        options = ["--concurrency", concurrency, "--osl", str(osl)]
        _run("sweep", "--config", str(config), *options, *marked, "-o", str(results))
    _run("report", str(results), *marked, "-o", str(output_dir / "report.html"))


def served_ways(
    bundle: Bundle, beside: Mapping[str, Bundle]
) -> dict[str, tuple[Path, RepositoryOptions]]:
    """The servers to start, by the names of their lines in the report.

    Raises:
        DflashError: a bundle beside is called like one of the others (usage).
    """
    kind, folder = _shown_kind(bundle), bundle.folder
    found = {"target_only": (folder, RepositoryOptions(drafter=NOBODY))}
    if find_refusal(Feature.PROMPT_LOOKUP, bundle.manifest.executor) is None:
        found[DRAFTERS[PROMPT_LOOKUP]] = (folder, RepositoryOptions(drafter=PROMPT_LOOKUP))
    found[kind] = (folder, RepositoryOptions(block_schedule=NONE))
    if choose_schedule(bundle, AUTO) is not None:
        found[f"{kind}, tuned"] = (folder, RepositoryOptions())
    for name, other in beside.items():
        if name in found:
            what = f"{name!r} is what {folder} is shown as"
            raise DflashError(what, where="--beside", fix="choose another NAME", usage=True)
        found[name] = (other.folder, RepositoryOptions())
    return found


def _shown_kind(bundle: Bundle) -> str:
    """The kind of the draft, with the precision that is not the checkpoint's own."""
    manifest = bundle.manifest
    return f"{manifest.draft.kind} in int8" if manifest.target.int8 else manifest.draft.kind


def rendered_prompts(bundle: Bundle, folder: Path) -> Path:
    """The bundle's prompts as a Triton server takes them, which reads a text as it is: rendered
    into a file in `folder` where the bundle has a chat template."""
    file = prompt_file(bundle).resolve()
    tokenizer = load_tokenizer(bundle)
    if tokenizer.chat_template is None:
        return file
    rendered = folder / "prompts.jsonl"
    sent = tokenizer.render_chats(read_prompts(file))
    lines = (json.dumps({"prompt": text}) + "\n" for text in sent)
    rendered.write_text("".join(lines), encoding="utf-8")
    return rendered


@contextmanager
def serve(bundle: Path, repository: Path, packaging: RepositoryOptions) -> Iterator[str]:
    """A Triton server of `bundle` on free ports; writes its model repository to `repository`.

    Yields its gRPC address once it is ready.
    """
    write_repository(bundle, repository, packaging, SilentProgress())
    options = ServerOptions(repository=repository, http_port=0, grpc_port=0, metrics_port=0)
    with TritonServer(options) as server:
        server.wait_ready(READY_TIMEOUT_S)
        yield server.addresses.grpc


def _run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "dflash_trt", *arguments], check=False)
    if done.returncode:
        raise DflashError(f"`dflash-trt {arguments[0]}` failed with exit code {done.returncode}")
