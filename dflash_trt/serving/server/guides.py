"""TensorRT-LLM's guided decoding: what its two fields ask for, as the JSON of a grammar."""

from __future__ import annotations

import json

from dflash_trt.errors import one_line
from dflash_trt.serving.server.inputs import refuse

GUIDE_TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
# TensorRT-LLM's names for what a guide is; structural tags are not known.
_KINDS = {
    "json": "json_object",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "grammar",
}


def read_guide(kind: str, guide: str) -> str | None:
    """None where neither says anything.

    Raises:
        DflashError: a type that is not known (usage).
    """
    if not kind and not guide:
        return None
    if kind not in _KINDS:
        what = f"{one_line(repr(kind), 40)} is none of {', '.join(_KINDS)}"
        raise refuse(GUIDE_TYPE, what)
    return json.dumps({"kind": _KINDS[kind], "text": guide})
