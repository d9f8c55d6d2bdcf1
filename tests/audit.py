"""`python -m tests.audit` looks the pinned packages up in the public list of advisories.

pip-audit does it, in an environment of its own: the newest is the one to ask. It needs a network.
Without one, or where the service knows no package at all (some mirrors answer so, and pip-audit
then finds "no known vulnerabilities"), this says that nothing was audited, and passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
UNSEEN = "the Triton server inside nvidia-pytriton is no package: see docs/serving.md"


class NotAuditedError(Exception):
    """There is nobody to ask."""


def judge(report: str) -> list[str]:
    """What is wrong in pip-audit's JSON, a line each.

    Raises:
        NotAuditedError: the report is none, or of no package.
    """
    try:
        packages: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        raise NotAuditedError("pip-audit made no report") from None
    known = [package for package in packages if "skip_reason" not in package]
    if not known:
        raise NotAuditedError("the service knows none of the packages")
    wrong = [
        f"{package['name']} {package['version']}: {advisory['id']}, mended in "
        f"{', '.join(advisory['fix_versions']) or 'no release'}"
        for package in known
        for advisory in package["vulns"]
    ]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    return wrong + [f"{name} is not known to the service" for name in skipped]


def ask(folder: Path) -> str:
    """pip-audit's report of constraints.txt; what it needs is put into `folder`.

    Raises:
        NotAuditedError: it cannot be installed, or does not reach the service.
    """
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "pip-audit"]
    if subprocess.run(install, capture_output=True).returncode:
        raise NotAuditedError("pip-audit cannot be installed")
    pins = ["-r", str(ROOT / "constraints.txt"), "--no-deps", "--disable-pip"]
    options = ["--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(
        [python, "-m", "pip_audit", *pins, *options], capture_output=True, text=True
    )
    if not done.stdout:
        raise NotAuditedError(f"pip-audit fails: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def main() -> int:
    """Prints what was found; 1 for an advisory."""
    try:
        with TemporaryDirectory() as folder:
            wrong = judge(ask(Path(folder)))
    except NotAuditedError as reason:
        print(f"audit: NO PACKAGE WAS LOOKED UP: {reason}", f"({UNSEEN})", sep="\n")
        return 0
    print(*(wrong or ["audit: no advisory"]), f"({UNSEEN})", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
