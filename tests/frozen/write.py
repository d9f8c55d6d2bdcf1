"""Writes the golden files anew: `python -m tests.frozen.write [NAME…]`.

They are what the project makes, frozen: a change of any of it is a decision, not an accident;
test_frozen.py names what differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.frozen.golden import GOLDEN, all_facts, differences, read, write


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, facts in all_facts(Path(folder)):
            if names and name not in names:
                continue
            is_new = not (GOLDEN / f"{name}.json").exists()
            changed = [] if is_new else differences(read(name), facts)
            write(name, facts)
            print(f"{name}: {len(facts)} facts, {'new' if is_new else f'{len(changed)} changed'}")
            for line in changed:
                print(f"  {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
