"""Checkpoints of any shape without trained weights, to measure cost only."""
