"""Presents a plan in tables, charts and pages that mark every figure as a projection."""
