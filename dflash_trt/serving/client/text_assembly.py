"""Streamed text as its reader wants it: new pieces only, each of whole characters."""

from __future__ import annotations

_UNDECODED = "�"


class TextAssembler:
    """Turns a stream's text outputs into pieces that join to the final text.

    Args:
        cumulative: an output is all text so far; False when it is the new piece.

    A server that decodes tokens as they come shows the bytes of a half character as U+FFFD
    until the rest is there. Of a cumulative text such an end is held back, up to the last output.
    """

    def __init__(self, *, cumulative: bool) -> None:
        self._cumulative = cumulative
        self.text = ""

    def push(self, output: str, *, final: bool) -> str:
        """The piece that `output` adds to `text`.

        Raises:
            ValueError: a cumulative text took back what it had said before.
        """
        if not self._cumulative:
            self.text += output
            return output
        if not final:
            output = output.rstrip(_UNDECODED)
        if not output.startswith(self.text):
            raise ValueError("a streamed text changed after it was sent")
        piece = output[len(self.text) :]
        self.text = output
        return piece
