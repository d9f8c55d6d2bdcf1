"""GGUF files, llama.cpp's format, turned into Hugging Face checkpoints."""
