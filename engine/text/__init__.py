"""Text on the frontends' side: tokens in, tokens out, chat templates. No torch, no transformers."""

from engine.text.chat_template import ChatTemplate, read_templates
from engine.text.detokenizer import Delta, Detokenizer
from engine.text.template_marks import TemplateMarks, template_marks
from engine.text.tokenizer import LARGE_TEXT, Tokenizer

__all__ = [
    "LARGE_TEXT",
    "ChatTemplate",
    "Delta",
    "Detokenizer",
    "TemplateMarks",
    "Tokenizer",
    "read_templates",
    "template_marks",
]
