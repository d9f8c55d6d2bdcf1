"""The Triton server side: models, repository, launcher."""
