"""`dflash-trt import-gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, get_args

import click

from dflash_trt.building.gguf.importer import Imported, ImportedType, import_gguf
from dflash_trt.cli.bars import StageBars, format_size
from dflash_trt.cli.options import FOLDER, PATH, json_option, print_json
from dflash_trt.models.build_config import advise_draft


@click.command("import-gguf")
@click.argument("file", type=PATH)
@click.option(
    "--dtype",
    type=click.Choice(get_args(ImportedType)),
    default="bf16",
    help="What weights become: bf16 rounds each decoded value once, fp32 keeps it.",
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that was imported before.")
@json_option
@click.option("-o", "--output", type=FOLDER, required=True, help="The new checkpoint's folder.")
def command(file: Path, dtype: str, overwrite: bool, as_json: bool, output: Path) -> None:
    """Turn a GGUF file into a Hugging Face checkpoint that `build` takes as its target.

    Llama, Qwen2, Qwen3, Qwen3-MoE and Gemma 3 models with a byte-level or a SentencePiece
    tokenizer, in any type that holds weights, from Q4_0 to F32. The tokenizer and its chat template
    come from the file too. What cannot be kept is refused by name.
    """
    with StageBars() as bars:
        kind = cast(ImportedType, dtype)
        imported = import_gguf(file, output, bars, dtype=kind, overwrite=overwrite)
    if as_json:
        print_json(_to_json(imported))
    else:
        click.echo(_describe(imported))


def _describe(imported: Imported) -> str:
    config, vocabulary, rounded = imported.config, imported.vocabulary, imported.rounded
    family, layers = config.family.name, len(config.sizes.layers)
    kinds = ", ".join(f"{count} {kind}" for kind, count in imported.kinds.items())
    share = rounded / imported.parameters
    lost = f"{rounded:,} values rounded to bf16 ({share:.1%})" if rounded else "every value is kept"
    texts = vocabulary.texts
    shown = ", ".join(f"{texts.get(index, '')} ({index})" for index in vocabulary.ends)
    ends = f"ends at {shown}" if shown else "no token ends a text"
    template = "no chat template" if vocabulary.template is None else "chat template kept"
    lines = [
        f"{imported.folder}: {family} target of {layers} layers ({imported.parameters:,} "
        f"parameters), {format_size(imported.file.size)} → {format_size(imported.bytes)} in "
        f"{imported.dtype}",
        f"  tensors: {kinds}; {lost}",
        f"  tokenizer: {vocabulary.size:,} tokens, {len(vocabulary.merges):,} merges, cut as "
        f"{vocabulary.pre_name}; {ends}; {template}",
    ]
    if licence := imported.about("license"):
        lines.append(f"  licence: {licence}")
    if draft := advise_draft(imported.folder, imported.about("name"), imported.file.path.stem):
        lines.append(f"  draft: {draft}")
    return "\n".join(lines)


def _to_json(imported: Imported) -> dict[str, Any]:
    config, vocabulary = imported.config, imported.vocabulary
    return {
        "output": str(imported.folder),
        "source": str(imported.file.path),
        "name": imported.about("name"),
        "license": imported.about("license"),
        "family": config.family.name,
        "layers": len(config.sizes.layers),
        "parameters": imported.parameters,
        "dtype": imported.dtype,
        "source_bytes": imported.file.size,
        "bytes": imported.bytes,
        "tensors": dict(imported.kinds),
        "rounded_values": imported.rounded,
        "tokenizer": {
            "pre_tokenizer": vocabulary.pre_name,
            "tokens": vocabulary.size,
            "merges": len(vocabulary.merges),
            "added_tokens": len(vocabulary.added),
            "unused_tokens": vocabulary.size - len(vocabulary.ids),
            "eos_token_ids": list(vocabulary.ends),
            "has_chat_template": vocabulary.template is not None,
        },
    }
