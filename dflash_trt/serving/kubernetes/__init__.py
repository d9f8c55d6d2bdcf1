"""Manifests for a cluster that runs a bundle or a TensorRT-LLM deployment; none was applied."""
