"""Checkpoints without trained weights: of true shapes to measure cost, tiny ones to check a GPU."""
