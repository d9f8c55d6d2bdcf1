"""DSpark's Markov head: each slot's logits, moved by the token that the slot before chose."""

from __future__ import annotations

from onnx import TensorProto

from dflash_trt.graph.bindings import BLOCK_IDS
from dflash_trt.graph.form import Precision
from dflash_trt.graph.model_builder import ModelBuilder

CHOICE = "choice_{}"
"""Name of the node that chooses slot `{}`."""


def choose_in_turn(model: ModelBuilder, logits: str, vocab_size: int, slots: int) -> str:
    """The choices [B,n] of logits [B·n,V], n up to `slots`: argmax(logits + W2 W1[token before]).

    The token before the first is the anchor (arXiv 2607.05147). The chain is unrolled, as engines
    want it: in a call of fewer slots the rest choose again from the last, and are cut off.
    """
    b, rows = model.b, model.rows
    zero, one, axis = b.integers(0), b.integers(1), b.integers(1)
    blocks = b.node("Reshape", [logits, rows.shape(vocab_size)], "slot_logits")
    last = b.node("Sub", [rows.count, one], "last_slot")
    before = b.node("Slice", [BLOCK_IDS, zero, one, axis], "first_before")
    before = b.node("Reshape", [before, b.integers(-1)], "before")
    choices: list[str] = []
    for slot in range(slots):
        with b.scope(f"slot_{slot}"):
            index = b.node("Min", [b.integers(slot), last], "index")
            own = b.node("Gather", [blocks, index], "own", axis=1)
            own = b.node("Reshape", [own, b.integers(-1, vocab_size)], "own_rows")
            moved = model.linear(_first_factor(model, before), "markov_w2", residual=own)
        before = b.node("ArgMax", [moved], CHOICE.format(slot), axis=1, keepdims=0)
        choices.append(b.node("Unsqueeze", [before, axis], f"column_{slot}"))
    every = b.node("Concat", choices, "every_choice", axis=1)
    return b.node("Slice", [every, zero, rows.count, axis], "choices")


def _first_factor(model: ModelBuilder, tokens: str) -> str:
    """Rows [B,rank] of W1 for tokens [B]; on the CPU cast behind the lookup, as embeddings are."""
    b, role = model.b, "markov_w1"
    if b.form.precision is not Precision.FLOAT32:
        return b.node("Gather", [model.weight(role), tokens], "lookup", axis=0)
    x = b.node("Gather", [model.stored(role), tokens], "lookup", axis=0)
    if model.entry(role).dtype != "F32":
        x = b.node("Cast", [x], "rows", to=TensorProto.FLOAT)
    return x
