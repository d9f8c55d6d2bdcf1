"""Runs all attacks on a pair that somebody serves, and prints a line for each."""

from __future__ import annotations

import argparse
import time

from tests.serving.attacks import ATTACKS, Target, check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("openai", help="URL, http://host:port/v1; its model is named demo")
    parser.add_argument("grpc", help="host:port")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    target = Target(options.openai, options.grpc)
    failed = 0
    for attack in ATTACKS:
        started = time.monotonic()
        wrong = check(attack, target, options.seed)
        failed += wrong is not None
        print(f"{time.monotonic() - started:6.2f} s  {wrong or attack.name}", flush=True)
    return int(failed > 0)


raise SystemExit(main())
