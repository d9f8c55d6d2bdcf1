"""The table of a campaign, and two of them compared: `python -m tests.mutation.table A B`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def to_markdown(record: dict[str, Any]) -> str:
    """One line a mutant, with the totals at the top."""
    counts = Counter(mutant["result"] for mutant in record["mutants"])
    totals = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
    lines = [
        f"{len(record['mutants'])} mutants: {totals}.",
        "",
        "| mutant | kind | where | result | by | s |",
        "|---|---|---|---|---|---|",
    ]
    for mutant in record["mutants"]:
        by = mutant.get("by") or ", ".join(mutant.get("suites", [])) or mutant["found"]
        cells = [mutant["number"], mutant["kind"], f"`{mutant['file']}` {mutant['name']}"]
        cells += [mutant["result"], f"`{by}`" if "by" in mutant else by, mutant.get("seconds", "")]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def compare(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Which of the mutants that the first campaign killed the second kills."""
    killed = {m["number"] for m in before["mutants"] if m["result"] == "killed"}
    results = {m["number"]: m["result"] for m in after["mutants"]}
    counted = Counter(results.get(number, "not run") for number in killed)
    lines = [
        f"of {len(killed)} killed before: " + ", ".join(f"{n} {r}" for r, n in counted.items())
    ]
    lines += [
        f"{number}: {results.get(number, 'not run')}"
        for number in sorted(killed)
        if results.get(number) != "killed"
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(compare(*(json.loads(Path(path).read_text()) for path in sys.argv[1:3])))
