"""Predicted outputs: what a chat request says that its answer will be."""

from __future__ import annotations

from typing import Literal

from clients.openai.body import List, Strict, Text


class PredictedText(Strict):
    type: Literal["text"]
    text: Text


class Prediction(Strict):
    """OpenAI's predicted outputs: the text that the answer will be for the most part."""

    type: Literal["content"]
    content: Text | List[PredictedText]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
