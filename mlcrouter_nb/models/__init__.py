"""Model files: names and fetching, GGUF metadata, tokenizer, chat template. Imports nothing heavy."""
