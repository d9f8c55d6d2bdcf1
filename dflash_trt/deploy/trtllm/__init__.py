"""TensorRT-LLM deployments: files for `trtllm-serve` and Triton server, checked but not run."""
