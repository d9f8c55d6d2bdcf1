"""Independent reference for the graphs: transformers targets and a plain PyTorch DFlash drafter.

Nothing here imports `dflash_trt`; only torch, transformers, safetensors and numpy.
"""
