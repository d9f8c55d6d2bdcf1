"""The CPU back end: ONNX Runtime runs the graphs themselves."""
