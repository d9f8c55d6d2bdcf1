"""TensorRT plugins of DFlash: one folder per operation, each kernel written in Triton language.

An operation is defined by the function of the same name in `dflash_trt/graph/`; what is here
repeats that definition on a GPU. See plugins/README.md.
"""
