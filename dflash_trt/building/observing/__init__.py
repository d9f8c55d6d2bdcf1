"""What a model's linears read on calibration text: the ranges that activations are quantised in."""
