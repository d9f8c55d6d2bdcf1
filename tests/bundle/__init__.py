"""Tests of the bundle: what `build` writes, and what opening it trusts."""
