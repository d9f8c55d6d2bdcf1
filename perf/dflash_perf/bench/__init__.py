"""Benchmarks, run by `python -m dflash_perf bench NAME`."""
