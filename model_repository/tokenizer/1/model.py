"""Text or chat messages to token ids, and token ids to text."""

from engine.serving.tokenizer_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
