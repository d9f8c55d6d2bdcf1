"""The planner: data, memory, physics and its answers."""
