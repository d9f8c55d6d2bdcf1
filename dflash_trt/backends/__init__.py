"""Back ends: one interface (base.py), a folder per library that runs the graphs."""
