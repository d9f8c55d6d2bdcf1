"""From a request to a bundle or a deployment: what `build` does."""
