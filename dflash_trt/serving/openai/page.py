"""The page at `/`: files of its folder, joined into one that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "page"
_STYLES = ("style.css", "page.css")
_SCRIPTS = ("answer.js", "figures.js", "chat.js", "race.js")


def read_style() -> str:
    """Returns the CSS that reports share with the page."""
    return (FOLDER / _STYLES[0]).read_text(encoding="utf-8")


@cache
def join_page() -> tuple[bytes, dict[str, str]]:
    """Returns the page and its headers, which allow its own style and script alone, by hash."""
    page, policy = (FOLDER / "page.html").read_text(encoding="utf-8"), ["default-src 'none'"]
    for tag, names in (("style", _STYLES), ("script", _SCRIPTS)):
        text = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in names)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        policy.append(f"{tag}-src 'sha256-{digest}'")
        page = page.replace(f"<{tag}></{tag}>", f"<{tag}>{text}</{tag}>")
    policy += ["connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    headers = {
        "Content-Security-Policy": "; ".join([*policy, "frame-ancestors 'none'"]),
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return page.encode(), headers
