#!/usr/bin/env python3
"""A tritonserver for tests of what starts one: it gets ready, and ends in the way it is told to.

FAKE_TRITONSERVER says how: "well" (exit code 0 after SIGTERM), "stubborn" (SIGTERM does
nothing), "dies" (exit code 3 a moment after it was asked whether it is ready), "unloadable"
(a model does not load), "slow" (it never gets ready).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

MODE = os.environ["FAKE_TRITONSERVER"]
OPTIONS = {name: value for name, _, value in (item.partition("=") for item in sys.argv[1:])}

STAMP = "E1120 21:53:38.000001 77"


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if MODE == "slow" else 200)
        self.end_headers()
        if MODE == "dies":
            threading.Timer(0.3, os._exit, [3]).start()


def end(*_: object) -> None:
    if MODE != "stubborn":
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
    address = (OPTIONS["--http-address"], int(OPTIONS["--http-port"]))
    print('E1120 21:53:38.000001 77 main.cc:1] "error: the last words"', flush=True)
    HTTPServer(address, Health).serve_forever()


main()
