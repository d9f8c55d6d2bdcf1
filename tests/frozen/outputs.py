"""What commands there are, and what `targets`, `plan` and `inspect` print as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.frozen import canonical
from tests.frozen.bundles import BUNDLES
from tests.frozen.command_line import command_line_facts, run_well

PLANS = (
    "--target gpt-oss-120b --gpu b300x8 --interactivity 500",
    "--target gpt-oss-120b --gpu gb300x72 --interactivity 100 --layout ep8",
    "--target gpt-oss-20b --gpu h100 --interactivity 300 --context 65536 --acceptance 3.5",
    "--target qwen3-8b --gpu b200 --interactivity 300",
    "--target qwen3-8b --gpu b200x2 --layout tp2 --interactivity 300 --precision fp8",
    "--target qwen3-4b --gpu rtx-pro-6000 --interactivity 100 --input-tokens 8000",
    "--target llama-3.1-8b --gpu h200 --interactivity 200 --precision nvfp4",
    "--target qwen3-coder-30b-a3b --gpu b200x4 --interactivity 400 --output-tokens 256",
)
INSPECTIONS = ((), ("--verify",))


def output_facts(bundles: Path) -> dict[str, Any]:
    """JSON by command line; `bundles` is the folder of `write_bundles`."""
    facts: dict[str, Any] = {"command line": command_line_facts()}
    facts["targets"] = run_well("targets", "--json").json
    for words in PLANS:
        plan = run_well("plan", *words.split(), "--json").json
        plan["accuracy"] = canonical.rows_digest(plan["accuracy"])
        for kind, rows in plan["fronts"].items():
            plan["fronts"][kind] = canonical.rows_digest(rows)
        facts[f"plan {words}"] = canonical.rounded(plan)
    for name in BUNDLES:
        facts |= _inspections(name, bundles / name)
    return facts


def _inspections(name: str, bundle: Path) -> dict[str, Any]:
    """The plain answer but for what it repeats of the manifest, and what options change in it."""
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    answers = {words: run_well("inspect", bundle, *words, "--json").json for words in INSPECTIONS}
    plain = dict(answers[()])
    facts: dict[str, Any] = {}
    for words, answer in answers.items():
        known = plain if words else manifest
        facts[" ".join(["inspect", name, *words])] = {"keys": list(answer)} | {
            key: canonical.rounded(value)
            for key, value in answer.items()
            if key not in known or value != known[key]
        }
    return facts
