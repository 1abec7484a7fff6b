"""The demo checkpoint: a small Qwen3-shaped model that reads as language, and how it was trained."""
