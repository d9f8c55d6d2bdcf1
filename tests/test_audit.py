"""The audit of packages: what it finds, and that silence is not taken for health."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.audit import NotAuditedError, judge


def _report(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


CLEAN = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


def test_what_is_wrong() -> None:
    assert judge(_report(CLEAN), {}) == []
    assert judge(_report(CLEAN, BAD), {}) == ["b 2: PYSEC-1, mended in 3"]
    assert judge(_report(CLEAN, BAD), {"PYSEC-1": "no release has it"}) == []
    assert judge(_report(CLEAN), {"PYSEC-1": ""}) == ["PYSEC-1 is accepted and no longer there"]
    assert judge(_report(CLEAN, UNKNOWN), {}) == ["c is not known to the service"]


@pytest.mark.parametrize("report", ["", "{}", "[]", _report(), _report(UNKNOWN, UNKNOWN)])
def test_silence_is_no_health(report: str) -> None:
    """A mirror without advisories knows no package; pip-audit calls that no vulnerabilities."""
    with pytest.raises(NotAuditedError):
        judge(report, {})
