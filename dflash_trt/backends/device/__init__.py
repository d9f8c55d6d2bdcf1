"""Runs passes on a device, whatever they are: bindings, captured steps, caches, steps ahead."""
