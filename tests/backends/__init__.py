"""Rung 2 at the executor: bits, caches in place, bindings, errors."""
