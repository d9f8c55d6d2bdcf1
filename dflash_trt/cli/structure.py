"""What outputs must follow, as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from dflash_trt.cli.options import FILE, option_group
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError
from dflash_trt.text.grammar import Grammar, schema_text

STRUCTURE = {"json_schema", "regex"}
"""The parameters of the group."""


@dataclass(frozen=True, slots=True)
class StructureOptions:
    """A JSON schema in a file, or a regular expression."""

    json_schema: Path | None
    regex: str | None

    def read(self, *, ignore_eos: bool) -> Grammar | None:
        """The grammar; None where none is asked for.

        Raises:
            DflashError: both are given, a file that cannot be used, or outputs do not end (usage).
        """
        if self.json_schema is None and self.regex is None:
            return None
        option = "--regex" if self.json_schema is None else "--json-schema"
        if self.json_schema is not None and self.regex is not None:
            raise DflashError("give --json-schema or --regex, not both", usage=True)
        if ignore_eos:
            what = "does not go with --ignore-eos: what is whole ends there"
            raise DflashError(what, where=option, usage=True)
        try:
            if self.json_schema is None:
                return Grammar("regex", self.regex or "")
            schema = read_json_object(self.json_schema, named=True)
            return Grammar("json_schema", schema_text(schema))
        except DflashError as error:
            where = option if error.where == "grammar" else error.where
            raise DflashError(error.what, where=where, fix=error.fix, usage=True) from error


structure_options = option_group(
    "structure",
    StructureOptions,
    click.option("--json-schema", type=FILE, help="Outputs are JSON that fits the schema in FILE."),
    click.option("--regex", help="Outputs match the regular expression."),
)
