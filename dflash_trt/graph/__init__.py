"""The ONNX graphs of a pair: target, draft and target_only."""
