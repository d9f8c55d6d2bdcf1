"""Slots stay compact, with as few moves as that takes."""

from __future__ import annotations

from dataclasses import replace

from dflash_trt.decoding.slots import SHORTEST_PREFIX, SlotTable
from dflash_trt.decoding.state import RequestState
from tests.decoding.reference import make_state


def fill(count: int) -> tuple[SlotTable, list[RequestState], list[tuple[int, int, int]]]:
    moves: list[tuple[int, int, int]] = []
    slots = SlotTable(4, lambda *move: moves.append(move))
    states = [make_state(10 * (index + 1), 3) for index in range(count)]
    for state in states:
        slots.place(state)
        slots.start_decoding()
    assert not moves
    return slots, states, moves


def test_the_last_used_rows_fill_a_hole() -> None:
    slots, states, moves = fill(4)
    assert not slots.can_place()
    assert slots.release(states[1])
    # 40 prompt rows and two of the three output tokens: the third is the anchor, not yet cached.
    assert moves == [(3, 1, 42)]
    assert slots.decoding == (states[0], states[3], states[2])
    assert slots.can_place()


def test_the_last_slot_empties_without_a_move() -> None:
    slots, states, moves = fill(3)
    assert slots.release(states[2])
    assert not moves and slots.decoding == tuple(states[:2])


def test_a_prefilling_request_moves_once_when_its_prompt_is_done() -> None:
    slots, states, moves = fill(3)
    late = make_state(7, 1)
    slots.place(late)
    assert (slots.prefill_slot, slots.can_place()) == (3, False)
    slots.release(states[2])
    slots.release(states[1])
    assert not moves and slots.prefill_slot == 3
    slots.start_decoding()
    assert moves == [(3, 1, 7)]
    assert slots.decoding == (states[0], late)


def test_releasing_who_has_no_slot() -> None:
    slots, _, moves = fill(2)
    prefilling = make_state(9)
    slots.place(prefilling)
    assert slots.release(prefilling) and slots.prefilling is None
    assert not slots.release(make_state(5))
    assert not moves


def test_what_another_has_of_a_prompt_is_copied() -> None:
    slots, states, moves = fill(3)
    assert SHORTEST_PREFIX == 16
    like = replace(states[2].request, prompt_ids=(*states[2].request.prompt_ids[:25], 1, 2, 3))
    late = replace(make_state(28), request=like)
    slots.place(late)
    slots.copy_prefix()
    assert moves == [(2, 3, 25)] and late.prefilled == 25
    slots.start_decoding()
    slots.release(late)
    few = replace(states[2].request, prompt_ids=(*states[2].request.prompt_ids[:15], 1, 2, 3))
    slots.place(replace(make_state(18), request=few))
    slots.copy_prefix()
    assert len(moves) == 1
