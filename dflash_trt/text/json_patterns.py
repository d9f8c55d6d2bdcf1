"""Patterns of JSON Schema, which are JavaScript's, as expressions that llguidance takes.

Those look neither ahead nor behind. What is left out is said: the rest allows more, never less.
"""

from __future__ import annotations

import re

_PIECE = re.compile(
    r"\\[pPux]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|\(\?<?[=!]|\{\d+(?:,\d*)?\}|.", re.DOTALL
)
_IN_CLASS = re.compile(r"\\.|\[|&&|~~|--", re.DOTALL)  # Rust reads the last four otherwise
# References to groups, control characters, halves of characters, forms of other dialects.
_FOREIGN = re.compile(r"\\[1-9kcGK]|\\u[dD][89a-fA-F]|\(\?>|\(\?P[=>]")
_WHOLE = {"[]": r"[^\s\S]", "[^]": r"[\s\S]", "{": r"\{", "}": r"\}", r"\0": r"\x00", r"\Z": r"\z"}
_SECONDS = r"\d+(?:[.,]\d+)?S"
_CLOCK = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
# What clients write that looks ahead, and the same without: pydantic's Decimal, zod's durations
# and its addresses of mail.
_SAME = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?"
    r"(\d+([.,]\d+)?S)?)?)$": r"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
    rf"(?:{_CLOCK})?|{_CLOCK})$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": r"^(?:[A-Za-z0-9_'+\-]+\.)*"
    r"[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
}


def read_pattern(pattern: str) -> tuple[list[str], list[str]]:
    """Expressions that a text must match all of, and what of the pattern they leave out.

    What an anchored pattern looks ahead for at its beginning is an expression of its own. No
    expression where nothing can be kept.
    """
    pattern = _SAME.get(pattern, pattern)
    if _FOREIGN.search(pattern.replace(r"\\", "")):
        return [], [pattern]
    kept, heads, left_out = "", list[str](), list[str]()
    depth, is_choice = 0, False
    look: tuple[int, int] | None = None  # where it begins, and how deep
    for found in _PIECE.finditer(pattern):
        piece = found[0]
        if look is None and re.fullmatch(r"\(\?<?[=!]", piece):
            look = found.start(), depth
        depth += piece.startswith("(")
        depth -= piece == ")"
        if look is None and piece in (r"\b", r"\B"):
            left_out.append(piece)
        elif look is None:
            is_choice |= piece == "|" and depth == 0
            kept += _translate(piece)
        elif depth == look[1]:
            group = pattern[look[0] : found.end()]
            (heads if kept == "^" and group.startswith("(?=") else left_out).append(group)
            look = None
    if is_choice:
        heads, left_out = [], heads + left_out
    also = [read_pattern(f"^(?:{one.removeprefix('(?=')}") for one in heads]
    left_out += [text for _, without in also for text in without]
    return [*(text for texts, _ in also for text in texts), kept], left_out


def _translate(piece: str) -> str:
    if piece in _WHOLE or not piece.startswith("[") or "[:" in piece:
        return _WHOLE.get(piece, piece)
    inner = _IN_CLASS.sub(
        lambda found: found[0] if found[0][0] == "\\" else f"{found[0][:-1]}\\{found[0][-1]}",
        piece[1:-1],
    )
    return f"[{inner}]"
