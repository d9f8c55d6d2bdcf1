"""Checkpoints of any shape without trained weights, for measuring cost alone."""
