"""Runs engines: deserialised, held to the manifest, and enqueued pass by pass."""
