"""Runs engines: contexts, bindings, CUDA graphs, device caches."""
