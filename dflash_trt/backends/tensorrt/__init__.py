"""The TensorRT back end: engines are built ahead of time and run on a GPU."""
