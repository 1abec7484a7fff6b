"""Text on the frontends' side: tokens in, tokens out, chat templates. No torch, no transformers."""

from engine.text.chat_template import ChatTemplate
from engine.text.detokenizer import Delta, Detokenizer
from engine.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Delta", "Detokenizer", "Tokenizer"]
