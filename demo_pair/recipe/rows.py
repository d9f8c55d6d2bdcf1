"""Rows that drafts of several kinds learn alike: `python -m demo_pair.recipe.rows`.

Documents of the corpus that neither the demo pair nor its prompts have seen: of some the demo
target continues the beginnings itself, greedily; of the others the rest stands as it is, for the
target learned to say such. `train-draft --given-answers` reads the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

from demo_pair.recipe.corpus import documents
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.pair import LoadedPair

STREAM = "drafts-of-three-kinds"
PROMPT_CHARACTERS = (100, 240)
SEED, GREEDY, CORPUS, TOKENS = 0, 128, 256, 192


def make_rows(pair: LoadedPair) -> list[Any]:
    """GREEDY rows of the target's own answers, of TOKENS, and CORPUS rows of documents.

    A document's beginning is about as long as the demo pair's prompts.
    """
    split = []
    for index, text in enumerate(documents(SEED, STREAM, GREEDY + CORPUS)):
        cut = text.index(" ", Random(f"{SEED}/{STREAM}/{index}").randint(*PROMPT_CHARACTERS))
        split.append((text[:cut], text[cut:]))
    answers = pair.generate([prompt for prompt, _ in split[:GREEDY]], max_tokens=TOKENS)
    said: list[Any] = [[int(one) for one in answer.token_ids] for answer in answers]
    said += [rest for _, rest in split[GREEDY:]]
    return [
        {"prompt": prompt, "answer": answer}
        for (prompt, _), answer in zip(split, said, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo_pair.recipe.rows")
    parser.add_argument("bundle", type=Path, help="of the demo pair")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    with LoadedPair(open_bundle(asked.bundle)) as pair:
        rows = make_rows(pair)
    asked.output.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
