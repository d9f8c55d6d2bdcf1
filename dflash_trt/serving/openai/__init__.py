"""OpenAI's API before a Triton server."""
