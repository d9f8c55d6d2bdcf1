"""Typed reading of a config.json: each value has one type, one range and one clear error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError

MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The keys of one JSON object; `prefix` names the object inside the file `where`.

    A key that is absent or null takes the default; without a default it is an error.
    """

    values: Mapping[str, Any]
    where: Path
    prefix: str = ""

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE
    ) -> int:
        """An integer in low … high."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be an integer from {low} to {high}")
        return value

    def number(
        self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e18
    ) -> float:
        """A number strictly above `low` and at most `high`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "must be a number")
        if not low < value <= high:
            raise self.error(key, f"must be a number above {low:g}, at most {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be text")
        return value

    def integers(self, key: str, low: int, high: int, limit: int) -> tuple[int, ...]:
        """A list of 1 … `limit` integers, each in low … high."""
        value = self._value(key, None)
        if not isinstance(value, list) or not 1 <= len(value) <= limit:
            raise self.error(key, f"must be a list of 1 to {limit} integers")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
                raise self.error(key, f"must hold integers from {low} to {high}")
        return tuple(value)

    def child(self, key: str) -> ConfigFields:
        """The object under `key`; empty when absent."""
        value = self.values.get(key)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return ConfigFields(value, self.where, f"{self.prefix}{key}.")

    def either(self, inner: ConfigFields, key: str) -> ConfigFields:
        """Whichever of the two objects states `key`; both may when they agree."""
        if not inner.has(key):
            return self
        if self.has(key) and self.values[key] != inner.values[key]:
            raise inner.error(key, f"must equal the top level's {quoted(self.values[key])}")
        return inner

    def error(self, key: str, rule: str) -> DflashError:
        """An error that shows the key, its value and the rule it breaks."""
        what = f"{self.prefix}{key} is {quoted(self.values.get(key))}"
        return DflashError(what, where=self.where, fix=f"it {rule}")

    def unsupported(self, key: str, fix: str) -> DflashError:
        """An error for a value that is well-formed but that this version cannot run."""
        what = f"{self.prefix}{key} = {quoted(self.values.get(key))} is not supported"
        return DflashError(what, where=self.where, fix=fix)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            what = f"{self.prefix}{key} is missing"
            raise DflashError(what, where=self.where, fix="add it, or download the config again")
        return value
