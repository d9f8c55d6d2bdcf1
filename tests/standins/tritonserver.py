#!/usr/bin/env python3
"""A tritonserver for tests of what starts one: it gets ready, and ends in the way it is told to.

FAKE_TRITONSERVER says how:
- "well": exit code 0 after SIGTERM; "stubborn": SIGTERM only puts "heard" into its log;
- "dies": exit code 3 a moment after its metrics were read; "unloadable": a model does not load;
- "slow": never ready, which puts "asked" into the log when asked;
- "drains": answers over gRPC as `served_model.py`'s "steady" does, and logs how many it has. After
  SIGTERM it takes no more, and those may end within the exit timeout: exit code 0 if all did, or 1.
As the real one, it opens the metrics' port after it has said that it is ready.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

MODE = os.environ["FAKE_TRITONSERVER"]
OPTIONS = {name: value for name, _, value in (item.partition("=") for item in sys.argv[1:])}

STAMP = "E1120 21:53:38.000001 77"


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if MODE == "slow" else 200)
        self.end_headers()
        if self.path == "/v2":
            self.wfile.write(json.dumps({"name": OPTIONS["--id"]}).encode())
        if MODE == "slow":
            print("asked", flush=True)
        elif METRICS.ident is None:
            METRICS.start()


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if MODE == "dies":
            threading.Timer(0.3, os._exit, [3]).start()


def serve_metrics() -> None:
    HTTPServer(read_address("metrics"), Metrics).serve_forever()


METRICS = threading.Thread(target=serve_metrics, daemon=True)


def read_address(protocol: str) -> tuple[str, int]:
    return OPTIONS[f"--{protocol}-address"], int(OPTIONS[f"--{protocol}-port"])


async def answer_and_drain() -> None:
    sys.path.append(str(Path(__file__).parents[2]))
    import grpc
    from tritonclient.grpc import service_pb2_grpc

    from tests.standins.served_model import MODELS, Model

    MODELS["tensorrt_llm"] = MODELS["steady"]
    with Path(os.devnull).open("w") as log:
        server = grpc.aio.server()
        model = Model(log)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(model, server)
        server.add_insecure_port(":".join(map(str, read_address("grpc"))))
        await server.start()
        stopping = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
        health = HTTPServer(read_address("http"), Health)
        threading.Thread(target=health.serve_forever, daemon=True).start()
        while not stopping.is_set():
            print(f"{model.running} running", flush=True)
            await asyncio.sleep(0.05)
        await server.stop(float(OPTIONS["--exit-timeout-secs"]))
        os._exit(model.running != 0)


def end(*_: object) -> None:
    if MODE == "stubborn":
        print("heard", flush=True)
    else:
        print("exiting", flush=True)
        os._exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    if MODE == "unloadable":
        reason = "Internal: ValueError: no weights here\\n\\nAt:\\n  model.py(3): initialize\\n"
        print(f"{STAMP} model_lifecycle.cc:642] \"failed to load 'm' version 1: {reason}\"")
        print("error: creating server: Internal - failed to load all models", flush=True)
        time.sleep(0.2)
        sys.exit(1)
    print('E1120 21:53:38.000001 77 main.cc:1] "error: the last words"', flush=True)
    if MODE == "drains":
        asyncio.run(answer_and_drain())
    HTTPServer(read_address("http"), Health).serve_forever()


main()
