"""Text to token ids and back: tokenizer, chat templates, harmony channels, prompt files."""
