"""Shared by the tests and the GPU check: guarded memory, a measure of error, an interpreter."""
