"""GGUF files as checkpoints: what of their metadata is a config.json, which tensor is which, and their tokenizers."""
