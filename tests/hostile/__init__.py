"""Hostile inputs: a seed gives the same ones again, each is run and judged by itself.

A module per kind of input; each has `COUNT` and `make(random, number)`, which describes an input
and runs nothing. `python -m tests.hostile` runs them (`runner.py`) and says which ended otherwise
than an input may (`case.py`).
"""
