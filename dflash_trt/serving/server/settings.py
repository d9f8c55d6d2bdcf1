"""What `config.pbtxt` says to a model, as Triton server hands it over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dflash_trt.errors import DflashError, one_line


class ModelSettings:
    """The arguments of a model's `initialize`."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        self._parameters: dict[str, dict[str, str]] = config["parameters"]
        self.version_folder = Path(arguments["model_repository"]) / arguments["model_version"]

    def read(self, name: str, kind: Any) -> Any:
        """The parameter `name` as a `kind`; DflashError where it is none."""
        given = self._parameters.get(name, {}).get("string_value")
        try:
            return TypeAdapter(kind).validate_python(given)
        except ValidationError as error:
            what = f"{error.errors()[0]['msg']}, got {one_line(repr(given), 40)}"
            raise DflashError(what, where=f"config.pbtxt: parameters: {name}") from error
