"""Runs a bundle's graphs with PyTorch, on a GPU without TensorRT or on the CPU."""
