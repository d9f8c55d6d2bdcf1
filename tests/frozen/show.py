"""Prints frozen graphs as text, to compare two checkouts: `python -m tests.frozen.show NAME…`.

A NAME is a golden one, as qwen3/draft/bf16-paged-fp8-draws.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.frozen.graphs import graphs


def main(names: list[str]) -> None:
    pairs = sorted({name.split("/")[0] for name in names})
    with tempfile.TemporaryDirectory() as folder:
        for name, model in graphs(Path(folder), pairs):
            if name in names:
                print(f"# {name}\n{model}")


if __name__ == "__main__":
    main(sys.argv[1:])
