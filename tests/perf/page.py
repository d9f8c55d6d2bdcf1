"""A report's page, read as a browser reads it."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "br"}


_LOADING = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "style"}


class Page(HTMLParser):
    """What a page loads, its figures with their shapes, and its visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.figures: dict[str, int] = {}
        self.labels: list[str] = []
        self.text = ""
        self._figure: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {key: value or "" for key, value in attrs}
        self.loads += [value for key, value in values.items() if key in _LOADING]
        self.ids += [values["id"]] if "id" in values else []
        if tag == "figure":
            self._figure = values["id"]
            self.figures[self._figure] = 0
        if tag == "path" and self._figure is not None and values.get("d"):
            self.figures[self._figure] += 1
        if tag == "svg":
            self.labels.append(values["aria-label"])
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "figure":
            self._figure = None

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data
