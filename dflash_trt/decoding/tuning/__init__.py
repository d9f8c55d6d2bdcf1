"""Measures which block is fastest here, and keeps the schedule in the bundle."""
