"""Rung 1: the graphs' numbers and structure."""
