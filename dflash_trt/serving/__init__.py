"""Serving: the model repository, the Triton server models in it, and the server that runs them."""
