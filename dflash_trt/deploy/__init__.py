"""Deployments: TensorRT-LLM folders, and projections of what hardware gives."""
