"""What to say of an option that a command does not have: which one was meant."""

from __future__ import annotations

import click

from dflash_trt.errors import closest

MEANT = {
    "model": ("target", "bundle", "checkpoint"),
    "model-path": ("target", "bundle", "checkpoint"),
    "tokenizer": ("target", "bundle"),
    "target-model": ("target-checkpoint", "target"),
    "draft": ("draft-checkpoint",),
    "draft-model": ("draft-checkpoint", "from"),
    "drafter": ("draft-checkpoint", "from"),
    "speculative-model": ("draft-checkpoint",),
    "config": ("target", "bundle"),
    "yaml": ("target",),
    "dtype": ("precision", "kv-dtype"),
    "quantization": ("precision", "to"),
    "backend": ("executor",),
    "device": ("executor", "gpu"),
    "out": ("output",),
    "output-dir": ("output",),
    "force": ("overwrite",),
    "max-new-tokens": ("max-tokens",),
    "output-len": ("max-tokens", "output-tokens"),
    "input-len": ("input-tokens",),
    "max-model-len": ("max-seq-len", "context"),
    "max-num-seqs": ("max-batch", "batch"),
    "batch-size": ("max-batch", "batch"),
    "num-speculative-tokens": ("block-size",),
    "num-prompts": ("limit-prompts",),
    "dataset": ("prompts",),
    "cpus": ("threads",),
    "num-threads": ("threads",),
    "tensor-parallel-size": ("tensor-parallel", "profile"),
    "tp": ("tensor-parallel", "profile"),
    "base-url": ("url",),
    "tau": ("acceptance",),
}
"""Names that other engines and hubs use, and what may be meant here, the likeliest first."""


def describe_unknown(error: click.NoSuchOption) -> str:
    """The error's line, with the option or argument that was probably meant."""
    command = None if error.ctx is None else error.ctx.command
    named = "" if error.ctx is None else f" `{error.ctx.info_name}`"
    line = f"No such option {error.option_name!r} of{named}." if named else error.message
    if command is None:
        return line
    known = {_name(one): one for one in command.params}
    given = error.option_name.lstrip("-").replace("_", "-").lower()
    options = [name for name, one in known.items() if isinstance(one, click.Option)]
    words = {word: next((x for x in names if x in known), None) for word, names in MEANT.items()}
    words |= {name: name for name in options}
    likely = words.get(given) or words.get(closest(given, [x for x in words if words[x]]) or "")
    if likely is None:
        return f"{line} --help lists them."
    if isinstance(known[likely], click.Argument):
        return f"{line} It is the argument {known[likely].human_readable_name.upper()}."
    return f"{line} Did you mean --{likely}?"


def _name(parameter: click.Parameter) -> str:
    """A parameter's long name without dashes, or an argument's."""
    longest = max(parameter.opts, key=len)
    return longest.lstrip("-").replace("_", "-").lower()
