"""Hostile inputs: a seed gives the same ones again, and each is run and judged by itself."""
