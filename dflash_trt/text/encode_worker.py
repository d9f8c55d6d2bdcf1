"""Encodes texts with one tokenizer. Run by foreign_worker.py, in its limits, for bounded.py."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

_held: list[Any] = []


def answer(job: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """Takes the tokenizer in `payload`, or gives {"ids": …} of the text there; {"error": …}.

    {"absent": true} where no tokenizer is held: the process that held it has ended.
    """
    try:
        if job["loads"]:
            _held[:] = [_load(payload)]
            return {}
        if not _held:
            return {"absent": True}
        text = payload.decode("utf-8", "surrogatepass")
        return {"ids": list(_held[0].encode(text, add_special_tokens=job["special"]).ids)}
    except MemoryError:
        return {"error": f"needs more than {job['max_bytes'] >> 20} MiB"}
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            return {"error": str(error)}
        raise


def _load(payload: bytes) -> Any:
    tokenizer = Tokenizer.from_buffer(payload)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
