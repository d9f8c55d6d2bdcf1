"""Serving: the model repository, the Triton models inside it, and the server that runs them."""
