"""`gated_delta_step` in float64, row by row, with what its sums may be off by in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_plugins.testing.numeric import Array, epsilon, relative, sum_error

Wide = npt.NDArray[np.float64]

ROUNDINGS = 64
"""Roundings of one row besides its sums: four exponentials, two roots, divisions, products; each
function is right to two units in the last place."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The outputs [B,…] of a call, and bounds on the relative error of its y and state."""

    y: Wide
    state_out: Wide
    rows_out: Array
    y_bound: Array
    state_bound: Array


@dataclass(frozen=True, slots=True)
class Mixed:
    """q, k or v [N,D] of a row; the squares of its elements and of the terms that they are of."""

    values: Wide
    squares: Wide


def expect(inputs: Mapping[str, Array], replay: int) -> Expected:
    """What `gated_delta_step` gives for `inputs`, by its definition's names and shapes.

    The error of a state is bounded from the sum of its terms' squares, each as old as the call: a
    row scales those that are there by its decay and adds its own.
    """
    new, rows = inputs["new_rows"], inputs["rows"]
    batch, count, _ = new.shape
    _, heads, size, _ = inputs["state"].shape
    held, taps = rows.shape[2], inputs["kernel"].shape[2]
    y, y_squares = np.zeros((2, batch, count, heads, size))
    state_out, state_squares = np.zeros((2, *inputs["state"].shape))
    rows_out = rows.copy()
    longest = count + replay
    for b in range(batch):
        start, settled, end = (
            int(inputs[name][b]) for name in ("start", "state_start", "rows_end")
        )
        index = np.arange(start - held, start)
        side, is_live = int(inputs["side"][b]), end >= 0
        if not is_live:
            start = settled = end = 0
            index = np.arange(-held, 0)
        old = rows[b, side, np.maximum(index - end + held, 0)]
        old = np.where(index[:, None] < 0, np.zeros_like(old), old)
        if is_live:
            rows_out[b, 1 - side] = np.concatenate([old, new[b].astype(rows.dtype)])[-held:]
        text = np.concatenate([old.astype(np.float64), new[b].astype(np.float64)])
        state = np.zeros((heads, size, size))
        if settled:
            state = inputs["state"][b].astype(np.float64)
        squares, cut = state**2, max(start, start + count - replay)
        for position in range(settled, start + count):
            if position == cut:
                state_out[b], state_squares[b] = state, squares
            at = position - start + held
            q, k, v = mix(text[at - taps + 1 : at + 1], inputs, heads, size)
            beta, decay = gates(text[at], inputs, heads)
            state, squares = state * decay, squares * decay**2
            known = np.einsum("hd,hdm->hm", k.values, state)
            known_squares = np.einsum("hd,hdm->hm", k.squares, squares)
            state = state + np.einsum("hd,hm->hdm", k.values, (v.values - known) * beta)
            added = (v.squares + known_squares) * beta**2
            squares = squares + np.einsum("hd,hm->hdm", k.squares, added)
            if position >= start:
                y[b, position - start] = np.einsum("hd,hdm->hm", q.values, state)
                y_squares[b, position - start] = np.einsum("hd,hdm->hm", q.squares, squares)
        if not is_live:
            state_out[b], state_squares[b] = inputs["state"][b], 0.0
    unit, steps = epsilon(np.float32), (size + ROUNDINGS) * longest
    y, y_squares = (one.reshape(batch, count, heads * size) for one in (y, y_squares))
    stored = epsilon(new.dtype) * np.abs(y)
    return Expected(
        y,
        state_out,
        rows_out,
        relative(sum_error(steps, y_squares, unit) + stored, y),
        relative(sum_error(steps, state_squares, unit), state_out),
    )


def mix(
    window: Wide, inputs: Mapping[str, Array], heads: int, size: int
) -> tuple[Mixed, Mixed, Mixed]:
    """q, k and v of the last row of `window` [taps,C+2N], q and k by value head."""
    channels = inputs["kernel"].shape[0]
    keys = (channels - heads * size) // 2
    terms = window[:, :channels] * inputs["kernel"][:, 0].astype(np.float64).T
    sums, squares = terms.sum(0), (terms**2).sum(0)
    values = sums / (1 + np.exp(-sums))
    squares = squares + values**2
    found = []
    for at, scale in ((0, size**-0.5), (keys, 1.0)):
        one, own = (part[at : at + keys].reshape(-1, size) for part in (values, squares))
        factor = scale / np.sqrt((one * one).sum(-1, keepdims=True) + 1e-6)
        pair = (np.repeat(part, heads // len(one), 0) for part in (one * factor, own * factor**2))
        found.append(Mixed(*pair))
    v, own = (part[2 * keys :].reshape(heads, size) for part in (values, squares))
    return found[0], found[1], Mixed(v, own)


def gates(row: Wide, inputs: Mapping[str, Array], heads: int) -> tuple[Wide, Wide]:
    """beta [N,1] and the decay [N,1,1] of a row [C+2N]."""
    b, a = np.split(row[-2 * heads :], 2)
    log_decay = inputs["decay"] * np.logaddexp(0.0, a + inputs["time_bias"])
    return (1 / (1 + np.exp(-b)))[:, None], np.exp(log_decay)[:, None, None]
