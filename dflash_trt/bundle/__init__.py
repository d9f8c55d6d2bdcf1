"""What `build` writes: manifest, graphs, weights, engines, tokenizer."""
