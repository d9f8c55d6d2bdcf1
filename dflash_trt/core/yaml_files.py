"""YAML from users: bounded, no aliases, no repeated keys, one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dflash_trt.core.files import FileKind, read_text
from dflash_trt.errors import DflashError, one_line

MOST_VALUES = 20_000
"""Keys and values of a file, which take a third of a millisecond each; ours have hundreds."""


class _Loader(yaml.SafeLoader):
    """YAML without aliases (few lines can stand for gigabytes) and without repeated keys."""

    _values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._values += 1
        if self._values > MOST_VALUES:
            raise yaml.YAMLError(f"more than {MOST_VALUES:,} keys and values")
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"key {one_line(key.value, 60)!r} is given twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    value: int = loader.construct_yaml_int(node)
    str(value)  # an error here of more digits than Python prints, and not in the middle of another
    return value


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def read_yaml(path: Path, within: Path | None = None) -> dict[str, Any]:
    """The mapping in a YAML file that the user named, or that came `within` a folder.

    Raises:
        DflashError: unreadable, not YAML, an alias, a key given twice, or not a mapping (usage).
    """
    text = read_text(path, FileKind.YAML, within=within, named=within is None)
    raw = parse_yaml(text, path)
    if not isinstance(raw, dict):
        raise DflashError("must be a YAML mapping of keys", where=path, usage=True)
    return raw


def parse_yaml(text: str, where: str | Path) -> Any:
    """What a text says, of whatever kind.

    Raises:
        DflashError: not YAML, an alias, a key given twice (usage).
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        # Besides YAMLError, PyYAML lets through what its constructors raise.
        what = f"is not valid YAML: {one_line(error)}"
        raise DflashError(what, where=where, usage=True) from error
