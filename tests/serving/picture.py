"""`python -m tests.serving.picture BUNDLE PNG …`: the race, served with the options behind them."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.serving.chromium import find_chromium, open_tab
from tests.serving.served import serving

WIDTH, HEIGHT, SCALE = 1240, 800, 1.25


def draw_race(bundle: Path, picture: Path, *options: str) -> str:
    """Races as a user would, and returns what the page says of it; exits without Chromium."""
    chromium = find_chromium()
    if chromium is None:
        sys.exit("no Chromium here: apt-get install chromium")
    with serving(bundle, bundle, *options) as served, open_tab(chromium) as tab:
        tab.open(served.openai.removesuffix("v1"), WIDTH, HEIGHT, scale=SCALE)
        tab.wait("served.model")
        tab.click("#tab-race")
        tab.click("#start")
        tab.wait("document.querySelector('#verdict b') && !running")
        picture.write_bytes(tab.picture())
        return str(tab.run("document.querySelector('#verdict').innerText"))


if __name__ == "__main__":
    print(draw_race(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
