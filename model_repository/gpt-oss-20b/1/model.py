"""A language model: vllm_backend's tensors over Nereid's engine. Settings stand in config.pbtxt."""

from engine.serving.llm_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
