"""Trains drafts; `demo/` trains the demo pair. Needs the `train` extra (torch, transformers)."""
