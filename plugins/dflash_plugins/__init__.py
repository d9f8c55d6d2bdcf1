"""TensorRT plugins of DFlash: one folder per operation, each kernel written in Triton language.

`dflash_trt/graph/` defines an operation by a function of the same name; the kernel here computes
the same on a GPU. See plugins/README.md.
"""
