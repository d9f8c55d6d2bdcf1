"""Measurements of dflash-trt; recorded runs lie in perf/results/."""
