"""Bytes of weights, KV caches and workspace: whoever asks what fits where asks here."""
