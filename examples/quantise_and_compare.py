"""Build the demo pair in float32 and in NVFP4, and look at what the lower precision costs.

Speculation never changes an output, but quantised weights are another model: its texts part from
the original's sooner or later. `dflash-trt verify --against` measures it token by token.

Needs nothing but dflash-trt; writes two bundles into the folder.
Run it: python examples/quantise_and_compare.py build
"""

from __future__ import annotations

import sys
from pathlib import Path

import dflash_trt
from dflash_trt import Bundle, PrecisionOptions, RequestResult
from dflash_trt.text.prompts import read_prompts


def weight_bytes(bundle: Bundle) -> int:
    return sum(one.bytes for one in bundle.manifest.files if one.path.startswith("weights/"))


def answer(bundle: Bundle, count: int) -> list[RequestResult]:
    assert bundle.prompts is not None
    with dflash_trt.load(bundle.folder) as pair:
        return pair.generate(read_prompts(bundle.prompts)[:count], max_tokens=64)


def agreement(one: RequestResult, other: RequestResult) -> int:
    """Tokens until two answers part."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(one.token_ids))


def main(folder: str, count: str = "16") -> None:
    precision = PrecisionOptions(precision="nvfp4", exclude=("model.*.self_attn.*",))
    original = dflash_trt.build("demo", Path(folder) / "demo-fp32", overwrite=True)
    quantised = dflash_trt.build(
        "demo", Path(folder) / "demo-nvfp4", precision=precision, overwrite=True
    )
    print(f"weights: {weight_bytes(quantised) / weight_bytes(original):.0%} of the bytes")
    before, after = answer(original, int(count)), answer(quantised, int(count))
    for number, (one, other) in enumerate(zip(before, after, strict=True), start=1):
        lengths = one.statistics.acceptance_length, other.statistics.acceptance_length
        print(
            f"prompt {number}: {agreement(one, other)} of {len(one.token_ids)} tokens agree; "
            f"acceptance length {lengths[0]:.2f} → {lengths[1]:.2f}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
