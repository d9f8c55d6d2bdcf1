"""What serving costs: tokens/s through gRPC streaming against the same work in this process.

    python -m dflash_perf.serving_cost BUNDLE --output perf/results

Runs of the two are interleaved and each ratio is between neighbours. At N clients, N requests are
in flight all the time: in-process the engine holds them, over gRPC each of N streams sends one
after another.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click
import numpy as np

from dflash_perf.record import spread, write_record
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.bundle.tokenizer import load_tokenizer
from dflash_trt.commands.progress import StageBars
from dflash_trt.executors import open_executor
from dflash_trt.runtime import Engine, EngineOptions, Request
from dflash_trt.runtime.prompts import read_prompts
from dflash_trt.serving.launcher import ServerOptions, TritonServer
from dflash_trt.serving.repository import RepositoryOptions, write_repository


@dataclass(frozen=True, slots=True)
class Run:
    """Output tokens over the wall time of one run; `host_us` is the engine's own, per token."""

    tokens: int
    seconds: float
    host_us: float | None = None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class InProcess:
    """The engine, fed so that `clients` requests are always in it."""

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        tokenizer = load_tokenizer(bundle)
        self._encode = tokenizer.encode
        self._engine = Engine(
            open_executor(bundle, threads=1, graphs=("target", "draft")),
            tokenizer=tokenizer.core,
            eos_token_ids=manifest.target.eos_token_ids,
            options=EngineOptions(prefill_chunk=manifest.limits.prefill_chunk),
        )

    def run(self, prompts: list[str], clients: int, max_tokens: int) -> Run:
        engine = self._engine
        waiting = iter(
            [Request(prompt_ids=tuple(self._encode(one)), max_tokens=max_tokens) for one in prompts]
        )
        host = engine.step_seconds - engine.executor_seconds
        started, tokens = time.perf_counter(), 0
        for request in islice(waiting, clients):
            engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                tokens += len(event.token_ids)
                if event.result is not None:
                    for following in islice(waiting, 1):
                        engine.submit(following)
        seconds = time.perf_counter() - started
        host = engine.step_seconds - engine.executor_seconds - host
        return Run(tokens, seconds, host / tokens * 1e6)


class Served:
    """A Triton server, and `clients` streams that each send a request after the other."""

    def __init__(self, address: str) -> None:
        self._address = address

    def run(self, prompts: list[str], clients: int, max_tokens: int) -> Run:
        waiting, lock = iter(prompts), threading.Lock()
        tokens: list[int] = []

        def work() -> None:
            with _Stream(self._address) as stream:
                while True:
                    with lock:
                        prompt = next(waiting, None)
                    if prompt is None:
                        return
                    tokens.append(stream.ask(prompt, max_tokens))

        threads = [threading.Thread(target=work) for _ in range(clients)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Run(sum(tokens), time.perf_counter() - started)


class _Stream:
    """One gRPC stream to the model tensorrt_llm."""

    def __init__(self, address: str) -> None:
        import tritonclient.grpc as grpcclient

        self._grpc = grpcclient
        self._client = grpcclient.InferenceServerClient(address)
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._results.put((result, error)))

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.stop_stream()
        self._client.close()

    def ask(self, prompt: str, max_tokens: int) -> int:
        """Streams one answer to its end; its output tokens."""
        values = {
            "text_input": np.array([prompt.encode()], dtype=np.object_),
            "streaming": np.array([True]),
            "sampling_param_max_tokens": np.array([max_tokens], dtype=np.int32),
        }
        inputs = []
        for name, value in values.items():
            datatype = {"O": "BYTES", "b": "BOOL", "i": "INT32"}[value.dtype.kind]
            inputs.append(self._grpc.InferInput(name, [1], datatype))
            inputs[-1].set_data_from_numpy(value)
        outputs = [
            self._grpc.InferRequestedOutput(one) for one in ("text_output", "num_output_tokens")
        ]
        self._client.async_stream_infer("tensorrt_llm", inputs, outputs=outputs)
        while True:
            result, error = self._results.get()
            if error is not None:
                raise error
            if (count := result.as_numpy("num_output_tokens")) is not None:
                return int(count[0])


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--clients", "counts", multiple=True, type=int, default=(1, 8, 32), show_default=True)
@click.option("--requests", type=int, default=64, show_default=True, help="Requests of a run.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True)
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder to record the run in.")
def main(
    bundle: Path,
    counts: tuple[int, ...],
    requests: int,
    runs: int,
    max_tokens: int,
    output: Path | None,
) -> None:
    """Measure serving BUNDLE's own prompts against generating them in this process."""
    opened = open_bundle(bundle)
    if opened.prompts is None:
        raise click.UsageError("the bundle came without prompts")
    prompts = list(islice(cycle(read_prompts(opened.prompts)), requests))
    figures = {
        str(clients): one for clients, one in _measure(opened, prompts, counts, runs, max_tokens)
    }
    if output is not None:
        settings = {"requests": requests, "max_tokens": max_tokens, "threads": 1}
        record = {"pair": opened.manifest.name, "settings": settings, "by_clients": figures}
        click.echo(write_record(output, "serving-cost", "dflash_perf.serving_cost", record))


def _measure(
    bundle: Bundle, prompts: list[str], counts: tuple[int, ...], runs: int, max_tokens: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        with StageBars() as bars:
            write_repository(bundle.folder, repository, RepositoryOptions(), bars)
        options = ServerOptions(repository=repository, http_port=0, grpc_port=0, metrics_port=0)
        with TritonServer(options) as server:
            server.wait_ready(300)
            here, there = InProcess(bundle), Served(server.addresses.grpc)
            for clients in counts:
                pairs = [
                    (
                        here.run(prompts, clients, max_tokens),
                        there.run(prompts, clients, max_tokens),
                    )
                    for _ in range(runs + 1)
                ][1:]  # the first warms both up
                yield clients, _summarize(clients, pairs)


def _summarize(clients: int, pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    ratio = spread([served.rate / alone.rate for alone, served in pairs])
    added = spread([1e6 / served.rate - 1e6 / alone.rate for alone, served in pairs])
    click.echo(
        f"{clients} clients: served / in-process {ratio['median']:.3f} "
        f"({ratio['min']:.3f} … {ratio['max']:.3f}), {added['median']:.0f} µs a token added"
    )
    return {
        "ratio": ratio,
        "served_tokens_per_second": spread([served.rate for _, served in pairs]),
        "in_process_tokens_per_second": spread([alone.rate for alone, _ in pairs]),
        "in_process_host_us_per_token": spread([alone.host_us or 0.0 for alone, _ in pairs]),
        "added_us_per_token": added,
    }


if __name__ == "__main__":
    main()
