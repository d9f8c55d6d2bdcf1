"""`doctor --gpu-check`: all that meets a GPU for the first time, part by part, and its record."""
