"""Serving: the model repository, the Triton server models inside it, and the server that runs them."""
