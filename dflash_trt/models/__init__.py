"""Reading Hugging Face checkpoints without loading a weight: headers, configs, families, pairs."""
