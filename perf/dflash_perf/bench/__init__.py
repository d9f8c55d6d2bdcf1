"""Benchmarks, run by `python -m dflash_perf bench NAME`; `registry.py` has all of them."""
