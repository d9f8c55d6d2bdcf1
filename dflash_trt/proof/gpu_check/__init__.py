"""`doctor --gpu-check`: all that meets a GPU for the first time, part by part, and its record.

The record moves a feature from rung 3 (built) to rung 5 (run), so it holds all that is needed to
read it: machine, versions, date and every figure.
"""
