"""The check of `accept` on a GPU: every output must be equal."""

from __future__ import annotations

from functools import partial

import numpy as np

from dflash_plugins.accept.launch import make_case
from dflash_plugins.testing.gpu import Point
from dflash_plugins.testing.guarded import Arrays
from dflash_plugins.testing.numeric import Accuracy, Check, Run, exact
from dflash_trt.sampling.acceptance import accept_block


def make_inputs(batch: int, rows: int, seed: int = 0) -> Arrays:
    """Blocks [batch,rows] of three token ids, so that drafts often match; one exceeds int32."""
    generator = np.random.default_rng(seed)
    tokens, choices = np.array([7, 2**40, 0])[generator.integers(0, 3, (2, batch, rows))]
    tokens[0, 1:] = choices[0, :-1]  # everything accepted
    starts = generator.integers(0, 2**33, batch)
    return {"token_ids": tokens, "choice_ids": choices, "cache_start": starts}


def expect(inputs: Arrays) -> Arrays:
    """The expected outputs, by the runtime's own rule (`accept_block`)."""
    tokens, choices = inputs["token_ids"], inputs["choice_ids"]
    settled = [
        accept_block(row[1:].tolist(), own.tolist().__getitem__)
        for row, own in zip(tokens, choices, strict=True)
    ]
    counts = np.array([len(one) for one in settled])
    padded = [one + [-1] * (choices.shape[1] - len(one)) for one in settled]
    return {
        "accepted": (counts - 1).astype(np.int32),
        "new_tokens": np.array(padded),
        "bonus": np.array([one[-1] for one in settled]),
        "new_start": inputs["cache_start"] + counts,
    }


def checks() -> list[Check]:
    """300 blocks of each size up to 16."""
    return [Check(f"accept, {rows} rows", partial(_check_rows, rows)) for rows in range(1, 17)]


def _check_rows(rows: int, run: Run) -> Accuracy:
    inputs = make_inputs(300, rows)
    outputs, expected = run("accept", inputs, {}), expect(inputs)
    wrong = [name for name in expected if not np.array_equal(outputs[name], expected[name])]
    return exact(f"accept, {rows} rows", [f"{name} differ" for name in wrong])


ROWS = ((1, 8), (8, 8), (64, 8), (64, 16))


def points() -> list[Point]:
    """Verify steps of one sequence and of many."""
    return [
        Point(
            [make_case(f"{batch} × {rows} rows", batch=batch, rows=rows)],
            partial(make_inputs, batch, rows),
        )
        for batch, rows in ROWS
    ]
