"""What `config.pbtxt` says to a model, as Triton server hands it over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dflash_trt.decoding.drafter_kinds import DRAFTERS, DrafterKind
from dflash_trt.errors import DflashError, one_line
from dflash_trt.hardware.cores import AUTO, ThreadChoice


class ModelSettings:
    """The arguments of a model's `initialize`."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        self._parameters: dict[str, dict[str, str]] = config["parameters"]
        self.version_folder = Path(arguments["model_repository"]) / arguments["model_version"]

    def text(self, name: str) -> str:
        """The parameter `name`; DflashError when config.pbtxt has none."""
        if name not in self._parameters:
            raise _wrong(name, "is missing")
        return self._parameters[name]["string_value"]

    def switch(self, name: str) -> bool:
        """A parameter that is on (True) or off."""
        text = self.text(name)
        if text not in ("on", "off"):
            raise _wrong(name, f"{one_line(repr(text), 40)} is neither on nor off")
        return text == "on"

    def count(self, name: str, least: int) -> int:
        """A parameter that is a whole number of at least `least`."""
        text = self.text(name)
        if not text.isdecimal() or int(text) < least:
            raise _wrong(name, f"{text!r} is not a whole number of at least {least}")
        return int(text)

    def threads(self, name: str) -> ThreadChoice:
        """A parameter that is a number of CPU threads, or "auto"."""
        return AUTO if self.text(name) == AUTO else self.count(name, 1)

    def drafter(self, name: str) -> DrafterKind:
        """A parameter that is a kind of drafter."""
        text = self.text(name)
        if text not in DRAFTERS:
            raise _wrong(name, f"{one_line(repr(text), 40)} is none of {', '.join(DRAFTERS)}")
        return text


def _wrong(name: str, what: str) -> DflashError:
    return DflashError(what, where=f"config.pbtxt: parameters: {name}")
