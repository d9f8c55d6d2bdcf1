"""Narrow number formats in NumPy, and checkpoints written in them: FP8, NVFP4, MXFP4."""
