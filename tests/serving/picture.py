"""`python -m tests.serving.picture BUNDLE PNG …`: the race, served with the options behind them."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.serving.chromium import find_chromium, open_tab
from tests.serving.served import serving

if __name__ == "__main__":
    bundle, picture, *options = sys.argv[1:]
    chromium = find_chromium() or sys.exit("no Chromium here: apt-get install chromium")
    with serving(Path(bundle), Path(bundle), *options) as served, open_tab(chromium) as tab:
        tab.open(served.openai.removesuffix("v1"), 1240, 800, scale=1.25)
        tab.wait("served.model")
        tab.click("#tab-race")
        tab.click("#start")
        tab.wait("document.querySelector('#verdict b') && !running")
        Path(picture).write_bytes(tab.picture())
        print(tab.run("document.querySelector('#verdict').innerText"))
