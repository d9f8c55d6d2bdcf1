"""A bundle as a worker of NVIDIA Dynamo, the engine that goes beyond one machine."""
